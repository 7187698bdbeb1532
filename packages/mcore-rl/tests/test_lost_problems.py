# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A problem that cannot be posed costs its own answers, and a run goes on behind it."""

import asyncio
import dataclasses

import pytest

from mcore_rl import (
    GenericGenerationArgs,
    GRPOConfig,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    NumberedProblems,
    Problem,
)
from mcore_rl._collect import Collection, draw
from mcore_rl._loop import rollout_means


class Scripted(InferenceInterface):
    """One answer to all."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        return [[InferenceResponse(response="x", token_ids=[*prompt, 120], prompt_length=len(prompt), logprobs=[-1.0])]]


class Gaps(NumberedProblems):
    """Problem 2 cannot be made."""

    def __init__(self) -> None:
        super().__init__("gaps")

    def problem(self, number: int) -> Problem:
        if number == 2:
            raise KeyError("a broken row")
        return Problem(problem_id=str(number), prompt=f"q{number}")

    async def get_reward(self, response: str, problem: Problem) -> float:
        return 1.0


def test_a_problem_that_cannot_be_posed_loses_its_group_alone(caplog: pytest.LogCaptureFixture) -> None:
    agent, config = Gaps(), GRPOConfig(num_groups=4, group_size=2, seq_len=64)
    taken = draw(config, agent, Scripted(), 4)
    assert taken.failure is None and agent.num_posed == 4
    assert sorted([rollout.problem_id for rollout in group] for group in taken.groups) == [["0", "0"], ["1", "1"], ["3", "3"]]
    assert "'gaps': a problem is dropped with all its answers, it was not posed: KeyError('a broken row'), problem 2" in caplog.text
    report = rollout_means(config, Collection.of(config, taken.groups), None)
    assert (report["num_rollouts"], report["num_dropped"]) == (6, 2)
    agent.start_at(2)
    alone = draw(dataclasses.replace(config, num_groups=1), agent, Scripted(), 1)
    assert alone.failure is None and alone.groups == []
    with pytest.raises(RuntimeError, match="no rollout of 4 groups of 2 is left: .* lost with their problem, request, tokens or judge"):
        Collection.of(config, alone.groups)
    agent.start_at(2)
    assert asyncio.run(agent.rollout(Scripted(), args=GenericGenerationArgs())) is None
