# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How many sequences a step takes, as a pure function of those consumed before."""

import re
from dataclasses import dataclass
from typing import Protocol

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ENTRY = re.compile(r"([0-9]+)([KMBT]?):([0-9]+)", re.IGNORECASE)


class BatchSizeSchedule(Protocol):
    """Global batch sizes of a run."""

    def size(self, consumed_samples: int) -> int:
        """Sequences of the next step over all replicas, after ``consumed_samples``."""
        ...

    def sizes(self) -> tuple[int, ...]:
        """Every size there is, in order; a run checks all of them before it begins."""
        ...


@dataclass(frozen=True, kw_only=True)
class ConstantBatchSize:
    """The same for every step."""

    global_batch_size: int

    def __post_init__(self) -> None:
        _positive(global_batch_size=self.global_batch_size)

    def size(self, consumed_samples: int) -> int:
        """Sequences of the next step."""
        return self.global_batch_size

    def sizes(self) -> tuple[int, ...]:
        """Every size."""
        return (self.global_batch_size,)


@dataclass(frozen=True, kw_only=True)
class BatchRampUp:
    """From ``start`` by ``increment`` to ``global_batch_size``, in equal shares of the first ``ramp_samples``.

    With n = (global_batch_size - start) / increment, the size after c samples is start + floor(c * n / ramp_samples) * increment, in whole
    numbers, so that it is exact for any c.

    Raises:
        ValueError: sizes that no number of increments joins.

    Example:
        >>> ramp = BatchRampUp(start=8, increment=8, ramp_samples=100, global_batch_size=24)
        >>> [ramp.size(consumed) for consumed in (0, 49, 50, 100)]
        [8, 8, 16, 24]
    """

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int

    def __post_init__(self) -> None:
        _positive(start=self.start, increment=self.increment, ramp_samples=self.ramp_samples, global_batch_size=self.global_batch_size)
        if self.start > self.global_batch_size or (self.global_batch_size - self.start) % self.increment:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not start={self.start} plus a multiple of increment={self.increment}; "
                "choose an increment that divides the difference"
            )

    def size(self, consumed_samples: int) -> int:
        """Sequences of the next step."""
        count = (self.global_batch_size - self.start) // self.increment
        return self.start + min(count, consumed_samples * count // self.ramp_samples) * self.increment

    def sizes(self) -> tuple[int, ...]:
        """Every size, ascending."""
        return tuple(range(self.start, self.global_batch_size + 1, self.increment))


@dataclass(frozen=True, kw_only=True)
class BatchSizeSteps:
    """A size from each threshold on.

    Raises:
        ValueError: a first threshold that is not 0, thresholds that do not ascend, a size below 1.
    """

    steps: tuple[tuple[int, int], ...]
    """(samples consumed, size from there on), ascending; the first at 0."""

    def __post_init__(self) -> None:
        thresholds = [threshold for threshold, _ in self.steps]
        if not thresholds or thresholds[0] != 0:
            raise ValueError(f"the first threshold of steps={self.steps} must be 0; say with which size the run begins")
        if sorted(set(thresholds)) != thresholds:
            raise ValueError(f"thresholds {thresholds} must ascend; put them in order, each once")
        _positive(**{f"size at {threshold}": size for threshold, size in self.steps})

    @classmethod
    def parse(cls, text: str, *, seq_length: int | None = None) -> "BatchSizeSteps":
        """``"0:256 300M:512, 1B:1024"``: threshold and size, separated by spaces or commas; K, M, B and T are powers of 1000.

        Args:
            text: the steps.
            seq_length: thresholds are tokens, of sequences this long, instead of samples; a part of a sequence is dropped.

        Raises:
            ValueError: an entry of another form, and as of the class.

        Example:
            >>> BatchSizeSteps.parse("0:4 1K:8").size(1000)
            8
        """
        steps = []
        for entry in text.replace(",", " ").split():
            match = _ENTRY.fullmatch(entry)
            if match is None:
                raise ValueError(f"{entry!r} of {text!r} is not THRESHOLD:SIZE; write for instance 300M:512")
            threshold = int(match[1]) * _SUFFIXES[match[2].upper()]
            steps.append((threshold // seq_length if seq_length else threshold, int(match[3])))
        return cls(steps=tuple(steps))

    def size(self, consumed_samples: int) -> int:
        """Sequences of the next step."""
        return [size for threshold, size in self.steps if threshold <= consumed_samples][-1]

    def sizes(self) -> tuple[int, ...]:
        """Every size in the order of the thresholds."""
        return tuple(size for _, size in self.steps)


def check_batch_sizes(schedule: BatchSizeSchedule, micro_batch_size: int, data_parallel_size: int) -> None:
    """That every batch of a run divides into equal micro-batches.

    Raises:
        ValueError: one does not.
    """
    stride = micro_batch_size * data_parallel_size
    if bad := [size for size in schedule.sizes() if size % stride]:
        raise ValueError(
            f"batch sizes {bad} are not multiples of micro_batch_size={micro_batch_size} * dp={data_parallel_size} = {stride}; "
            "change the schedule, the micro-batch or the layout"
        )


def samples_after(schedule: BatchSizeSchedule, steps: int) -> int:
    """Sequences that the first ``steps`` steps take."""
    consumed, largest = 0, max(schedule.sizes())
    final = schedule.sizes()[-1]
    for step in range(steps):
        size = schedule.size(consumed)
        if size == final == largest:
            # The last size stays.
            return consumed + (steps - step) * final
        consumed += size
    return consumed


def _positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
