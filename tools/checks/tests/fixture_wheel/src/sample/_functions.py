# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Functions that the package re-exports."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TypeVar, overload

from sample._shapes import Base, Circle
from sample._stability import deprecated, experimental_api, internal_api, pep702_deprecated

T = TypeVar("T")


def scale(values: Sequence[int], factor: int, offset: int = 0, *, strict: bool = True) -> list[int]:
    """Scales and shifts."""
    return [factor * value + offset for value in values]


def first(items: Sequence[T], default: T | None = None) -> T | None:
    return items[0] if items else default


def pick(mode: Literal["fast", "exact"], base: Base) -> Base | None:
    return base if mode == "fast" else None


def bare(x, y=1):
    return x + y


async def fetch(name: str) -> bytes:
    return name.encode()


def stream(name: str) -> Iterator[str]:
    yield name


@contextmanager
def opened(name: str) -> Iterator[str]:
    yield name


def untyped_rows(count):
    return list(range(count))


@overload
def parse(text: str) -> str: ...
@overload
def parse(text: bytes) -> bytes: ...
def parse(text):
    return text


def apply(function: Callable[[int], int], shape: Circle) -> int:
    return function(shape.sides)


def helper_of_nobody(x: int) -> int:
    return x


def spread(*values: int, **options: str) -> Iterable[int]:
    return values


@experimental_api
def trial(x: int) -> int:
    return x


@internal_api
def inner(x: int) -> int:
    return x


@deprecated(version="0.1.0", removal_version="0.3.0", alternative="sample.scale")
@pep702_deprecated("use sample.scale")
def old_scale(values: Sequence[int]) -> list[int]:
    return list(values)
