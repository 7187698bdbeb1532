# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Learning rates as pure functions of the step, counted from 0."""

import math
from dataclasses import dataclass
from typing import Literal


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

    def lr(self, step: int) -> float:
        return self.max_lr if step >= self.warmup_steps else _warm_up(self.init_lr, self.max_lr, step, self.warmup_steps)


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

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return _warm_up(self.init_lr, self.max_lr, step, self.warmup_steps)
        return self.min_lr + (1.0 - _progress(step, self.warmup_steps, self.decay_steps)) * (self.max_lr - self.min_lr)


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

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return _warm_up(self.init_lr, self.max_lr, step, self.warmup_steps)
        share = 0.5 * (1.0 + math.cos(math.pi * _progress(step, self.warmup_steps, self.decay_steps)))
        return self.min_lr + share * (self.max_lr - self.min_lr)


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

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return _warm_up(self.init_lr, self.max_lr, step, self.warmup_steps)
        q = _progress(step, self.decay_steps - self.wsd_decay_steps, self.decay_steps)
        share = {
            "linear": 1.0 - q,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * q)),
            "exponential": 2.0 * 0.5**q - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(q),
        }[self.decay_style]
        return self.min_lr + share * (self.max_lr - self.min_lr)


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
