# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An environment any model can learn: write more of the wanted characters."""

from collections.abc import Sequence

from mcore_rl._stability import experimental_api
from mcore_rl.agent import NumberedProblems, Problem


@experimental_api
class CharacterShare(NumberedProblems):
    """The reward is the share of an answer's characters that are wanted; an empty answer earns 0.

    Args:
        prompts: texts to continue, handed out in turn.
        wanted: the characters that count.

    Raises:
        ValueError: no prompts, or no characters.
    """

    def __init__(self, prompts: Sequence[str], wanted: str) -> None:
        super().__init__("character_share")
        if not prompts or not wanted:
            raise ValueError(f"prompts={len(prompts)} texts and wanted={wanted!r} must not be empty")
        self.wanted = frozenset(wanted)
        self._problems = [Problem(problem_id=str(i), prompt=prompt) for i, prompt in enumerate(prompts)]

    def problem(self, number: int) -> Problem:
        """Prompt ``number``, of the training as of the evaluation."""
        return self._problems[number % self.FIRST_EVALUATION % len(self._problems)]

    def num_problems(self, *, validation: bool = False) -> int:
        return len(self._problems)

    async def get_reward(self, response: str, problem: Problem) -> float:
        return sum(character in self.wanted for character in response) / len(response) if response else 0.0
