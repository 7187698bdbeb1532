# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt extract-assets``."""

import argparse
from pathlib import Path

from mcore_ckpt.assets import extract_assets
from mcore_ckpt.cli._parts import Commands, add_source
from mcore_ckpt.inspect import resolve_folder

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = commands.add_parser("extract-assets", help="write the files kept beside the tensors, such as the tokenizer's")
    add_source(command)
    command.add_argument("output", type=Path, help="folder; no file in it is overwritten")
    command.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN", help="such as 'tokenizer/*'; default: all")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    for path in extract_assets(resolve_folder(options.directory), options.output, options.patterns):
        print(path)
    return 0
