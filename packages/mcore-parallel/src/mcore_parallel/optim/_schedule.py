# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Learning rates and weight decays as pure functions of the step, counted from 0."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from mcore_parallel.optim._rate import Ranged, Rate


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule:
    """Linear warm-up over ``warmup_steps`` steps from ``init_lr``, then ``max_lr``.

    Step n of the warm-up has init_lr + (max_lr - init_lr) * n / warmup_steps, in all schedules of this file.
    """

    max_lr: float
    warmup_steps: int = 0
    init_lr: float = 0.0

    def __post_init__(self) -> None:
        _check(self.max_lr, 0.0, self.init_lr, self.warmup_steps)

    def lr(self, step: int) -> Rate:
        """Learning rate of a step."""
        value = self.max_lr if step >= self.warmup_steps else _warm_up(self.init_lr, self.max_lr, step, self.warmup_steps)
        return Rate(value, self, step)

    def between(self, max_lr: float | None, min_lr: float | None) -> "ConstantSchedule":
        """The same with another ``max_lr``; it never goes down to a ``min_lr``."""
        return self if max_lr is None else replace(self, max_lr=max_lr)


@dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """Warm-up, then a straight line to ``min_lr`` at ``decay_steps``, which holds from there on."""

    max_lr: float
    decay_steps: int
    """Step at which ``min_lr`` is reached, counted from 0 (the warm-up is part of it)."""
    min_lr: float = 0.0
    warmup_steps: int = 0
    init_lr: float = 0.0

    def __post_init__(self) -> None:
        _check(self.max_lr, self.min_lr, self.init_lr, self.warmup_steps, self.decay_steps)

    def lr(self, step: int) -> Rate:
        """Learning rate of a step."""
        return _rate(self, step, 1.0 - _progress(step, self.warmup_steps, self.decay_steps))

    def between(self, max_lr: float | None, min_lr: float | None) -> "LinearSchedule":
        """The same between other limits; None keeps one."""
        return replace(self, **_limits(self, max_lr, min_lr))


@dataclass(frozen=True, kw_only=True)
class CosineSchedule:
    """Warm-up, then half a cosine from ``max_lr`` to ``min_lr`` at ``decay_steps``, which holds from there on.

    Example:
        >>> CosineSchedule(max_lr=1.0, decay_steps=10).lr(5)
        0.5
    """

    max_lr: float
    decay_steps: int
    """Step at which ``min_lr`` is reached, counted from 0 (the warm-up is part of it)."""
    min_lr: float = 0.0
    warmup_steps: int = 0
    init_lr: float = 0.0

    def __post_init__(self) -> None:
        _check(self.max_lr, self.min_lr, self.init_lr, self.warmup_steps, self.decay_steps)

    def lr(self, step: int) -> Rate:
        """Learning rate of a step."""
        return _rate(self, step, 0.5 * (1.0 + math.cos(math.pi * _progress(step, self.warmup_steps, self.decay_steps))))

    def between(self, max_lr: float | None, min_lr: float | None) -> "CosineSchedule":
        """The same between other limits; None keeps one."""
        return replace(self, **_limits(self, max_lr, min_lr))


@dataclass(frozen=True, kw_only=True)
class InverseSquareRootSchedule:
    """Warm-up over w steps, then max_lr * (w / n)^0.5 at step n (w at least 1), never below ``min_lr``, which holds after ``decay_steps``.

    Example:
        >>> InverseSquareRootSchedule(max_lr=1.0, warmup_steps=4).lr(16)
        0.5
    """

    max_lr: float
    decay_steps: int | None = None
    """Last step before ``min_lr``; None for no end."""
    min_lr: float = 0.0
    warmup_steps: int = 0
    init_lr: float = 0.0

    def __post_init__(self) -> None:
        _check(self.max_lr, self.min_lr, self.init_lr, self.warmup_steps, self.decay_steps)

    def lr(self, step: int) -> Rate:
        """Learning rate of a step."""
        if step < self.warmup_steps:
            return Rate(_warm_up(self.init_lr, self.max_lr, step, self.warmup_steps), self, step)
        if self.decay_steps is not None and step > self.decay_steps:
            return Rate(self.min_lr, self, step)
        return Rate(max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1))), self, step)

    def between(self, max_lr: float | None, min_lr: float | None) -> "InverseSquareRootSchedule":
        """The same between other limits; None keeps one."""
        return replace(self, **_limits(self, max_lr, min_lr))


@dataclass(frozen=True, kw_only=True)
class WSDSchedule:
    """Warm-up, stable at ``max_lr``, then a decay to ``min_lr`` during the last ``wsd_decay_steps`` before ``decay_steps``.

    With q from 0 to 1 during the decay, the share of max_lr - min_lr that is left is 1 - q (linear),
    (1 + cos(pi q)) / 2 (cosine), 2 * 0.5^q - 1 (exponential) or 1 - sqrt(q) (minus_sqrt).
    """

    max_lr: float
    decay_steps: int
    """Step at which ``min_lr`` is reached, counted from 0."""
    wsd_decay_steps: int
    min_lr: float = 0.0
    warmup_steps: int = 0
    init_lr: float = 0.0
    decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"

    def __post_init__(self) -> None:
        _check(self.max_lr, self.min_lr, self.init_lr, self.warmup_steps, self.decay_steps)
        if not 1 <= self.wsd_decay_steps <= self.decay_steps - self.warmup_steps:
            longest = self.decay_steps - self.warmup_steps
            raise ValueError(f"wsd_decay_steps={self.wsd_decay_steps} must lie between 1 and decay_steps - warmup_steps = {longest}")
        if self.decay_style not in ("linear", "cosine", "exponential", "minus_sqrt"):
            raise ValueError(f"decay_style={self.decay_style!r} must be linear, cosine, exponential or minus_sqrt")

    def lr(self, step: int) -> Rate:
        """Learning rate of a step."""
        q = _progress(step, self.decay_steps - self.wsd_decay_steps, self.decay_steps)
        share = {
            "linear": 1.0 - q,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * q)),
            "exponential": 2.0 * 0.5**q - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(q),
        }[self.decay_style]
        return _rate(self, step, share)

    def between(self, max_lr: float | None, min_lr: float | None) -> "WSDSchedule":
        """The same between other limits; None keeps one."""
        return replace(self, **_limits(self, max_lr, min_lr))


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """From ``start`` at step 0 to ``end`` at ``steps``, which holds from there on.

    Example:
        >>> WeightDecaySchedule(start=0.0, end=0.1, steps=10).weight_decay(5)
        0.05
    """

    start: float
    end: float
    steps: int = 1
    style: Literal["constant", "linear", "cosine"] = "linear"
    """The way from start to end; "constant" wants them equal."""

    def __post_init__(self) -> None:
        if self.style not in ("constant", "linear", "cosine"):
            raise ValueError(f"style={self.style!r} must be constant, linear or cosine")
        if not (self.start >= 0.0 and self.end >= 0.0):
            raise ValueError(f"start={self.start} and end={self.end} must not be negative")
        if self.style == "constant" and self.start != self.end:
            raise ValueError(f"style='constant' needs start={self.start} and end={self.end} to be equal; choose linear or cosine")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} must be at least 1")

    def weight_decay(self, step: int) -> float:
        """Weight decay of a step."""
        share = _progress(step, 0, self.steps)
        if self.style == "cosine":
            share = 0.5 * (1.0 - math.cos(math.pi * share))
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, kw_only=True)
class RateAndDecaySchedule:
    """Learning rate and weight decay of each step in one: its rates carry the decay to ``MegatronOptimizer.step``.

    Example:
        >>> decay = WeightDecaySchedule(start=0.0, end=0.1, steps=10)
        >>> rate = RateAndDecaySchedule(rate=ConstantSchedule(max_lr=1e-3), decay=decay).lr(5)
        >>> rate, rate.weight_decay
        (0.001, 0.05)
    """

    rate: Ranged
    """Any schedule of this room."""
    decay: WeightDecaySchedule

    def lr(self, step: int) -> Rate:
        """Learning rate of a step."""
        return Rate(self.rate.lr(step), self, step, self.decay.weight_decay(step))

    def between(self, max_lr: float | None, min_lr: float | None) -> "RateAndDecaySchedule":
        """The same between other limits of the rate; None keeps one."""
        return replace(self, rate=self.rate.between(max_lr, min_lr))


def _rate(schedule: LinearSchedule | CosineSchedule | WSDSchedule, step: int, share: float) -> Rate:
    """Of the warm-up, or after it with ``share`` of the way from ``min_lr`` to ``max_lr``."""
    if step < schedule.warmup_steps:
        return Rate(_warm_up(schedule.init_lr, schedule.max_lr, step, schedule.warmup_steps), schedule, step)
    return Rate(schedule.min_lr + share * (schedule.max_lr - schedule.min_lr), schedule, step)


def _limits(
    schedule: LinearSchedule | CosineSchedule | InverseSquareRootSchedule | WSDSchedule, max_lr: float | None, min_lr: float | None
) -> dict[str, float]:
    return {
        "max_lr": schedule.max_lr if max_lr is None else max_lr,
        "min_lr": schedule.min_lr if min_lr is None else min_lr,
    }


def _warm_up(init_lr: float, max_lr: float, step: int, warmup_steps: int) -> float:
    return init_lr + (max_lr - init_lr) * step / warmup_steps


def _progress(step: int, begin: int, end: int) -> float:
    """0 until ``begin``, 1 from ``end`` on."""
    return min(max((step - begin) / (end - begin), 0.0), 1.0)


def _check(max_lr: float, min_lr: float, init_lr: float, warmup_steps: int, decay_steps: int | None = None) -> None:
    if not 0.0 <= min_lr <= max_lr:
        raise ValueError(f"min_lr={min_lr} must lie between 0 and max_lr={max_lr}")
    if not 0.0 <= init_lr <= max_lr:
        raise ValueError(f"init_lr={init_lr} must lie between 0 and max_lr={max_lr}")
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps={warmup_steps} must not be negative")
    if decay_steps is not None and decay_steps <= warmup_steps:
        raise ValueError(f"decay_steps={decay_steps} must exceed warmup_steps={warmup_steps}")
