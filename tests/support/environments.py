# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An environment that is named by where it is."""

from mcore_rl import NumberedProblems, Problem


class Vowels(NumberedProblems):
    """The share of an answer's characters that are vowels."""

    def __init__(self) -> None:
        super().__init__("vowels")

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"{number % 10}:")

    async def get_reward(self, response: str, problem: Problem) -> float:
        return sum(character in "aeiou" for character in response) / max(1, len(response))
