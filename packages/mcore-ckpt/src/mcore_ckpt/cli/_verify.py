# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt verify``."""

import argparse

from mcore_ckpt.cli._parts import Commands, add_source
from mcore_ckpt.cli._progress import progress
from mcore_ckpt.inspect import summarize, verify

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = commands.add_parser("verify", help="compare every byte with the manifest")
    add_source(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    summary = summarize(options.directory)
    with progress("verifying", summary.num_bytes) as on_bytes:
        problems = verify(summary.directory, on_bytes=on_bytes)
    for problem in problems:
        print(problem)
    if not problems:
        print(f"{summary.directory}: sound")
    return 1 if problems else 0
