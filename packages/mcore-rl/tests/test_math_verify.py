# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Answers that are compared as expressions, in processes that have limits."""

import asyncio
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Iterator

import pytest

from mcore_rl import JudgeLimits, JudgeProcessError, Problem, ProcessJudge
from mcore_rl.envs import Maths, MathsConfig

needs_library = pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="math-verify is not installed")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> MathsConfig:
    path = tmp_path_factory.mktemp("maths") / "file.jsonl"
    path.write_text("".join(json.dumps({"problem": f"P{n}", "answer": str(n)}) + "\n" for n in range(3)))
    return MathsConfig(path=str(path), judge="math-verify", num_evaluation=1, format_reward=0.25)


@pytest.fixture(scope="module")
def judge(config: MathsConfig) -> Iterator[ProcessJudge]:
    made = ProcessJudge(functools.partial(Maths, config), JudgeLimits(num_workers=1, time_s=3.0, memory_gb=0.5))
    yield made
    made.close()


def reward(judge: ProcessJudge, golden: str, response: str) -> float:
    return asyncio.run(judge.get_reward(response, Problem(problem_id="7", prompt="?", golden=golden)))


@needs_library
@pytest.mark.parametrize(
    ("golden", "answer", "wanted"),
    [
        (r"2\sqrt{2}", r"\sqrt{8}", 1.0), ("x^2+2x+1", "(x+1)^2", 1.0), (r"\{1,2\}", r"\{2,1\}", 1.0), ("(1,2)", "(2,1)", 0.25),
        ("[1,2)", "[1,2)", 1.0), ("[1,2)", "[1,2]", 0.25), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", 1.0),
        ("1/2", "0.5", 1.0), ("5", "x=5", 1.0), ("5", "6", 0.25), ("5", r"\frac{", 0.25), ("5", " ", 0.25),
        (r"\frac{\pi}{4}", r"\arctan 1", 1.0), ("-0.5", r"-\frac{1}{2}", 1.0), ("(-0.5,3)", r"(-\frac{1}{2},3)", 1.0),
        ("3/2", r"1\frac{1}{2}", 1.0), ("57", "5 7", 0.25), ("530", r"5\text{ hours }30\text{ minutes}", 0.25),
        ("100200", "100, 200", 0.25),
    ],
)  # fmt: skip
def test_answers_are_compared_as_expressions(judge: ProcessJudge, golden: str, answer: str, wanted: float) -> None:
    assert reward(judge, golden, f"Let me see.\n<answer>{answer}</answer>") == wanted
    assert reward(judge, golden, f"It is {answer}.") == 0.0


@pytest.mark.journey
@needs_library
def test_an_answer_without_an_end_is_lost_alone(judge: ProcessJudge) -> None:
    begin = time.perf_counter()
    with pytest.raises(JudgeProcessError, match="the process that judges problem '7' of 'maths' was ended after time_s=3"):
        reward(judge, "5", r"\boxed{(10^{10^{8}})!}")
    assert time.perf_counter() - begin < 10
    assert reward(judge, r"2\sqrt{2}", r"\boxed{\sqrt{8}}") == 1.0


@needs_library
def test_a_golden_answer_that_is_none_is_named(judge: ProcessJudge) -> None:
    with pytest.raises(JudgeProcessError, match="the golden answer ' ' is none that math-verify reads"):
        reward(judge, " ", r"\boxed{5}")


def test_the_library_that_is_missing_is_named_with_its_extra(config: MathsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match=r'math-verify is not installed: pip install "mcore-rl\[maths\]"'):
        config.build()


def test_another_judge_is_refused() -> None:
    with pytest.raises(ValueError, match="judge='sympy' must be own or math-verify"):
        MathsConfig(judge="sympy")
