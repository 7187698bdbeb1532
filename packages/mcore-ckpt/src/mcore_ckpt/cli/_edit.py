# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore-ckpt edit``."""

import argparse
import re
from collections.abc import Callable

from mcore_ckpt._errors import list_names
from mcore_ckpt.cli._copy import add_copy, copy
from mcore_ckpt.cli._parts import Commands, choose
from mcore_ckpt.inspect import summarize
from mcore_ckpt.rewrite import Rewrite

__all__ = ["add_to"]


def add_to(commands: Commands) -> None:
    """Add the verb."""
    command = add_copy(commands, "edit", "copy a checkpoint with tensors renamed or dropped")
    pair = {"nargs": 2, "action": "append", "default": [], "metavar": ("OLD", "NEW")}
    help_rename = r"regular expression for whole names, and the new name (\1 for the first group); the first that fits counts"
    command.add_argument("--rename", help=help_rename, **pair)
    command.add_argument("--drop", action="append", default=[], metavar="PATTERN", help="leave out what matches, such as 'optimizer.*'")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if not options.rename and not options.drop:
        raise ValueError("nothing to edit; give --rename OLD NEW or --drop PATTERN")
    names = list(summarize(options.directory).manifest.tensors)
    dropped = choose(names, options.drop)
    return copy(options, Rewrite(rename=_renaming(names, dropped, options.rename)))


def _renaming(names: list[str], dropped: set[str], pairs: list[list[str]]) -> Callable[[str], str | None]:
    table: dict[str, str] = {}
    for old, new in pairs:
        try:
            pattern = re.compile(old)
            found = {name: match.expand(new) for name in names if name not in dropped and (match := pattern.fullmatch(name))}
        except (re.error, IndexError) as error:
            raise ValueError(f"--rename {old!r} {new!r}: {error}") from error
        if not found:
            raise ValueError(f"--rename: no tensor is called {list_names([old], names)}")
        table = found | table
    return lambda name: None if name in dropped else table.get(name, name)
