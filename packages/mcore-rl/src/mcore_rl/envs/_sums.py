# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums of two numbers, the smallest task with a right answer."""

import math
import random
import re
from dataclasses import dataclass

from mcore_rl._stability import experimental_api
from mcore_rl.agent import NumberedProblems, Problem

_NUMBER = re.compile(r"\s*(-?\d{1,18})(?!\d)")
_OPERATIONS = {"+": lambda left, right: left + right, "-": lambda left, right: left - right, "*": lambda left, right: left * right}


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Which sums are posed, and what answers earn.

    Raises:
        ValueError: a field out of its range.
    """

    max_number: int = 9
    """Numbers are drawn from 0 up to it."""
    operators: str = "+-"
    """Some of + - *."""
    prompt: str = "{sum}="
    """With {sum}, such as 3+4."""
    format_reward: float = 0.1
    """Of a wrong number; a text that begins with none earns 0."""
    seed: int = 0
    """Of the problems."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_number <= 999_999_999:
            raise ValueError(f"max_number={self.max_number} must lie from 1 to 999999999")
        if not self.operators or set(self.operators) - set(_OPERATIONS):
            raise ValueError(f"operators={self.operators!r} must be some of '+-*'")
        if "{sum}" not in self.prompt:
            raise ValueError(f"prompt={self.prompt!r} must hold {{sum}}")
        if not (math.isfinite(self.format_reward) and 0 <= self.format_reward < 1):
            raise ValueError(f"format_reward={self.format_reward} must lie from 0 to below 1")

    def build(self) -> "Arithmetic":
        """The environment."""
        return Arithmetic(self)


@experimental_api
class Arithmetic(NumberedProblems):
    """1 for a response that begins with the value of the sum, ``format_reward`` for another number, else 0.

    Args:
        config: problems and rewards.
    """

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__("arithmetic")
        self.config = config

    def problem(self, number: int) -> Problem:
        """Problem ``number`` of this seed."""
        config, generator = self.config, random.Random(f"arithmetic {self.config.seed} {number}")
        left, right = (generator.randint(0, config.max_number) for _ in range(2))
        operator = generator.choice(config.operators)
        text = config.prompt.replace("{sum}", f"{left}{operator}{right}")
        return Problem(problem_id=f"arithmetic/{config.seed}/{number}", prompt=text, golden=str(_OPERATIONS[operator](left, right)))

    def attempt(self, problem: Problem, generator: random.Random) -> str:
        """Some number that such a sum may have."""
        other = self.problem(generator.randrange(1 << 31))
        return other.golden

    async def get_reward(self, response: str, problem: Problem) -> float:
        match = _NUMBER.match(response)
        if match is None:
            return 0.0
        return 1.0 if int(match[1]) == int(problem.golden) else self.config.format_reward
