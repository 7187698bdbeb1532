# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents over a scripted interface."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mcore_rl import (
    GenericGenerationArgs,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    NumberedProblems,
    Problem,
    RewardOnlyAgent,
    TokenRollout,
)
from mcore_rl.envs import CharacterShare


class Scripted(InferenceInterface):
    """Answers after a random delay; keeps count of what runs."""

    def __init__(self, answer: str = "aab", delay_s: float = 0.0) -> None:
        self.answer, self.delay_s = answer, delay_s
        self.running = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s + random.random() / 100)
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


class Judged(NumberedProblems):
    """The judge of problem 1 does what it is told."""

    def __init__(self, verdict: Callable[[], Awaitable[float]], **limits: float) -> None:
        super().__init__("judged", **limits)
        self.verdict, self.calls = verdict, 0

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number % 2), prompt="x")

    async def get_reward(self, response: str, problem: Problem) -> float:
        if problem.problem_id != "1":
            return 0.5
        self.calls += 1
        return await self.verdict() if self.calls % 3 == 2 else 0.5


async def falls_over() -> float:
    raise RuntimeError("judge fell over")


async def hangs() -> float:
    await asyncio.sleep(60)
    return 1.0


async def collect(agent: RewardOnlyAgent, interface: InferenceInterface, num_groups: int) -> list[list[TokenRollout]]:
    stream = agent.get_grouped_rollouts(interface, num_groups=num_groups, size=3, args=GenericGenerationArgs(max_tokens=4))
    return [group async for group in stream]


def test_exactly_the_groups_asked_for_each_on_one_problem() -> None:
    groups = asyncio.run(collect(CharacterShare(["x", "yz"], "a"), Scripted(), 5))
    assert [len(group) for group in groups] == [3] * 5
    assert all(len({rollout.problem_id for rollout in group}) == 1 for group in groups)
    assert groups[0][0].reward == pytest.approx(2 / 3)
    assert sum(groups[0][0].generation_mask) == 3


@pytest.mark.parametrize("verdict", [falls_over, hangs])
def test_a_failing_judge_drops_its_rollout_only(verdict: Callable[[], Awaitable[float]], caplog: pytest.LogCaptureFixture) -> None:
    interface = Scripted()
    groups = asyncio.run(collect(Judged(verdict, judge_timeout_s=0.2), interface, 4))
    assert sorted({rollout.problem_id: 0 for group in groups for rollout in group}) == ["0", "1"]
    assert sum(len(group) for group in groups) == 10 and min(len(group) for group in groups if group[0].problem_id == "0") == 3
    assert interface.running == 0
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2 and all("'judged'" in text and "problem '1'" in text for text in warnings)


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "good"])
def test_a_reward_that_is_no_number_is_an_error_with_a_name(reward: Any) -> None:
    async def verdict() -> Any:
        return reward

    with pytest.raises(ValueError, match=f"reward={reward!r} of problem '1' in environment 'judged'"):
        asyncio.run(collect(Judged(verdict), Scripted(), 2))
    with pytest.raises(ValueError, match=r"problem 'p' in environment 'e' must be a finite number"):
        TokenRollout(trajectory=[1], reward=reward, generation_mask=[False], logprobs=[], env_id="e", problem_id="p")


def test_answers_that_do_not_come_are_dropped_and_evaluation_counts_them(caplog: pytest.LogCaptureFixture) -> None:
    interface = Scripted(delay_s=60)
    agent = Judged(hangs, answer_timeout_s=0.1)
    assert asyncio.run(collect(agent, interface, 2)) == [[], []]
    response = asyncio.run(agent.run_evaluation(interface, num_prompts=3, args=GenericGenerationArgs()))
    assert (response.results, response.num_dropped) == ([], 3)
    assert interface.running == 0
    assert "answer_timeout_s=0.1" in caplog.text


def test_an_environment_that_poses_no_problem_is_named() -> None:
    class Silent(CharacterShare):
        async def get_prompt(self, *, validation: bool = False) -> Problem:
            await asyncio.sleep(60)
            raise AssertionError

    agent = Silent(["x"], "a")
    agent.prompt_timeout_s = 0.1
    with pytest.raises(TimeoutError, match="environment 'character_share' posed no problem within prompt_timeout_s=0.1"):
        asyncio.run(collect(agent, Scripted(), 1))
    with pytest.raises(ValueError, match="judge_timeout_s=0 of environment 'judged' must be positive"):
        Judged(hangs, judge_timeout_s=0)


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


class Sums(RewardOnlyAgent):
    """Problems with one right answer."""

    async def get_prompt(self, *, validation: bool = False) -> Problem:
        return Problem(problem_id="sum", prompt="1+1=", golden="2")

    async def get_reward(self, response: str, problem: Problem) -> float:
        return float(response == problem.golden)


@pytest.mark.parametrize(("answer", "reward"), [("2", 1.0), ("3", 0.0)])
def test_a_judge_sees_the_golden_answer(answer: str, reward: float) -> None:
    args = GenericGenerationArgs(temperature=1.0, max_tokens=4)
    rollouts = asyncio.run(Sums("sums").group_rollout(Scripted(answer), size=2, args=args))
    assert [rollout.reward for rollout in rollouts] == [reward, reward]
