# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How long ranks of one model wait for each other."""

from dataclasses import dataclass

from mcore_inference._fields import as_integer, as_number
from mcore_inference._stability import experimental_api


@experimental_api
@dataclass(frozen=True, kw_only=True)
class LockstepConfig:
    """Patience with the ranks of a split engine.

    Raises:
        ValueError: a field out of its range.
    """

    join_timeout_s: float = 600.0
    """Seconds until all ranks are there."""
    silence_timeout_s: float = 30.0
    """Seconds without a sign of life after which a rank is lost."""
    step_timeout_s: float = 120.0
    """Seconds that a rank gets for a step, for the end of a load, a suspension or a resumption, and for a bucket of weights."""
    vote_interval_steps: int = 20
    """Steps that engines which share experts make between two of their votes, at most; fewer where steps are slow. One that has no work,
    or is paused, makes dummy steps until then."""

    def __post_init__(self) -> None:
        for name in ("join_timeout_s", "silence_timeout_s", "step_timeout_s"):
            as_number(name, getattr(self, name), 0.1, 1e6)
        as_integer("vote_interval_steps", self.vote_interval_steps, 1, 10_000)
