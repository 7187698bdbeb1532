# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt convert``."""

import argparse

from mcore_ckpt._formats import FORMATS
from mcore_ckpt.cli._copy import add_copy, copy
from mcore_ckpt.cli._parts import Commands
from mcore_ckpt.rewrite import Rewrite

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = add_copy(commands, "convert", "copy a checkpoint, also one of torch.distributed.checkpoint, into a format")
    command.add_argument("--to", required=True, choices=FORMATS, help="what to write")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return copy(options, Rewrite(format=options.to))
