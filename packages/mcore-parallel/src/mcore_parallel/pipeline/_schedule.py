# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a pipeline stage does, in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


class ScheduleError(ValueError):
    """A schedule that does not fit its stages, chunks, layers or micro-batches; the message names the number to change."""


@dataclass(frozen=True)
class Action:
    """One piece of work of one micro-batch on one model chunk of a stage.

    F is the forward, B the whole backward. A backward in two parts is I, the gradient of the chunk's input, which the
    stage before waits for, and later W, the gradients of the weights, which nobody waits for.

    Example:
        >>> str(Action("F", 3)), str(Action("B", 3, chunk=1))
        ('F3', 'B3.1')
    """

    kind: Literal["F", "B", "I", "W"]
    microbatch: int
    chunk: int = 0
    """Chunk c of stage r is stage c * p + r of the whole model, p being the number of stages."""

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Combined:
    """The forward of one micro-batch and the backward of another, carried out together.

    Both inputs are there when it begins and both results leave when it ends, so that the communication inside either
    one (all-to-all of experts) has the computation of the other to hide behind.

    Example:
        >>> str(Combined(Action("F", 3), Action("B", 0)))
        'F3+B0'
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"{self.forward}+{self.backward}"


Entry = Action | Combined
"""What a table consists of."""


class Schedule(Protocol):
    """The table of one stage; ``one_f_one_b`` and the others, with further arguments bound by ``functools.partial``."""

    def __call__(self, num_stages: int, stage: int, num_microbatches: int) -> Sequence[Entry]: ...


def one_f_one_b(num_stages: int, stage: int, num_microbatches: int) -> list[Entry]:
    """One forward, one backward: stage r of p runs min(p - r - 1, m) forwards ahead, then alternates.

    At most p - r micro-batches are live on stage r.

    Raises:
        ScheduleError: no such stage, or no micro-batch.

    Example:
        >>> " ".join(map(str, one_f_one_b(num_stages=2, stage=0, num_microbatches=3)))
        'F0 F1 B0 F2 B1 B2'
    """
    _check(num_stages, stage, num_microbatches)
    return _alternate([(number, 0) for number in range(num_microbatches)], 1, num_stages - stage - 1)


def interleaved_one_f_one_b(
    num_stages: int, stage: int, num_microbatches: int, num_chunks: int, group_size: int | None = None
) -> list[Entry]:
    """1F1B over several model chunks a stage, which divides the bubble by their number.

    Stage r of p runs min(2 (p - r - 1) + (V - 1) N, V m) forwards ahead, for V chunks and N micro-batches that go through a
    chunk before the next chunk has its turn.

    Args:
        num_stages: p.
        stage: r.
        num_microbatches: m.
        num_chunks: V; 1 is ``one_f_one_b``.
        group_size: N; None for the smallest allowed, p if it divides m. A larger one gives the transfer from the last stage to the
            first more time.

    Raises:
        ScheduleError: not p <= N <= m, or a last group of fewer than p micro-batches.

    Example:
        >>> " ".join(map(str, interleaved_one_f_one_b(num_stages=2, stage=1, num_microbatches=2, num_chunks=2)))
        'F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1'
    """
    if num_chunks == 1:
        return one_f_one_b(num_stages, stage, num_microbatches)
    steps, ahead = _interleaved(num_stages, stage, num_microbatches, num_chunks, group_size)
    return _alternate(steps, num_chunks, ahead)


def zero_bubble(num_stages: int, stage: int, num_microbatches: int) -> list[Entry]:
    """1F1B with the backward in two parts (ZB-H1); weight gradients fill what was idle.

    Stage r puts off weight gradients by r micro-batches. With equal times of F, I and W the bubble is a third of that of 1F1B, and
    no stage holds more than the p micro-batches that the first one holds there.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023, section 2.

    Raises:
        ScheduleError: no such stage, or no micro-batch.

    Example:
        >>> " ".join(map(str, zero_bubble(num_stages=2, stage=1, num_microbatches=3)))
        'F0 I0 F1 I1 W0 F2 I2 W1 W2'
    """
    _check(num_stages, stage, num_microbatches)
    ahead = min(num_stages - stage - 1, num_microbatches)
    actions: list[Entry] = [Action("F", number) for number in range(ahead)]
    for number in range(num_microbatches):
        if ahead + number < num_microbatches:
            actions.append(Action("F", ahead + number))
        actions.append(Action("I", number))
        if number >= stage:
            actions.append(Action("W", number - stage))
    return actions + [Action("W", number) for number in range(max(num_microbatches - stage, 0), num_microbatches)]


def combined_one_f_one_b(
    num_stages: int,
    stage: int,
    num_microbatches: int,
    num_chunks: int = 1,
    group_size: int | None = None,
    delay_weight_grad: bool = False,
) -> list[Entry]:
    """1F1B whose forwards and backwards run as pairs (``Combined``), for communication inside the layers to hide.

    A pair takes in both of its inputs before it begins, so a gradient comes back one pair later for every stage on its way:
    2 (p - r - 1) + (V - 1) N + 1 forwards run ahead, and as many more micro-batches are live.

    Args:
        num_stages: p.
        stage: r.
        num_microbatches: m.
        num_chunks: V.
        group_size: N, as in ``interleaved_one_f_one_b``.
        delay_weight_grad: pair the forward with the input gradient only; the weight gradients follow by themselves,
            when the input gradient is on its way.

    Raises:
        ScheduleError: as ``interleaved_one_f_one_b``.

    Example:
        >>> " ".join(map(str, combined_one_f_one_b(num_stages=2, stage=1, num_microbatches=3)))
        'F0 F1+B0 F2+B1 B2'
    """
    if num_chunks == 1:
        _check(num_stages, stage, num_microbatches)
        steps, ahead = [(number, 0) for number in range(num_microbatches)], 2 * (num_stages - stage - 1)
    else:
        steps, ahead = _interleaved(num_stages, stage, num_microbatches, num_chunks, group_size)
    ahead = min(ahead + 1, len(steps))
    actions: list[Entry] = [Action("F", *step) for step in steps[:ahead]]
    for position, (microbatch, chunk) in enumerate(steps):
        backward = Action("I" if delay_weight_grad else "B", microbatch, num_chunks - 1 - chunk)
        partner = ahead + position
        actions.append(Combined(Action("F", *steps[partner]), backward) if partner < len(steps) else backward)
        if delay_weight_grad:
            actions.append(Action("W", microbatch, num_chunks - 1 - chunk))
    return actions


def forward_only(num_stages: int, stage: int, num_microbatches: int, num_chunks: int = 1, group_size: int | None = None) -> list[Entry]:
    """All forwards in order, for evaluation.

    Any number of micro-batches will do; ``group_size`` is p when None.

    Raises:
        ScheduleError: no such stage, or no micro-batch.
    """
    _check(num_stages, stage, num_microbatches)
    return [Action("F", number, chunk) for number, chunk in virtual_order(num_microbatches, num_chunks, group_size or num_stages)]


def virtual_order(num_microbatches: int, num_chunks: int, group_size: int) -> list[tuple[int, int]]:
    """In which order (micro-batch, chunk) have their forwards: a group of micro-batches takes all chunks in turn, then the next group.

    Raises:
        ScheduleError: no micro-batch, chunk or group.

    Example:
        >>> virtual_order(num_microbatches=3, num_chunks=2, group_size=2)
        [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    """
    for name, value in (("num_microbatches", num_microbatches), ("num_chunks", num_chunks), ("group_size", group_size)):
        if value < 1:
            raise ScheduleError(f"{name}={value} must be at least 1")
    groups = (range(begin, min(begin + group_size, num_microbatches)) for begin in range(0, num_microbatches, group_size))
    return [(number, chunk) for group in groups for chunk in range(num_chunks) for number in group]


def parts(entry: Entry) -> Iterator[Action]:
    """The actions of an entry."""
    if isinstance(entry, Combined):
        yield entry.forward
        yield entry.backward
    else:
        yield entry


def _alternate(steps: list[tuple[int, int]], num_chunks: int, ahead: int) -> list[Entry]:
    """Forwards ahead, then a forward and a backward in turn; backwards take the chunks from the last to the first."""
    ahead = min(ahead, len(steps))
    actions: list[Entry] = [Action("F", *step) for step in steps[:ahead]]
    for position, (microbatch, chunk) in enumerate(steps):
        if ahead + position < len(steps):
            actions.append(Action("F", *steps[ahead + position]))
        actions.append(Action("B", microbatch, num_chunks - 1 - chunk))
    return actions


def _interleaved(
    num_stages: int, stage: int, num_microbatches: int, num_chunks: int, group_size: int | None
) -> tuple[list[tuple[int, int]], int]:
    """Order of the forwards, and how many of them run ahead."""
    _check(num_stages, stage, num_microbatches)
    size = group_size
    if size is None:
        allowed = (n for n in range(num_stages, num_microbatches + 1) if num_microbatches % n == 0 or num_microbatches % n >= num_stages)
        size = next(allowed, num_stages)
    if not num_stages <= size <= num_microbatches:
        raise ScheduleError(
            f"group_size={size} must lie between num_stages={num_stages} and num_microbatches={num_microbatches}; "
            + (f"run at least {size} micro-batches" if size >= num_stages else f"set group_size to {num_stages} or leave it out")
        )
    rest = num_microbatches % size
    if 0 < rest < num_stages:
        raise ScheduleError(
            f"num_microbatches={num_microbatches} in groups of group_size={size} leaves a last group of {rest}, fewer than "
            f"num_stages={num_stages}; run {num_microbatches - rest} or {num_microbatches - rest + num_stages} micro-batches, "
            "or change group_size"
        )
    return virtual_order(num_microbatches, num_chunks, size), 2 * (num_stages - stage - 1) + (num_chunks - 1) * size


def _check(num_stages: int, stage: int, num_microbatches: int) -> None:
    if num_stages < 1 or not 0 <= stage < num_stages:
        raise ScheduleError(f"stage={stage} must lie in [0, num_stages={num_stages})")
    if num_microbatches < 1:
        raise ScheduleError(f"num_microbatches={num_microbatches} must be at least 1")
