# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums of a few numbers: the smallest task with a right answer, and one that is worth working out step by step."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl._stability import experimental_api
from mcore_rl.agent import NumberedProblems, Problem

_NUMBER = re.compile(r"\s*(-?\d{1,18})(?!\d)")
_OPERATIONS = {"+": lambda left, right: left + right, "-": lambda left, right: left - right, "*": lambda left, right: left * right}
_MOST_NUMBERS, _MOST_DRAWS = 8, 10_000


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Which sums are posed, and what answers earn.

    Raises:
        ValueError: a field out of its range.
    """

    num_numbers: tuple[int, int] = (2, 2)
    """Fewest and most numbers of a sum."""
    max_number: int = 9
    """Numbers are drawn from 0 up to it."""
    operators: str = "+-"
    """Some of + - *, with the usual precedence."""
    max_value: int = 10**18 - 1
    """Largest absolute value of a sum and of each step to it."""
    prompt: str = "{sum}="
    """With {sum}, such as 3+4."""
    format_reward: float = 0.1
    """Of a wrong number; a text without one in its place earns 0."""
    worked: float = 0.0
    """Share of the attempts that work a sum out, as 2+20=22 does with 2+4*5, and are right; the others give a value at once."""
    slips: float = 0.5
    """Chance of these that a digit is wrong, for each operation."""
    held_out: float = 0.0
    """Share of the sets of numbers that evaluations alone pose, in any order and with any operators, and they pose no others; 0: a sum of
    an evaluation may have been trained on."""
    seed: int = 0
    """Of the problems."""

    def __post_init__(self) -> None:
        fewest, most = self.num_numbers
        if not 2 <= fewest <= most <= _MOST_NUMBERS:
            raise ValueError(f"num_numbers={list(self.num_numbers)} must rise from at least 2 to at most {_MOST_NUMBERS}")
        if not 1 <= self.max_number <= 999_999_999:
            raise ValueError(f"max_number={self.max_number} must lie from 1 to 999999999")
        if not 1 <= self.max_value < 10**18:
            raise ValueError(f"max_value={self.max_value} must lie from 1 to below 10**18")
        if not self.operators or set(self.operators) - set(_OPERATIONS):
            raise ValueError(f"operators={self.operators!r} must be some of '+-*'")
        if "{sum}" not in self.prompt:
            raise ValueError(f"prompt={self.prompt!r} must hold {{sum}}")
        for name, below in (("format_reward", True), ("held_out", True), ("worked", False), ("slips", False)):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 <= value <= 1) or (below and value == 1):
                raise ValueError(f"{name}={value} must lie from 0 to {'below ' if below else ''}1")

    def build(self) -> "Arithmetic":
        """The environment."""
        return Arithmetic(self)


@experimental_api
class Arithmetic(NumberedProblems):
    """1 for a response with the value of the sum, ``format_reward`` for another number, else 0.

    The number that follows the last = counts, or that with which a response without one begins. How it was found does not count. Problem n
    is the same on every machine; with ``held_out`` evaluations pose no numbers that the training poses.

    Args:
        config: problems and rewards.
    """

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__("arithmetic")
        self.config = config

    def problem(self, number: int) -> Problem:
        """Problem ``number`` of this seed.

        Raises:
            ValueError: none of many draws is one, as where ``max_value`` is small or all or none are held out.
        """
        config, generator = self.config, random.Random(f"arithmetic {self.config.seed} {number}")
        evaluates = number >= self.FIRST_EVALUATION
        for _ in range(_MOST_DRAWS):
            numbers = [generator.randint(0, config.max_number) for _ in range(generator.randint(*config.num_numbers))]
            if config.held_out and self._held_out(numbers) != evaluates:
                continue
            steps = _steps(numbers, [generator.choice(config.operators) for _ in numbers[1:]])
            if max(abs(value) for numbers, _ in steps[1:] for value in numbers) <= config.max_value:
                break
        else:
            raise ValueError(
                f"no problem in {_MOST_DRAWS} draws with num_numbers={list(config.num_numbers)}, max_number={config.max_number}, "
                f"operators={config.operators!r}, max_value={config.max_value} and held_out={config.held_out}; "
                "raise max_value or max_number"
            )
        posed, value = _text(*steps[0]), _text(*steps[-1])
        text = config.prompt.replace("{sum}", posed)
        return Problem(problem_id=f"arithmetic/{config.seed}/{number}", prompt=text, golden=f"{posed}={value}")

    def _held_out(self, numbers: Sequence[int]) -> bool:
        """Whether evaluations alone pose these."""
        return random.Random(f"held out {self.config.seed} {sorted(numbers)}").random() < self.config.held_out

    def attempt(self, problem: Problem, generator: random.Random) -> str:
        """Each step, or a value alone, with slips."""
        tokens = re.findall(r"\d+|[-+*]", problem.golden.partition("=")[0])
        worked = generator.random() < self.config.worked
        steps = _steps([int(token) for token in tokens[::2]], tokens[1::2], generator, 0.0 if worked else self.config.slips)
        return "=".join(_text(*step) for step in steps[1 if worked else -1 :])

    async def get_reward(self, response: str, problem: Problem) -> float:
        match = _NUMBER.match(response.rpartition("=")[2])
        if match is None:
            return 0.0
        return 1.0 if int(match[1]) == int(problem.golden.partition("=")[2]) else self.config.format_reward


def _steps(
    numbers: list[int], operators: list[str], generator: random.Random | None = None, slips: float = 0.0
) -> list[tuple[list[int], list[str]]]:
    """Numbers and the operators between them, from a sum to its value: the first product is replaced by its value, then the first sum."""
    steps = [(numbers, operators)]
    while operators:
        at = operators.index("*") if "*" in operators else 0
        value = _OPERATIONS[operators[at]](numbers[at], numbers[at + 1])
        if generator is not None and generator.random() < slips:
            value = _slipped(value, generator)
        numbers = [*numbers[:at], value, *numbers[at + 2 :]]
        operators = [*operators[:at], *operators[at + 1 :]]
        steps.append((numbers, operators))
    return steps


def _slipped(value: int, generator: random.Random) -> int:
    """With one digit changed."""
    digits = str(abs(value))
    at = generator.randrange(len(digits))
    other = generator.choice([digit for digit in "0123456789" if digit != digits[at]])
    changed = int(digits[:at] + other + digits[at + 1 :])
    return -changed if value < 0 else changed


def _text(numbers: Sequence[int], operators: Sequence[str]) -> str:
    return str(numbers[0]) + "".join(operator + str(number) for operator, number in zip(operators, numbers[1:], strict=True))
