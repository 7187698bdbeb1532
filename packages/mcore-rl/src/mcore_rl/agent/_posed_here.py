# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What environments have in common whose answers are judged elsewhere: by copies of them in other processes, or by a model."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_rl.agent._conversation import TurnLimits
from mcore_rl.agent._judged import Problem
from mcore_rl.agent._numbered import NumberedAgent, NumberedProblems


class PosedHere(NumberedProblems):
    """Poses the problems of an environment here; a subclass judges otherwise, as by copies of it.

    Args:
        make: makes the environment.
    """

    def __init__(self, make: Callable[[], NumberedAgent]) -> None:
        self._own = make()
        super().__init__(
            self._own.env_id,
            prompt_timeout_s=self._own.prompt_timeout_s,
            answer_timeout_s=self._own.answer_timeout_s,
            judge_timeout_s=self._own.judge_timeout_s,
        )

    @property
    def _poses_at_once(self) -> bool:
        return self._own._poses_at_once

    @property
    def env_ids(self) -> tuple[str, ...]:
        return self._own.env_ids

    @property
    def turn_limits(self) -> Mapping[str, TurnLimits | None]:
        return self._own.turn_limits

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._own.tools

    def problem(self, number: int) -> Problem:
        return self._own.problem(number)

    async def _posed(self, number: int) -> Problem:
        return await self._own._posed(number)

    def num_problems(self, *, validation: bool = False) -> int:
        return self._own.num_problems(validation=validation)

    def attempt(self, problem: Problem, generator: random.Random) -> str | None:
        return self._own.attempt(problem, generator)

    def attempt_turns(self, problem: Problem, generator: random.Random) -> Sequence[str] | None:
        return self._own.attempt_turns(problem, generator)

    def _forget_episodes(self) -> None:
        self._own._forget_episodes()
