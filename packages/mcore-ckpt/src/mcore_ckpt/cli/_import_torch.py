# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt import-torch``."""

import argparse
import sys
from pathlib import Path

from mcore_ckpt.cli._parts import Commands
from mcore_ckpt.foreign import import_torch

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = commands.add_parser("import-torch", help="make a checkpoint of one file of torch.save; nothing in it is run")
    command.add_argument("file", type=Path, help="such as pytorch_model.bin or mp_rank_00/model_optim_rng.pt")
    command.add_argument("output", help="folder to create")
    command.add_argument("--prefix", default="", help="what to put before the names of tensors")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    left = import_torch(options.file, options.output, prefix=options.prefix)
    if left:
        print(f"left out, because they are neither tensors nor JSON values: {', '.join(sorted(left))}", file=sys.stderr)
    return 0
