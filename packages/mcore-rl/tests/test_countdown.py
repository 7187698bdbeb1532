# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums are judged exactly, whatever is written, and problems can be solved."""

import asyncio
import dataclasses
import itertools
import time
from fractions import Fraction
from typing import Any

import pytest

from mcore_rl import Problem
from mcore_rl.envs import Countdown, CountdownConfig
from mcore_rl.envs._arithmetic import ExpressionError, evaluate

PROBLEM = Problem(problem_id="p", prompt="", golden="3 5 2 = 16")


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("1+2*3", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("8 - 3 - 2", 3, [8, 3, 2]),
        ("8 / 4 / 2", 1, [8, 4, 2]),
        ("7/2", Fraction(7, 2), [7, 2]),
        ("((12))", 12, [12]),
        (" 2*( 3 - 5 ) ", -4, [2, 3, 5]),
    ],
)
def test_sums_have_their_value(text: str, value: Fraction, numbers: list[int]) -> None:
    assert evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
    "text",
    ["", " ", "1+", "+1", "1 2", "(1", "1)", "9**9**9", "2^3", "1/0", "1/(2-2)", "__import__('os')", "1e9", "\u0663+1", "1" * 13,
     "(" * 40 + "1" + ")" * 40, "1+" * 500 + "1", "x", "1.5", "1,000"],
)  # fmt: skip
def test_what_is_no_sum_is_refused_at_once(text: str) -> None:
    begin = time.process_time()
    with pytest.raises(ExpressionError):
        evaluate(text)
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<answer>(3+5)*2</answer>", 1.0),
        ("thinking <answer>1</answer> again <answer>2*(5+3)</answer> done", 1.0),
        ("<answer>(3+5)*2</answer> no, <answer>3+5+2</answer>", 0.1),
        ("<answer>3+5+2</answer>", 0.1),
        ("<answer>8*2</answer>", 0.1),
        ("<answer>(3+5)*2+3-3</answer>", 0.1),
        ("<answer>16</answer>", 0.1),
        ("<answer>(3+5)*2", 0.0),
        ("(3+5)*2", 0.0),
        ("(3+5)*2</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>" * 3000, 0.0),
        ("<answer>" + "(" * 10_000 + "</answer>", 0.0),
        ("<answer>9**9**9</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_answers_earn_what_they_are_worth(response: str, reward: float) -> None:
    begin = time.process_time()
    assert Countdown(CountdownConfig()).judge(response, PROBLEM) == reward
    assert time.process_time() - begin < 0.5


def solve(numbers: list[Fraction], target: Fraction) -> bool:
    if len(numbers) == 1:
        return numbers[0] == target
    for a, b in itertools.permutations(range(len(numbers)), 2):
        rest = [number for i, number in enumerate(numbers) if i not in (a, b)]
        x, y = numbers[a], numbers[b]
        if any(solve([*rest, value], target) for value in [x + y, x - y, x * y, *([x / y] if y else [])]):
            return True
    return False


def test_every_problem_has_a_solution_and_is_the_same_everywhere() -> None:
    config = CountdownConfig(num_numbers=3, max_number=20)
    one, other = config.build(), config.build()
    for number in range(100):
        problem = one.problem(number)
        assert problem == other.problem(number)
        numbers, target = problem.golden.split(" = ")
        assert solve([Fraction(text) for text in numbers.split()], Fraction(target)), problem
        assert numbers in problem.prompt and target in problem.prompt


def test_a_prompt_that_opens_the_answer_is_closed_by_the_response() -> None:
    environment = CountdownConfig.small().build()
    problem = Problem(problem_id="p", prompt="3 5=8:<answer>", golden="3 5 = 8")
    assert environment.judge("5+3</answer>", problem) == 1.0
    assert environment.judge("5-3</answer>", problem) == 0.1
    assert environment.judge("5+3", problem) == 0.0


def test_evaluation_has_problems_of_its_own() -> None:
    environment = CountdownConfig.small(num_problems=2).build()

    async def prompts(validation: bool) -> list[str]:
        return [(await environment.get_prompt(validation=validation)).problem_id for _ in range(3)]

    trained, evaluated = asyncio.run(prompts(False)), asyncio.run(prompts(True))
    assert trained == ["countdown/0/0", "countdown/0/1", "countdown/0/0"]
    assert not set(trained) & set(evaluated) and len(set(evaluated)) == 3


def test_what_is_held_out_is_never_trained_on() -> None:
    config = CountdownConfig.small(max_number=5, operators="+-*")

    def posed(config: CountdownConfig, first: int) -> set[tuple[str, ...]]:
        goldens = [config.build().problem(first + number).golden.split(" = ") for number in range(100)]
        return {(*sorted(numbers.split()), target) for numbers, target in goldens}

    first = Countdown.FIRST_EVALUATION
    assert posed(config, first) & posed(config, 0)
    apart = dataclasses.replace(config, held_out=0.2)
    assert len(posed(apart, first)) > 5 and not posed(apart, first) & posed(apart, 0)
    with pytest.raises(ValueError, match=r"no problem in 10000 draws .* max_target=0 and held_out=0.0; raise max_number or max_target"):
        CountdownConfig.small(operators="*", max_target=0).build().problem(0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_numbers": 1}, "num_numbers=1 must be at least 2"),
        ({"num_numbers": 7}, "num_numbers=7 must be at most 6"),
        ({"max_number": 0}, "max_number=0 must be at least 1"),
        ({"operators": "+^"}, r"operators='\+\^' must be some of"),
        ({"prompt": "{numbers}"}, "must hold {numbers} and {target}"),
        ({"held_out": 1.0}, "held_out=1.0 must lie from 0 to below 1"),
        ({"format_reward": 1.0}, "format_reward=1.0 must lie from 0 to below 1"),
    ],
)
def test_problems_that_cannot_be_posed_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CountdownConfig(**fields)
