# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What several verbs share: arguments, choosing tensors by pattern, and progress on standard error."""

import argparse
import contextlib
import fnmatch
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import torch

from mcore_ckpt._errors import list_names
from mcore_ckpt._storage import dtype_of

__all__ = [
    "DTYPES",
    "CommandParser",
    "Commands",
    "ShowVersion",
    "add_dtype",
    "add_source",
    "add_verify",
    "check_new",
    "choose",
    "chosen_dtype",
    "exit_code",
    "progress",
    "read_settings",
]


class CommandParser(argparse.ArgumentParser):
    """A parser that refuses in one line, with exit code 2; those of its verbs do so too."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message.removeprefix('argument ')}; {self.prog} --help lists what there is", file=sys.stderr)
        raise SystemExit(2)


class ShowVersion(argparse.Action):
    """Prints the version of the wheel and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, default=argparse.SUPPRESS, nargs=0, **options)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        # Where it is asked for alone: a clone that is not installed has none.
        print(f"mcore-ckpt {version('mcore-ckpt')}")
        parser.exit()


def exit_code(error: Exception) -> int:
    """Of a command that ``error`` ends: 1 where the system failed while it worked, 2 where an input cannot be used."""
    # Of those that the system raises, what a path that was given can mean.
    paths = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
    return 1 if isinstance(error, OSError) and not isinstance(error, paths) else 2


Commands = Any
"""What argparse returns from ``add_subparsers``; it has no public name."""

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def add_source(command: argparse.ArgumentParser, name: str = "directory") -> None:
    """A checkpoint to read."""
    command.add_argument(name, help="a checkpoint, or a folder of steps (its newest)")


def add_verify(command: argparse.ArgumentParser) -> None:
    """Whether to compare what is read with its digests."""
    command.add_argument("--no-verify", dest="verify", action="store_false", help="do not compare the files with their SHA-256 first")


def add_dtype(command: argparse.ArgumentParser) -> None:
    """An element type to convert to."""
    command.add_argument("--dtype", choices=sorted(DTYPES), help="convert to it; default: keep")


def chosen_dtype(options: argparse.Namespace) -> torch.dtype | None:
    """The type of `add_dtype`, None to keep what there is."""
    return None if options.dtype is None else dtype_of(DTYPES[options.dtype])


def check_new(output: str | Path) -> None:
    """That a folder may be made.

    Raises:
        ValueError: something lies there.
    """
    path = Path(output)
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise ValueError(f"{output} exists and is not an empty folder; choose another or remove it")


def choose(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """The names that match one of some shell patterns.

    Raises:
        ValueError: a pattern that no name matches.
    """
    names, chosen = list(names), set[str]()
    for pattern in patterns:
        matches = [name for name in names if name == pattern] or fnmatch.filter(names, pattern)
        if not matches:
            raise ValueError(f"no tensor is called {list_names([pattern], names)}")
        chosen.update(matches)
    return chosen


def read_settings(path: str | Path, option: str = "--config") -> dict[str, Any]:
    """The JSON object in the file of an option.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        config = json.loads(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{option} {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{option} {path} holds a {type(config).__name__}; give an object of settings")
    return config


_QUIET_S = 2.0
"""What is over sooner says nothing; lines follow one another no faster."""


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that is told of bytes as they pass; ``total`` are expected.

    A bar where standard error is a terminal and rich is installed, else a line every few seconds.
    """
    if sys.stderr.isatty():
        try:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        except ImportError:
            pass
        else:
            from rich.console import Console

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(text, total=total)
                yield lambda count: bar.advance(task, count)
            return
    yield _ProgressLines(text, total)


class _ProgressLines:
    """Progress as lines of text."""

    def __init__(self, text: str, total: int) -> None:
        self._text, self._total, self._done = text, total, 0
        self._start = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last >= _QUIET_S:
            self._last = now
            share = min(100, 100 * self._done // max(1, self._total))
            rate = self._done / 2**20 / (now - self._start)
            print(f"{self._text}: {share}% of {self._total / 2**20:.0f} MiB, {rate:.0f} MiB/s", file=sys.stderr, flush=True)
