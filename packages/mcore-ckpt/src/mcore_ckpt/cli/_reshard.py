# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt reshard``."""

import argparse

from mcore_ckpt.cli._copy import add_copy, copy
from mcore_ckpt.cli._parts import Commands
from mcore_ckpt.inspect import summarize
from mcore_ckpt.rewrite import Rewrite

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = add_copy(commands, "reshard", "copy a checkpoint into other files; every layout loads from any, this only saves reading")
    command.add_argument("--parts", type=int, required=True, metavar="N", help="cut along the first dim, as N ranks of Shard(0) hold it")
    command.add_argument("--max-file-mib", type=int, default=4096, metavar="MIB", help="data in a file before the next is begun")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    form = summarize(options.directory).stored_format
    return copy(options, Rewrite(format=form, num_parts=options.parts, max_file_bytes=options.max_file_mib * 2**20))
