# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt inspect``."""

import argparse
import json

from mcore_ckpt.cli._parts import Commands, add_source
from mcore_ckpt.inspect import summarize

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = commands.add_parser("inspect", help="list the tensors of a checkpoint")
    add_source(command)
    command.add_argument("--json", action="store_true", help="everything in the manifest, as JSON")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    summary = summarize(options.directory)
    print(json.dumps(summary.to_json(), indent=1) if options.json else summary.to_table())
    return 0
