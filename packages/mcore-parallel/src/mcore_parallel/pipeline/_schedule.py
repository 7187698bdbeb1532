# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a pipeline stage does, in order."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Action:
    """Forward or backward of one micro-batch on one stage.

    Example:
        >>> str(Action("F", 3))
        'F3'
    """

    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


def one_f_one_b(num_stages: int, stage: int, num_microbatches: int) -> list[Action]:
    """One forward, one backward: stage r of p runs min(p - r - 1, m) forwards ahead, then alternates.

    At most p - r micro-batches are live on stage r.

    Raises:
        ValueError: no such stage, or no micro-batch.

    Example:
        >>> " ".join(map(str, one_f_one_b(num_stages=2, stage=0, num_microbatches=3)))
        'F0 F1 B0 F2 B1 B2'
    """
    _check(num_stages, stage, num_microbatches)
    ahead = min(num_stages - stage - 1, num_microbatches)
    actions = [Action("F", number) for number in range(ahead)]
    for number in range(num_microbatches - ahead):
        actions += [Action("F", ahead + number), Action("B", number)]
    return actions + [Action("B", number) for number in range(num_microbatches - ahead, num_microbatches)]


def forward_only(num_stages: int, stage: int, num_microbatches: int) -> list[Action]:
    """All forwards in order, for evaluation.

    Raises:
        ValueError: no such stage, or no micro-batch.
    """
    _check(num_stages, stage, num_microbatches)
    return [Action("F", number) for number in range(num_microbatches)]


def _check(num_stages: int, stage: int, num_microbatches: int) -> None:
    if num_stages < 1 or not 0 <= stage < num_stages:
        raise ValueError(f"stage={stage} must lie in [0, num_stages={num_stages})")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} must be at least 1")
