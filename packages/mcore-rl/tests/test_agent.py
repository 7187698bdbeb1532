# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents over a scripted interface."""

import asyncio
import random

import pytest

from mcore_rl import GenericGenerationArgs, InferenceInterface, InferenceRequest, InferenceResponse, Problem, RewardOnlyAgent, TokenRollout
from mcore_rl.envs import CharacterShare


class Scripted(InferenceInterface):
    """Answers after a random delay; keeps count of what runs."""

    def __init__(self, answer: str = "aab") -> None:
        self.answer = answer
        self.running = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        self.running += 1
        try:
            await asyncio.sleep(random.random() / 100)
        finally:
            self.running -= 1
        data = list(self.answer.encode())
        return [
            [
                InferenceResponse(response=self.answer, token_ids=[*prompt, *data], prompt_length=len(prompt), logprobs=[-1.0] * len(data))
                for _ in range(request.n)
            ]
            for prompt in request.prompts
        ]


class Broken(CharacterShare):
    async def get_reward(self, response: str, problem: Problem) -> float:
        if problem.problem_id == "1":
            raise RuntimeError("judge fell over")
        return await super().get_reward(response, problem)


async def collect(agent: RewardOnlyAgent, interface: InferenceInterface, num_groups: int) -> list[list[TokenRollout]]:
    stream = agent.get_grouped_rollouts(interface, num_groups=num_groups, size=3, args=GenericGenerationArgs(max_tokens=4))
    return [group async for group in stream]


def test_exactly_the_groups_asked_for_each_on_one_problem() -> None:
    groups = asyncio.run(collect(CharacterShare(["x", "yz"], "a"), Scripted(), 5))
    assert [len(group) for group in groups] == [3] * 5
    assert all(len({rollout.problem_id for rollout in group}) == 1 for group in groups)
    assert groups[0][0].reward == pytest.approx(2 / 3)
    assert sum(groups[0][0].generation_mask) == 3


def test_a_failing_judge_reaches_the_caller_and_leaves_nothing_running() -> None:
    interface = Scripted()
    with pytest.raises(RuntimeError, match="judge fell over"):
        asyncio.run(collect(Broken(["x", "y"], "a"), interface, 4))
    assert interface.running == 0


def test_evaluation_judges_every_prompt() -> None:
    agent = CharacterShare(["x"], "b")
    response = asyncio.run(agent.run_evaluation(Scripted(), num_prompts=3, args=GenericGenerationArgs()))
    assert response.metrics()["reward"] == pytest.approx([1 / 3] * 3)


def test_empty_answers_earn_nothing_and_empty_environments_are_refused() -> None:
    assert asyncio.run(CharacterShare(["x"], "b").get_reward("", Problem(problem_id="0", prompt="x"))) == 0
    with pytest.raises(ValueError, match="must not be empty"):
        CharacterShare([], "a")


def test_later_choices_override_only_where_made() -> None:
    merged = GenericGenerationArgs(temperature=0.5, top_k=3).add(GenericGenerationArgs(top_k=1, max_tokens=2))
    assert merged == GenericGenerationArgs(temperature=0.5, top_k=1, max_tokens=2)


def test_rollouts_survive_json() -> None:
    import json

    original = TokenRollout(trajectory=(1, 2), reward=0.5, generation_mask=(False, True), logprobs=(-0.5,), env_id="e", problem_id="p")
    copy = TokenRollout.from_json(json.loads(json.dumps(original.to_json())))
    assert copy.to_json() == original.to_json() | {"trajectory": [1, 2], "generation_mask": [False, True], "logprobs": [-0.5]}
