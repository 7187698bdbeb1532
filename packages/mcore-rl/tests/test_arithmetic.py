# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attempts are right step by step, answers are judged by their value, and no numbers of an evaluation are trained on."""

import asyncio
import random
import re

import pytest

from mcore_rl import Problem
from mcore_rl.envs import Arithmetic, ArithmeticConfig
from mcore_rl.envs._arithmetic import evaluate

LONG = ArithmeticConfig(num_numbers=(2, 4), max_number=99, operators="+-*", max_value=9999, worked=1.0, slips=0.0, held_out=0.2)


def reward(environment: Arithmetic, response: str, problem: Problem) -> float:
    return asyncio.run(environment.get_reward(response, problem))


def value(text: str) -> int:
    """By the exact evaluation of another environment, which knows no signs."""
    return int(evaluate(text if text[0] != "-" else f"0{text}")[0])


@pytest.mark.parametrize("first", [0, Arithmetic.FIRST_EVALUATION])
def test_worked_out_attempts_are_right_step_by_step(first: int) -> None:
    environment, generator, lengths = Arithmetic(LONG), random.Random(0), set()
    for number in range(first, first + 300):
        problem = environment.problem(number)
        attempt = environment.attempt(problem, generator)
        posed, steps = problem.prompt.removesuffix("="), attempt.split("=")
        numbers = [int(text) for text in re.findall(r"\d+", posed)]
        assert max(numbers) <= 99 and len(steps) == len(numbers) - 1
        assert {value(step) for step in steps} == {value(posed)} and max(map(abs, map(value, steps))) <= 9999
        # Each step has one operator less.
        assert [len(re.findall(r"(?<=\d)[-+*]", step)) for step in (posed, *steps)] == list(range(len(steps), -1, -1))
        assert reward(environment, attempt, problem) == 1.0
        lengths.add(len(numbers))
    assert lengths == {2, 3, 4}


def test_evaluations_alone_pose_the_numbers_that_are_held_out() -> None:
    environment = Arithmetic(ArithmeticConfig(num_numbers=(2, 3), max_number=5, held_out=0.2))

    def posed(first: int) -> set[tuple[str, ...]]:
        problems = [environment.problem(number) for number in range(first, first + 2000)]
        return {tuple(sorted(re.findall(r"\d", problem.prompt))) for problem in problems}

    trained, imitated, evaluated = posed(0), posed(1 << 31), posed(Arithmetic.FIRST_EVALUATION)
    # All 21 + 56 sets of two and of three numbers.
    assert not evaluated & (trained | imitated) and len(evaluated | trained) == 77 and 7 <= len(evaluated) <= 25


@pytest.mark.parametrize(
    ("response", "earned"),
    [
        ("22", 1.0),
        (" 22", 1.0),
        ("2+20=22", 1.0),
        ("2+21=22", 1.0),
        ("22 it is", 1.0),
        ("2+20=23", 0.1),
        ("22=23", 0.1),
        ("-22", 0.1),
        ("2+20", 0.1),
        ("2+20=", 0.0),
        ("22=", 0.0),
        ("", 0.0),
        ("twenty-two", 0.0),
        ("9" * 10_000, 0.0),
    ],
)
def test_the_number_behind_the_last_equals_sign_counts(response: str, earned: float) -> None:
    problem = Problem(problem_id="p", prompt="2+4*5=", golden="2+4*5=22")
    assert reward(Arithmetic(ArithmeticConfig()), response, problem) == earned


def test_so_many_attempts_are_worked_out_and_wrong_as_the_fields_say() -> None:
    config = ArithmeticConfig(num_numbers=(3, 3), max_number=99, operators="+-*", worked=0.3, slips=0.1)
    environment, generator = Arithmetic(config), random.Random(0)
    problems = [environment.problem(number) for number in range(2000)]
    attempts = [environment.attempt(problem, generator) for problem in problems]
    assert sum("=" in attempt for attempt in attempts) / 2000 == pytest.approx(0.3, abs=0.04)
    earned: dict[bool, list[float]] = {True: [], False: []}
    for attempt, problem in zip(attempts, problems, strict=True):
        earned["=" in attempt].append(reward(environment, attempt, problem))
    assert set(earned[True]) == {1.0} and set(earned[False]) == {0.1, 1.0}
    # A slip of one of two operations; few of them are made good by a product with 0.
    assert earned[False].count(1.0) / len(earned[False]) == pytest.approx(0.9**2, abs=0.04)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_numbers": (1, 2)}, r"num_numbers=\[1, 2\] must rise from at least 2 to at most 8"),
        ({"num_numbers": (4, 3)}, r"num_numbers=\[4, 3\] must rise"),
        ({"max_value": 0}, "max_value=0 must lie from 1 to below"),
        ({"worked": 1.5}, "worked=1.5 must lie from 0 to 1"),
        ({"slips": -0.1}, "slips=-0.1 must lie from 0 to 1"),
        ({"held_out": 1.0}, "held_out=1.0 must lie from 0 to below 1"),
        ({"format_reward": float("nan")}, "format_reward=nan must lie from 0 to below 1"),
        ({"operators": "+/"}, "operators='\\+/' must be some of"),
    ],
)
def test_fields_out_of_their_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArithmeticConfig(**fields)  # pyright: ignore[reportArgumentType]


def test_a_search_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no problem in 10000 draws with num_numbers=\[8, 8\].*raise max_value or max_number"):
        Arithmetic(ArithmeticConfig(num_numbers=(8, 8), max_number=999_999_999, operators="*", max_value=1)).problem(0)
