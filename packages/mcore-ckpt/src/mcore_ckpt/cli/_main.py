# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The command's verbs together, and one line for what goes wrong."""

import sys
from collections.abc import Sequence

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt.cli import _exchange, _inspect, _rewrite
from mcore_ckpt.cli._arguments import CommandParser, ShowVersion, exit_code
from mcore_ckpt.cli._quiet_pipe import quiet_pipe

__all__ = ["main"]

_VERBS = (_inspect, _rewrite, _exchange)


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (None for the process's own) and return its exit status."""
    parser = CommandParser(prog="mcore-ckpt", description="Look at, check and convert checkpoints.")
    parser.add_argument("--version", action=ShowVersion, help="show the version of mcore-ckpt and end")
    commands = parser.add_subparsers(required=True, metavar="command")
    for verbs in _VERBS:
        verbs.add_verbs(commands)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except BrokenPipeError:
        raise
    except (CheckpointingException, ValueError, OSError) as error:
        reason = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        print(f"error: {reason}", file=sys.stderr)
        return exit_code(error)
