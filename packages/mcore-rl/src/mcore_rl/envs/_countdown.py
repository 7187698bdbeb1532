# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Countdown: reach a target with given numbers, each used once."""

import math
import random
from dataclasses import dataclass
from fractions import Fraction

from mcore_rl._stability import experimental_api
from mcore_rl.agent import NumberedProblems, Problem
from mcore_rl.envs._arithmetic import ExpressionError, evaluate

_OPEN, _CLOSE = "<answer>", "</answer>"
_MOST_DRAWS = 10_000


@experimental_api
@dataclass(frozen=True, kw_only=True)
class CountdownConfig:
    """Which problems are posed, and what answers earn.

    Raises:
        ValueError: a field out of its range.
    """

    num_numbers: int = 4
    """Numbers of a problem."""
    max_number: int = 99
    """Numbers are drawn from 1 up to it."""
    operators: str = "+-*/"
    """With which targets are made, of + - * /; division only where it is exact."""
    max_target: int = 999
    """Targets are whole numbers from 0 up to it."""
    prompt: str = (
        "Using the numbers {numbers}, write an equation that equals {target}. Use + - * / and parentheses, and each number exactly once. "
        "Show the final expression in <answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>.\n"
    )
    """With {numbers} and {target}. What it opens with a last <answer>, the response closes."""
    format_reward: float = 0.1
    """Of a well-formed expression that is wrong."""
    num_problems: int = 327_680
    """Problems of the training, after which they begin anew."""
    held_out: float = 0.0
    """Share of the pairs of numbers (in any order) and target that evaluations alone pose, and they pose no others; 0: numbers and target
    of an evaluation may have been trained on, which is rare among large numbers and sure among few small ones."""
    seed: int = 0
    """Of the problems."""

    def __post_init__(self) -> None:
        for name, least in (("num_numbers", 2), ("max_number", 1), ("max_target", 0), ("num_problems", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.num_numbers > 6:
            raise ValueError(f"num_numbers={self.num_numbers} must be at most 6")
        if not self.operators or set(self.operators) - set("+-*/"):
            raise ValueError(f"operators={self.operators!r} must be some of '+-*/'")
        if "{numbers}" not in self.prompt or "{target}" not in self.prompt:
            raise ValueError(f"prompt={self.prompt!r} must hold {{numbers}} and {{target}}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} must lie from 0 to below 1")
        if not (math.isfinite(self.format_reward) and 0 <= self.format_reward < 1):
            raise ValueError(f"format_reward={self.format_reward} must lie from 0 to below 1")

    @classmethod
    def small(cls, **changes: object) -> "CountdownConfig":
        """Two numbers up to 9, and a prompt that opens the answer: for models of few parameters."""
        fields = {"num_numbers": 2, "max_number": 9, "prompt": "{numbers}={target}:<answer>"}
        return cls(**{**fields, **changes})  # pyright: ignore[reportArgumentType]

    def build(self) -> "Countdown":
        """The environment."""
        return Countdown(self)


@experimental_api
class Countdown(NumberedProblems):
    """1 for an expression that uses every given number once and equals the target, ``format_reward`` for another expression, else 0.

    The last ``<answer>`` of a response counts. Problems are a function of seed and number: problem n is the same on every machine.
    Evaluations pose problems of other numbers n, and with ``held_out`` none that the training poses.

    Args:
        config: problems and rewards.
    """

    def __init__(self, config: CountdownConfig) -> None:
        super().__init__("countdown")
        self.config = config

    async def get_reward(self, response: str, problem: Problem) -> float:
        return self.judge(response, problem)

    def problem(self, number: int) -> Problem:
        """Problem ``number`` of this seed.

        Raises:
            ValueError: none of many draws is one, as where no target is small enough or all or none are held out.
        """
        config, evaluates = self.config, number >= self.FIRST_EVALUATION
        if not evaluates:
            number %= config.num_problems
        generator = random.Random(f"countdown {config.seed} {number}")
        for _ in range(_MOST_DRAWS):
            numbers = [generator.randint(1, config.max_number) for _ in range(config.num_numbers)]
            target = _reachable(numbers, config.operators, generator)
            reaches = target.denominator == 1 and 0 <= target <= config.max_target
            if reaches and (not config.held_out or self._held_out(numbers, target) == evaluates):
                break
        else:
            raise ValueError(
                f"no problem in {_MOST_DRAWS} draws with num_numbers={config.num_numbers}, max_number={config.max_number}, "
                f"operators={config.operators!r}, max_target={config.max_target} and held_out={config.held_out}; "
                "raise max_number or max_target"
            )
        listing = " ".join(map(str, numbers))
        text = config.prompt.replace("{numbers}", listing).replace("{target}", str(target))
        return Problem(problem_id=f"countdown/{config.seed}/{number}", prompt=text, golden=f"{listing} = {target}")

    def _held_out(self, numbers: list[int], target: Fraction) -> bool:
        """Whether evaluations alone pose this; the order of the numbers does not count."""
        return random.Random(f"held out {self.config.seed} {sorted(numbers)} {target}").random() < self.config.held_out

    def attempt(self, problem: Problem, generator: random.Random) -> str:
        """The numbers in their order with random operators between, in tags."""
        listing, _ = problem.golden.split(" = ")
        first, *others = listing.split()
        expression = first + "".join(generator.choice(self.config.operators) + number for number in others)
        return ("" if _begun(problem.prompt) else _OPEN) + expression + _CLOSE

    def judge(self, response: str, problem: Problem) -> float:
        """The reward of a response."""
        expression = _last_answer((_OPEN if _begun(problem.prompt) else "") + response)
        if expression is None:
            return 0.0
        try:
            value, used = evaluate(expression)
        except ExpressionError:
            return 0.0
        listing, target = problem.golden.split(" = ")
        right = sorted(used) == sorted(map(int, listing.split())) and value == int(target)
        return 1.0 if right else self.config.format_reward


def _reachable(numbers: list[int], operators: str, generator: random.Random) -> Fraction:
    """The value of a random expression of the numbers."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        left, right = (values.pop(generator.randrange(len(values))) for _ in range(2))
        operator = generator.choice(operators)
        if operator == "/" and (not right or (left / right).denominator != 1):
            operator = operators[0]
        values.append({"+": left + right, "-": left - right, "*": left * right, "/": left / right if right else left}[operator])
    return values[0]


def _begun(prompt: str) -> bool:
    """Whether the prompt opens the answer."""
    return prompt.rfind(_OPEN) > prompt.rfind(_CLOSE)


def _last_answer(text: str) -> str | None:
    """What stands in the last closed pair of tags."""
    end = text.rfind(_CLOSE)
    begin = text.rfind(_OPEN, 0, max(end, 0))
    return None if begin < 0 or end < 0 else text[begin + len(_OPEN) : end]
