# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The commands' parser, and their exit codes."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses in one line, with exit code 2, and knows ``--version``."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description)
        self.add_argument("--version", action=_ShowVersion, help="show the version of mcore-parallel and end")

    def error(self, message: str) -> NoReturn:
        print(f"error: {message.removeprefix('argument ')}; {self.prog} --help lists what there is", file=sys.stderr)
        raise SystemExit(2)


class _ShowVersion(argparse.Action):
    """Prints the version of the wheel and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        # Where it is asked for alone: a clone that is not installed has none.
        print(f"mcore-parallel {version('mcore-parallel')}")
        parser.exit()


def exit_code(error: Exception) -> int:
    """Of a command that ``error`` ends: 1 where the system failed while it worked, 2 where an input cannot be used."""
    # Of those that the system raises, what a path that was given can mean.
    paths = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
    return 1 if isinstance(error, OSError) and not isinstance(error, paths) else 2
