# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt to-hybrid`` and ``to-uniform``."""

import argparse

from mcore_ckpt.cli._parts import Commands, add_source
from mcore_ckpt.inspect import resolve_checkpoint
from mcore_ckpt.restack import to_hybrid, to_uniform

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verbs."""
    for name, convert, text in (
        ("to-hybrid", to_hybrid, 'rename layers of attention and feed-forward to a stack of the pattern "*-*-..."'),
        ("to-uniform", to_uniform, 'rename a stack of the pattern "*-*-..." to layers of attention and feed-forward'),
    ):
        command = commands.add_parser(name, help=text)
        add_source(command)
        command.add_argument("output", help="folder to create")
        command.set_defaults(run=_restack, convert=convert)


def _restack(options: argparse.Namespace) -> int:
    options.convert(resolve_checkpoint(options.directory), options.output)
    return 0
