# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The command's verbs together, and one line for what goes wrong."""

import argparse
import sys
from collections.abc import Sequence

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt.cli import (
    _assets,
    _convert,
    _diff,
    _edit,
    _extract,
    _hugging_face,
    _import_torch,
    _inspect,
    _megatron,
    _reshard,
    _restack,
    _verify,
)

__all__ = ["main"]

_VERBS = (_inspect, _verify, _diff, _extract, _assets, _edit, _reshard, _convert, _hugging_face, _import_torch, _megatron, _restack)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (None for the process's own) and return its exit status."""
    parser = argparse.ArgumentParser(prog="mcore-ckpt", description="Look at, check and convert checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for verb in _VERBS:
        verb.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (CheckpointingException, ValueError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"mcore-ckpt: {reason}", file=sys.stderr)
        return 2
