# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The estimator is that of all subsets; an evaluation draws as many answers as it is told."""

import asyncio
import itertools

import pytest

from mcore_rl import EvaluationResponse, GenericGenerationArgs, InferenceInterface, InferenceRequest, InferenceResponse, pass_at_k
from mcore_rl.envs import Arithmetic, ArithmeticConfig


@pytest.mark.parametrize("num_answers", range(1, 8))
def test_it_is_the_share_of_the_subsets_with_a_right_answer(num_answers: int) -> None:
    for num_right, k in itertools.product(range(num_answers + 1), range(1, num_answers + 1)):
        subsets = list(itertools.combinations([i < num_right for i in range(num_answers)], k))
        assert pass_at_k(num_answers, num_right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_known_values() -> None:
    assert [pass_at_k(4, 1, k) for k in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1.0])
    assert pass_at_k(32, 3, 8) == pytest.approx(0.59193548, abs=1e-8)


@pytest.mark.parametrize(("num_answers", "num_right", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_numbers_out_of_order_are_refused(num_answers: int, num_right: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"num_right={num_right} must lie from 0 to num_answers={num_answers}, and k={k}"):
        pass_at_k(num_answers, num_right, k)


class EverySecond(InferenceInterface):
    """Answers 1, 0, 1, 0, ..."""

    def __init__(self) -> None:
        self.num_asked = 0

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        self.num_asked += 1
        return [[InferenceResponse(response=str(self.num_asked % 2), token_ids=[0, 1], prompt_length=1, logprobs=[0.0])]]

    def encode(self, text: str) -> list[int]:
        return [0]


def test_an_evaluation_asks_each_problem_as_often_as_it_is_told() -> None:
    environment, interface = Arithmetic(ArithmeticConfig(max_number=1, operators="*")), EverySecond()

    def ask(num_samples: int) -> EvaluationResponse:
        args = GenericGenerationArgs(max_tokens=1)
        return asyncio.run(environment.run_evaluation(interface, num_prompts=6, args=args, num_samples=num_samples))

    several = ask(4)
    assert len(several.results) == 24 and len({result.problem_id for result in several.results}) == 6
    # Two of four answers to each are right, whichever number is.
    assert several.pass_at(1) == pytest.approx([0.5] * 6)
    assert several.pass_at(2) == pytest.approx([5 / 6] * 6)
    assert several.pass_at(3) == [1.0] * 6
    assert several.pass_at(5) == []
    # The same problems again.
    assert {result.problem_id for result in ask(1).results} == {result.problem_id for result in several.results}
