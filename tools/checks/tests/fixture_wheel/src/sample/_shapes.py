# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Classes that the package re-exports."""

import enum
from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypedDict

from sample._stability import deprecated, experimental_api, pep702_deprecated

Size = int | float


class Base:
    def __init__(self, name: str = "base") -> None:
        self.name = name

    def describe(self) -> str:
        return self.name


class Circle(Base):
    sides: int = 0
    _cache: ClassVar[dict[str, int]] = {}

    def area(self, radius: float, *, precise: bool = False) -> float:
        return 3.0 * radius * radius

    @classmethod
    def unit(cls, name: str) -> "Circle":
        return cls(name)

    @staticmethod
    def count(items: list[int]) -> int:
        return len(items)

    @property
    def label(self) -> str:
        return self.name

    @property
    def weight(self) -> float:
        return 1.0

    @weight.setter
    def weight(self, value: float) -> None:
        pass

    async def load(self, path: str) -> bytes:
        return path.encode()

    def _private(self, x: int) -> int:
        return x


class Table(OrderedDict[str, int]):
    def total(self) -> int:
        return sum(self.values())

    def copy(self) -> "Table":
        return self


class Failure(OSError):
    pass


class Empty:
    pass


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(kw_only=True)
class DrawConfig:
    width: int
    title: str = ""


@dataclass
class Point:
    x: int
    y: int = 0


class Pair(NamedTuple):
    left: int
    right: str = ""


class Options(TypedDict, total=False):
    depth: int


class Drawable(Protocol):
    size: int

    def draw(self, canvas: str) -> int: ...


class Plugin(ABC):
    @abstractmethod
    def run(self, task: str) -> int: ...

    def stop(self) -> None:
        raise NotImplementedError


@experimental_api
class Draft:
    def sketch(self, x: int) -> int:
        return x


@deprecated(version="0.1.0", removal_version="0.3.0", alternative="Circle")
@pep702_deprecated("use Circle")
class Ellipse:
    def flatten(self, x: int) -> int:
        return x
