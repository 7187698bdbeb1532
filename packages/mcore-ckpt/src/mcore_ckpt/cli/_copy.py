# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The work that edit, reshard and convert share: one checkpoint rewritten as another."""

import argparse
import sys

from mcore_ckpt.cli._parts import Commands, add_source, add_verify
from mcore_ckpt.cli._progress import progress
from mcore_ckpt.inspect import summarize
from mcore_ckpt.rewrite import Rewrite, rewrite

__all__ = ["add_copy", "copy"]


def add_copy(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """A verb that reads one checkpoint and writes another."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    add_source(command)
    command.add_argument("output", help="folder to create, or address of an object store")
    add_verify(command)
    return command


def copy(options: argparse.Namespace, changes: Rewrite) -> int:
    """Rewrite with ``changes``; says what it leaves out."""
    summary = summarize(options.directory)
    tensors = sum(tensor.num_bytes for tensor in summary.manifest.tensors.values())
    with progress("rewriting", tensors + (summary.num_bytes if options.verify else 0)) as on_bytes:
        left = rewrite(summary.directory, options.output, changes, verify=options.verify, on_bytes=on_bytes)
    if left:
        print(f"left out, because they are neither tensors nor JSON values: {', '.join(left)}", file=sys.stderr)
    return 0
