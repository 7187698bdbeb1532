# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The numbers of a run's steps, in memory that does not grow with the run."""

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Of one curve; the plots draw as many points. The newest rows are those that an estimate of the time left looks at.
_MAX_BUCKETS, _NUM_RECENT = 480, 20

Point = tuple[int, float]


class Curve:
    """The values of one number by step: all of them while they are few, then the lowest and the highest of each run of steps.

    A bucket holds the two extremes of ``width`` neighbouring points. When the buckets are full, neighbours merge and the width doubles,
    so that every part of the curve is drawn as finely as every other, and no peak is lost.
    """

    def __init__(self) -> None:
        self._buckets: list[tuple[Point, ...]] = []
        self._width, self._num_open = 2, 0
        self._newest: Point | None = None

    def add(self, step: int, value: float) -> None:
        """Append a point; steps rise."""
        self._newest = (step, value)
        if self._num_open in (0, self._width):
            if len(self._buckets) == _MAX_BUCKETS:
                self._merge()
            self._buckets.append(())
            self._num_open = 0
        self._buckets[-1] = _extremes((*self._buckets[-1], self._newest))
        self._num_open += 1

    def cut(self, step: int) -> None:
        """Forget the points of this step and those after it."""
        self._buckets = [bucket for points in self._buckets if (bucket := tuple(point for point in points if point[0] < step))]
        self._newest = self._buckets[-1][-1] if self._buckets else None
        self._num_open = self._width if self._buckets else 0

    def points(self) -> list[Point]:
        """What is kept, by step, the newest point always."""
        points = [point for bucket in self._buckets for point in bucket]
        return points if self._newest is None or points[-1] == self._newest else [*points, self._newest]

    def _merge(self) -> None:
        pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
        self._buckets = [_extremes((*first, *second)) for first, second in pairs]
        self._width *= 2


class History:
    """Keeps the curve of each number, and the newest rows; a writer like the others."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self.recent: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=_NUM_RECENT)
        """Step and numbers of the newest rows, oldest first."""

    @classmethod
    def read(cls, path: Path, before: int) -> "History":
        """What ``JsonLinesWriter`` wrote of the first steps; of steps that were done twice, the later; a line cut short is left out.

        Args:
            path: of the file; nothing when there is none.
            before: the last step.
        """
        history = cls()
        history.extend(path, before)
        return history

    def extend(self, path: Path, before: int) -> None:
        """Add what ``read`` takes."""
        if path.exists():
            with path.open(encoding="ascii") as lines:
                for step, values in _rows(lines):
                    if step <= before:
                        self.write(step, values)

    @property
    def names(self) -> list[str]:
        """Of all numbers so far."""
        return list(self._curves)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if self.recent and step <= self.recent[-1][0]:
            self._cut(step)
        for name, value in values.items():
            self._curves.setdefault(name, Curve()).add(step, value)
        self.recent.append((step, dict(values)))

    def close(self) -> None:
        pass

    def curve(self, name: str) -> tuple[list[float], list[float]]:
        """Steps and values; both empty for a name that never came."""
        points = self._curves[name].points() if name in self._curves else []
        return [float(step) for step, _ in points], [value for _, value in points]

    def _cut(self, step: int) -> None:
        """A run went back: what it did from this step on is done again."""
        for curve in self._curves.values():
            curve.cut(step)
        self.recent = deque((row for row in self.recent if row[0] < step), maxlen=_NUM_RECENT)


def _rows(lines: Iterable[str]) -> Iterable[tuple[int, dict[str, float]]]:
    for line in lines:
        try:
            values: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            continue
        step = int(values.pop("step"))
        yield step, {name: float("nan") if value is None else value for name, value in values.items()}


def _extremes(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The lowest and the highest, by step; finite ones before others."""
    if len(points) <= 2:
        return points
    finite = [point for point in points if math.isfinite(point[1])]
    if len(finite) < 2:
        return tuple(sorted([*finite, *(point for point in points if not math.isfinite(point[1]))][:2], key=lambda point: point[0]))
    low = min(finite, key=lambda point: point[1])
    high = max(reversed(finite), key=lambda point: point[1])
    return (low, high) if low[0] < high[0] else (high, low)
