# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Answers count by their value, whatever is written, and in bounded time."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from mcore_rl import Problem
from mcore_rl.envs import Maths, MathsConfig
from mcore_rl.envs._maths_answer import find_answer, same_answer


@pytest.mark.parametrize(
    ("answer", "golden", "same"),
    [
        ("42", "42", True), ("42.0", "42", True), ("+42", "42", True), (" 42 . ", "42", True), ("42.", "42", True), ("-3", "3", False),
        ("1,000", "1000", True), ("1,000,000.50", "1000000.5", True), ("10,00", "1000", False), ("$1,250", "1250", True),
        (r"\$18", "18", True), ("18 dollars", "18", True), (r"18 \text{ cm}", "18", True), ("18cm", "18", True), ("18x", "18", False),
        ("50%", "50", True), (r"50\%", "50", True), (r"90^\circ", "90", True), (r"90^{\circ}", "90", True),
        ("1/2", "0.5", True), (r"\frac{1}{2}", "1/2", True), (r"\dfrac12", "0.5", True), (r"-\frac{3}{4}", "-3/4", False),
        (r"\frac{-3}{4}", "-0.75", True), ("2/4", "1/2", True), ("1/3", "0.333333", False), ("1/0", "0", False), ("1/0", "1/0", True),
        (r"\sqrt{2}", r"\sqrt {2}", True), (r"\sqrt{2}", r"\sqrt{3}", False), (r"2\pi", r"2 \pi", True), ("x = 5", "5", True),
        ("(1, 2)", "(1,2)", True), ("(1, 1/2)", "(1.0, 0.5)", True), ("(1, 2)", "(2, 1)", False), ("[1, 2)", "(1, 2)", False),
        (r"\left(1, 2\right)", "(1,2)", True), (r"\text{Tuesday}", "tuesday", True), ("yes", "no", False), ("", "", False),
        ("\u0664", "4", True), ("1e3", "1000", False), ("nan", "nan", True), ("9**9**9", "9", False),
    ],
)  # fmt: skip
def test_answers_are_the_same_by_value(answer: str, golden: str, same: bool) -> None:
    assert same_answer(answer, golden) is same_answer(golden, answer) is same


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("so <answer>4</answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer> it is", "4"),
        (r"\boxed{3}, then \boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{3} <answer>4</answer>", "4"),
        (r"\boxed{3", None),
        ("<answer>4", None),
        ("4</answer>", None),
        ("4", None),
    ],
)
def test_the_last_answer_is_found(response: str, found: str | None) -> None:
    assert find_answer(response) == found


@pytest.fixture
def environment(tmp_path: Path) -> Maths:
    rows = [{"question": f"{n} + 1?", "answer": f"We add. #### {n + 1}"} for n in range(12)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return MathsConfig(path=str(tmp_path / "sums.jsonl"), num_evaluation=4, format_reward=0.1).build()


@pytest.mark.parametrize(
    "response",
    ["\\boxed{" * 5000, "<answer>" * 5000 + "</answer>", "\\boxed{" + "{" * 10_000 + "}" * 10_001, "<answer>" + "9" * 10_000 + "</answer>",
     "<answer>9**9**9</answer>", "<answer>" + "(" * 250 + "</answer>", "<answer>" + "\\frac" * 50 + "</answer>",
     "<answer>" + "1," * 120 + "</answer>", "\\boxed{" + "\\text{" * 40 + "}" * 41],
)  # fmt: skip
def test_hostile_answers_are_judged_at_once(environment: Maths, response: str) -> None:
    begin = time.perf_counter()
    assert asyncio.run(environment.get_reward(response, Problem(problem_id="", prompt="", golden="7"))) in (0.0, 0.1)
    assert time.perf_counter() - begin < 0.05


def test_each_problem_of_the_file_is_posed_once_in_another_order_each_time(environment: Maths) -> None:
    rounds = [[environment.problem(8 * epoch + place).problem_id for place in range(8)] for epoch in range(3)]
    assert all(sorted(ids) == sorted(f"maths/{row}" for row in range(4, 12)) for ids in rounds)
    assert len(set(map(tuple, rounds))) == 3
    evaluated = [environment.problem(environment.FIRST_EVALUATION + place).problem_id for place in range(5)]
    assert evaluated == ["maths/0", "maths/1", "maths/2", "maths/3", "maths/0"]


def test_rewards_are_of_right_and_of_well_formed_answers(environment: Maths) -> None:
    problem = environment.problem(0)
    assert "1?" in environment.problem(environment.FIRST_EVALUATION + 1).prompt
    rewards = [
        asyncio.run(environment.get_reward(text, problem)) for text in (f"\\boxed{{{problem.golden}.0}}", "\\boxed{99}", problem.golden)
    ]
    assert rewards == [1.0, 0.1, 0.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "a", "answer": "b"}\n{"question": "a"}', r'file.jsonl:2 must be \{"question": ..., "answer": ...\}'),
        ("question: a", "file.jsonl:1 is no JSON; write one problem a line"),
        ('{"question": "a", "answer": "b"}', "has 1 problems, num_evaluation=128 of which are kept back; lower it"),
    ],
)
def test_files_that_hold_no_problems_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "file.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        MathsConfig(path=str(tmp_path / "file.jsonl")).build()
    with pytest.raises(ValueError, match="maths.path is empty"):
        MathsConfig().build()
