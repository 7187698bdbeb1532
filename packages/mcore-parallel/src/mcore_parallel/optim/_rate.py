# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The learning rate of one step, and what it is for parameters with limits of their own."""

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

Limits = tuple[float | None, float | None]
"""(max_lr, min_lr) of a group, None for those of the schedule."""


class Ranged(Protocol):
    """A schedule that can run between other limits."""

    def lr(self, step: int) -> float: ...

    def between(self, max_lr: float | None, min_lr: float | None) -> "Ranged": ...


class Rate(float):
    """Learning rate of a step that remembers where it comes from; otherwise a number like any other.

    Example:
        >>> from mcore_parallel.optim import LinearSchedule
        >>> rate = LinearSchedule(max_lr=1.0, decay_steps=10).lr(5)
        >>> rate, rate.between(4.0, 2.0)
        (0.5, 3.0)
    """

    schedule: Ranged
    step: int
    weight_decay: float | None
    """Of the step; None for the config's."""

    def __new__(cls, value: float, schedule: Ranged, step: int, weight_decay: float | None = None) -> "Rate":
        rate = super().__new__(cls, value)
        rate.schedule, rate.step, rate.weight_decay = schedule, step, weight_decay
        return rate

    def __getnewargs__(self) -> tuple[float, Ranged, int, float | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # What a copy is made of.
        return float(self), self.schedule, self.step, self.weight_decay

    def between(self, max_lr: float | None, min_lr: float | None) -> float:
        """The rate of the same step when the schedule runs between other limits; None keeps the schedule's."""
        return float(self.schedule.between(max_lr, min_lr).lr(self.step))


def group_rates(groups: Iterable[Limits], lr: float | Tensor | None, base: float) -> dict[Limits, tuple[float, float]]:
    """For each pair of limits (share, own): the rate of its parameters is share * (rate of the step) + own.

    Args:
        groups: pairs of limits in use.
        lr: rate of the step as the caller gave it.
        base: the config's rate, to which a plain rate is compared.

    Raises:
        ValueError: limits that a plain rate cannot serve.
    """
    rates: dict[Limits, tuple[float, float]] = {}
    for max_lr, min_lr in groups:
        if isinstance(lr, Rate):
            rates[max_lr, min_lr] = (0.0, lr.between(max_lr, min_lr))
        elif lr is not None and min_lr is not None:
            raise ValueError(
                f"min_lr={min_lr} of a parameter group needs the rate of a schedule; pass lr=schedule.lr(n), not a plain number"
            )
        elif max_lr is not None and not base:
            raise ValueError(f"max_lr={max_lr} of a parameter group is compared with the config's lr=0.0; pass lr=schedule.lr(n)")
        else:
            rates[max_lr, min_lr] = (1.0 if max_lr is None else max_lr / base, 0.0)
    return rates
