# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Command lines: values that are checked as they are read, and one line for what cannot be."""

import argparse
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn

from mcore_tools.torchrun import report_error


class Parser(argparse.ArgumentParser):
    """A parser that shows its module's docstring as it stands, and refuses in one line with exit code 2."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--version", action=_ShowVersion, help="show the version of mcore-tools and end")

    def error(self, message: str) -> NoReturn:
        report_error(f"{message.removeprefix('argument ')}; {self.prog} --help lists what there is")
        raise SystemExit(2)


class _ShowVersion(argparse.Action):
    """Prints the version of the application and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        # Where it is asked for alone: a clone that is not installed has none.
        print(f"mcore-tools {version('mcore-tools')}")
        parser.exit()


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """A whole number of at least ``least`` and at most ``most``.

    Example:
        >>> integer(0, 65_535)("8000")
        8000
    """

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{value} must be {f'at least {least}' if most is None else f'{least} to {most}'}")
        return value

    return read


def number(*, least: float | None = None, above: float | None = None) -> Callable[[str], float]:
    """A finite number of at least ``least``, or above ``above``.

    Example:
        >>> number(above=0)("0.5")
        0.5
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text!r} must be a finite number")
        if least is not None and value < least:
            raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
        if above is not None and value <= above:
            raise argparse.ArgumentTypeError(f"{text} must be above {above}")
        return value

    return read


def file(text: str) -> Path:
    """A file that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is {'a folder' if path.is_dir() else 'no file'}; give the path of a file")
    return path


def folder(text: str) -> Path:
    """A folder that is there."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; check the path")
    return path


def new_file(text: str) -> Path:
    """A file that can be made, or written over."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; add the name of a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} has no folder to lie in; make {path.parent} first")
    return path


def endpoint(text: str) -> str:
    """The address of a process, ``tcp://host:port``."""
    if not re.fullmatch(r"tcp://[^\s/]+:\d{1,5}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; it looks like tcp://127.0.0.1:5000")
    return text


def secret(text: str) -> str:
    """What a file holds, without the space around it."""
    words = file(text).read_text(encoding="utf-8").strip()
    if not words:
        raise argparse.ArgumentTypeError(f"{text!r} is empty; write the secret into it")
    return words


def add_fields(
    parser: argparse.ArgumentParser,
    table: Mapping[str, tuple[str, str]],
    owner: type,
    *,
    metavars: Mapping[str, str] | None = None,
    files: Collection[str] = (),
) -> None:
    """A flag for each of these fields of a dataclass, which says their types and ranges. None where it is not given; a field of
    several values may be given again, and one that is True or False has no value: False for flags that begin with ``--no-``.

    Args:
        parser: gets the flags.
        table: by flag, the field and what it is for.
        owner: the dataclass; a value is checked by making one with it alone.
        metavars: by field, what a value is called; ``N`` is a number, ``ID`` one of several.
        files: fields whose value is what a file holds.
    """
    hints = typing.get_type_hints(owner)
    for flag, (field, text) in table.items():
        kind, repeats = _kind(hints[field])
        if kind is bool:
            parser.add_argument(flag, action="store_const", const=not flag.startswith("--no-"), help=text)
            continue
        metavar = (metavars or {}).get(field, "ID" if repeats else "N")
        read = _reader(owner, field, kind, repeats=repeats, is_file=field in files)
        parser.add_argument(flag, action="append" if repeats else "store", metavar=metavar, type=read, help=text)


def option_name(flag: str) -> str:
    """Where argparse puts the value of a flag.

    Example:
        >>> option_name("--top-k")
        'top_k'
    """
    return flag.removeprefix("--").replace("-", "_")


def given_flags(options: argparse.Namespace, flags: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Those flags that were given, and their values."""
    for flag in flags:
        if (value := getattr(options, option_name(flag), None)) is not None:
            yield flag, value


def _kind(hint: Any) -> tuple[type, bool]:
    """The type of one value of a field, and whether the field holds several."""
    if isinstance(hint, type) and typing.get_origin(hint) is None:
        return hint, False
    parts = [part for part in typing.get_args(hint) if part not in (type(None), ...)]
    if typing.get_origin(hint) is Literal:
        return type(parts[0]), False
    if typing.get_origin(hint) in (tuple, Collection):
        return parts[0], True
    # Of a union the last: a schema may be a mapping, or its text.
    return _kind(parts[-1])


def _reader(owner: type, field: str, kind: type, *, repeats: bool, is_file: bool) -> Callable[[str], Any]:
    """What makes a value of a word, or says what its field takes."""

    def read(text: str) -> Any:
        words = file(text).read_text(encoding="utf-8") if is_file else text
        try:
            value = kind(words)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be {'a whole number' if kind is int else 'a number'}") from None
        try:
            owner(**{field: [value] if repeats else value})
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return value

    return read
