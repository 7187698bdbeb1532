# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts of an engine that move between its steps."""

import contextlib
from collections.abc import Callable, Iterator

from mcore_inference.engine._expert_balance import ExpertBalance
from mcore_inference.engine._step_loop import StepLoop
from mcore_inference.engine._weights import ModelWeights


class ExpertMoves:
    """Moves between two steps of an engine; one that breaks half-way leaves weights that no step may use, as a load does.

    Args:
        balance: where experts are; None where they do not move.
        loop: of the engine.
        weights: that move.
    """

    def __init__(self, balance: ExpertBalance | None, loop: StepLoop, weights: ModelWeights) -> None:
        self._balance, self._loop, self._weights = balance, loop, weights

    @contextlib.contextmanager
    def for_no_request(self) -> Iterator[None]:
        """For steps whose tokens are of no request: experts are where they are looked for, and loads are not counted."""
        if self._balance is not None:
            self._move(self._balance.settle)
        yield
        if self._balance is not None:
            self._balance.forget_loads()

    def follow(self, num_steps: int) -> None:
        """Before a step that all ranks make: move experts where that is due.

        Args:
            num_steps: that they have made.
        """
        balance = self._balance
        if balance is not None and balance.is_due(num_steps):
            self._move(lambda: balance.follow(num_steps))

    def _move(self, move: Callable[[], None]) -> None:
        self._loop.read_results()
        self._loop.forget_batch()
        were_complete, self._weights.are_complete = self._weights.are_complete, False
        move()
        self._weights.are_complete = were_complete
