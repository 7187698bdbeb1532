# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The verbs that copy a checkpoint: ``edit``, ``reshard``, ``convert``, ``to-hybrid``, ``to-uniform``."""

import argparse
import re
import sys
from collections.abc import Callable

from mcore_ckpt._errors import list_names
from mcore_ckpt._formats import FORMATS
from mcore_ckpt.cli._arguments import Commands, add_source, add_verify, choose, progress
from mcore_ckpt.inspect import resolve_checkpoint, summarize
from mcore_ckpt.restack import to_hybrid, to_uniform
from mcore_ckpt.rewrite import Rewrite, rewrite

__all__ = ["add_verbs"]


def add_verbs(commands: Commands) -> None:
    """Add the verbs of this file."""
    _add_edit(commands)
    _add_reshard(commands)
    _add_convert(commands)
    _add_restack(commands)


def _add_copy(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    """A verb that reads one checkpoint and writes another."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    add_source(command)
    command.add_argument("output", help="folder to create, or address of an object store")
    add_verify(command)
    return command


def _copy(options: argparse.Namespace, changes: Rewrite) -> int:
    """Rewrite with ``changes``; says what it leaves out."""
    summary = summarize(options.directory)
    tensors = sum(tensor.num_bytes for tensor in summary.manifest.tensors.values())
    with progress("rewriting", tensors + (summary.num_bytes if options.verify else 0)) as on_bytes:
        left = rewrite(summary.directory, options.output, changes, verify=options.verify, on_bytes=on_bytes)
    if left:
        print(f"left out, because they are neither tensors nor JSON values: {', '.join(left)}", file=sys.stderr)
    return 0


def _add_edit(commands: Commands) -> None:
    command = _add_copy(commands, "edit", "copy a checkpoint with tensors renamed or dropped")
    pair = {"nargs": 2, "action": "append", "default": [], "metavar": ("OLD", "NEW")}
    help_rename = r"regular expression for whole names, and the new name (\1 for the first group); the first that fits counts"
    command.add_argument("--rename", help=help_rename, **pair)
    command.add_argument("--drop", action="append", default=[], metavar="PATTERN", help="leave out what matches, such as 'optimizer.*'")
    command.set_defaults(run=_run_edit)


def _run_edit(options: argparse.Namespace) -> int:
    if not options.rename and not options.drop:
        raise ValueError("nothing to edit; give --rename OLD NEW or --drop PATTERN")
    names = list(summarize(options.directory).manifest.tensors)
    dropped = choose(names, options.drop)
    return _copy(options, Rewrite(rename=_renaming(names, dropped, options.rename)))


def _renaming(names: list[str], dropped: set[str], pairs: list[list[str]]) -> Callable[[str], str | None]:
    table: dict[str, str] = {}
    for old, new in pairs:
        try:
            pattern = re.compile(old)
            renamed = {name: match.expand(new) for name in names if name not in dropped and (match := pattern.fullmatch(name))}
        except (re.error, IndexError) as error:
            raise ValueError(f"--rename {old!r} {new!r}: {error}") from error
        if not renamed:
            raise ValueError(f"--rename: no tensor is called {list_names([old], names)}")
        table = renamed | table
    return lambda name: None if name in dropped else table.get(name, name)


def _add_reshard(commands: Commands) -> None:
    command = _add_copy(commands, "reshard", "copy a checkpoint into other files; every layout loads from any, this only saves reading")
    command.add_argument("--parts", type=int, required=True, metavar="N", help="cut along the first dim, as N ranks of Shard(0) hold it")
    command.add_argument("--max-file-mib", type=int, default=4096, metavar="MIB", help="MiB in a file (default: %(default)s)")
    command.set_defaults(run=_run_reshard)


def _run_reshard(options: argparse.Namespace) -> int:
    form = summarize(options.directory).stored_format
    return _copy(options, Rewrite(format=form, num_parts=options.parts, max_file_bytes=options.max_file_mib * 2**20))


def _add_convert(commands: Commands) -> None:
    command = _add_copy(commands, "convert", "copy a checkpoint, also one of torch.distributed.checkpoint, into a format")
    command.add_argument("--to", required=True, choices=FORMATS, help="what to write")
    command.set_defaults(run=_run_convert)


def _run_convert(options: argparse.Namespace) -> int:
    return _copy(options, Rewrite(format=options.to))


def _add_restack(commands: Commands) -> None:
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
