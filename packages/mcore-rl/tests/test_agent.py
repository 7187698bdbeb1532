# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents over a scripted interface."""

import asyncio
import copy
import dataclasses
import math
import pickle
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mcore_rl import (
    BestAndWorst,
    ContrastiveRollout,
    GenericGenerationArgs,
    GRPOConfig,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    NumberedProblems,
    Problem,
    RewardOnlyAgent,
    TokenRollout,
    WeightedMultiTask,
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
    groups = asyncio.run(collect(Judged(verdict, judge_timeout_s=1.0), interface, 4))
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


class Broken(InferenceInterface):
    """The engine dies at the second request; keeps count of what runs."""

    def __init__(self, delay_s: float = 0.01) -> None:
        self.delay_s, self.asked, self.running = delay_s, 0, 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        self.asked, self.running = self.asked + 1, self.running + 1
        try:
            if self.asked == 2:
                await asyncio.sleep(self.delay_s)
                raise OSError("the engine is gone")
            await asyncio.sleep(60)
            raise AssertionError
        finally:
            self.running -= 1


@pytest.mark.parametrize("mixed", [False, True])
def test_an_evaluation_that_fails_leaves_nothing_running(mixed: bool) -> None:
    interface, environment = Broken(), CharacterShare(["x"], "a")
    agent = WeightedMultiTask([environment, Counting(rising=True)], [1, 1]) if mixed else environment

    async def evaluate() -> int:
        with pytest.raises(OSError, match="the engine is gone"):
            await agent.run_evaluation(interface, num_prompts=3, args=GenericGenerationArgs())
        assert interface.running == 0
        return len(asyncio.all_tasks())

    assert asyncio.run(evaluate()) == 1


def test_an_evaluation_ends_at_its_limit_with_the_answers_that_are_there() -> None:
    class OneHangs(Counting):
        async def get_reward(self, response: str, problem: Problem) -> float:
            return await hangs() if problem.problem_id == str(self.FIRST_EVALUATION + 1) else await super().get_reward(response, problem)

    agent = WeightedMultiTask([CharacterShare(["x"], "a"), OneHangs(rising=True)], [1, 1])
    response = asyncio.run(agent.run_evaluation(Scripted(), num_prompts=3, args=GenericGenerationArgs(), num_samples=2, timeout_s=1.0))
    assert (len(response.results), response.num_dropped) == (10, 2)


def test_environments_pose_the_problems_of_an_evaluation_at_once() -> None:
    started: list[str] = []

    class Slow(Counting):
        async def _posed(self, number: int) -> Problem:
            started.append(self.env_id)
            await asyncio.sleep(0.05 if len(started) < 2 else 0)
            assert len(started) == 2
            if self.env_id == "broken":
                raise ConnectionError("no problems here")
            return await super()._posed(number)

    environments = [Slow(rising=True), Slow(rising=True)]
    environments[1].env_id = "other"
    mixed = WeightedMultiTask(environments, [1, 1])
    problems = asyncio.run(mixed.evaluation_prompts(1))
    assert [problem.env_id for problem in problems] == ["counting", "other"]
    started.clear()
    environments[1].env_id = "broken"

    async def fails() -> int:
        with pytest.raises(ConnectionError):
            await mixed.evaluation_prompts(1)
        return len(asyncio.all_tasks())

    assert asyncio.run(fails()) == 1


def test_a_numbered_problem_of_an_evaluation_that_is_not_posed_is_named() -> None:
    class Silent(Counting):
        async def _posed(self, number: int) -> Problem:
            await asyncio.sleep(60)
            raise AssertionError

    agent = Silent(rising=True)
    agent.prompt_timeout_s = 0.1
    with pytest.raises(TimeoutError, match="environment 'counting' posed no problem within prompt_timeout_s=0.1"):
        asyncio.run(agent.run_evaluation(Scripted(), num_prompts=2, args=GenericGenerationArgs()))


def test_an_environment_that_poses_no_problem_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(CharacterShare):
        async def get_prompt(self, *, validation: bool = False) -> Problem:
            await asyncio.sleep(60)
            raise AssertionError

    agent = Silent(["x"], "a")
    agent.prompt_timeout_s = 0.1
    assert asyncio.run(collect(agent, Scripted(), 1)) == [[]]
    assert "environment 'character_share' posed no problem within prompt_timeout_s=0.1" in caplog.text
    with pytest.raises(ValueError, match="judge_timeout_s=0 of environment 'judged' must be positive"):
        Judged(hangs, judge_timeout_s=0)


class Ported(RewardOnlyAgent):
    """As it stands in other libraries: a data set, the next prompt of it, the prompts of an evaluation, and a reward."""

    def __init__(self) -> None:
        super().__init__("ported")
        self.asked: list[tuple[int, bool]] = []

    def get_dataset(self, *, validation: bool = False) -> list[Problem]:
        return [Problem(problem_id=f"{validation}/{word}", prompt=word, golden=word) for word in ("ab", "cab", "b")]

    async def get_prompt(self, *, validation: bool = False) -> Problem:
        return self.get_dataset(validation=validation)[0]

    async def evaluation_prompts(self, num_prompts: int, *, validation: bool = True) -> list[Problem]:
        self.asked.append((num_prompts, validation))
        return self.get_dataset(validation=validation)[:num_prompts]

    async def get_reward(self, response: str, problem: Problem) -> float:
        return float(problem.golden in response)


def test_an_evaluation_asks_the_prompts_that_the_agent_names() -> None:
    agent = Ported()
    response = asyncio.run(agent.run_evaluation(Scripted(), num_prompts=2, args=GenericGenerationArgs(), num_samples=2))
    assert agent.asked == [(2, True)]
    assert [result.problem_id for result in response.results] == ["True/ab", "True/ab", "True/cab", "True/cab"]
    assert len(asyncio.run(collect(agent, Scripted(), 2))) == 2


def test_prompts_of_an_evaluation_are_those_that_are_posed_next_where_an_agent_says_no_others() -> None:
    problems = asyncio.run(Counting(rising=True).evaluation_prompts(2))
    assert [problem.problem_id for problem in problems] == [str((1 << 32) + number) for number in range(2)]

    class Next(Ported):
        evaluation_prompts = RewardOnlyAgent.evaluation_prompts

    assert [problem.problem_id for problem in asyncio.run(Next().evaluation_prompts(2, validation=False))] == ["False/ab"] * 2


def test_numbered_problems_list_themselves_whatever_was_posed() -> None:
    agent = CharacterShare(["x", "y", "z"], "b")
    asyncio.run(agent.get_prompt())
    agent.start_at(4, rank=1, num_ranks=2)
    dataset = agent.get_dataset()
    assert [problem.prompt for problem in dataset] == ["x", "y", "z"] and len(dataset) == 3
    assert [problem.prompt for problem in dataset[1:]] == ["y", "z"] and dataset[-1].prompt == "z"
    with pytest.raises(IndexError):
        dataset[3]
    endless = Counting(rising=True)
    assert len(endless.get_dataset()) == 1 << 32 and endless.get_dataset()[7] == endless.problem(7)
    assert endless.get_dataset(validation=True)[7] == endless.problem((1 << 32) + 7)


def test_prompts_of_training_are_listed_for_an_evaluation_and_none_is_posed() -> None:
    agent = Counting(rising=True)
    agent.start_at(10, rank=1, num_ranks=2)
    seen = [problem.problem_id for problem in asyncio.run(agent.evaluation_prompts(2, validation=False))]
    assert seen == ["1", "3"] and agent.num_posed == 0
    assert asyncio.run(agent.get_prompt()).problem_id == "11"


def test_an_agent_without_a_list_of_problems_is_named() -> None:
    class Unlisted(Ported):
        get_dataset = RewardOnlyAgent.get_dataset

    with pytest.raises(NotImplementedError, match="environment 'ported' lists no problems; make it one of NumberedProblems"):
        Unlisted().get_dataset()


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


def test_a_none_that_is_passed_opens_a_choice_again() -> None:
    first, opens = GenericGenerationArgs(temperature=0.5, top_k=3), GenericGenerationArgs(top_k=None)
    assert first.add(opens) == GenericGenerationArgs(temperature=0.5) and first.add(GenericGenerationArgs()) == first
    # What was opened stays so in what is added, and in copies.
    for copied in (opens, GenericGenerationArgs(max_tokens=4).add(opens), copy.deepcopy(opens), pickle.loads(pickle.dumps(opens))):
        assert first.add(copied).top_k is None
    assert opens == GenericGenerationArgs() and hash(opens) == hash(GenericGenerationArgs())
    # A copy or a file passes all fields, and says nothing by those that are None.
    for whole in (dataclasses.replace(GenericGenerationArgs(), max_tokens=4), GenericGenerationArgs(**dataclasses.asdict(opens))):
        assert first.add(whole).top_k == 3
    config = GRPOConfig(num_groups=1, group_size=2, seq_len=8, generation_args=GenericGenerationArgs(temperature=None, top_k=None))
    assert config.drawing_args == GenericGenerationArgs(temperature=1.0, top_k=0, top_p=1.0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_probability_that_is_no_number_is_named(value: float) -> None:
    with pytest.raises(ValueError, match=rf"logprobs\[1\]={value} of p must be a finite number"):
        TokenRollout(trajectory=[1, 2], reward=0.0, generation_mask=[True, True], logprobs=[0.0, value], env_id="e", problem_id="p")


def test_rollouts_survive_json() -> None:
    import json

    numbers: dict[str, Any] = {"trajectory": [1, 2], "generation_mask": [False, True], "logprobs": [-0.1]}
    original = TokenRollout(**numbers, reward=0.5, env_id="e", problem_id="p", weight_versions=[2**40])
    encoded = json.loads(json.dumps(original.to_json()))
    assert TokenRollout.from_json(encoded) == original == TokenRollout.from_json(encoded | numbers)
    nothing = TokenRollout(trajectory=[], reward=0.0, generation_mask=[], logprobs=[], env_id="e", problem_id="p")
    assert TokenRollout.from_json(json.loads(json.dumps(nothing.to_json()))) == nothing


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


class Counting(NumberedProblems):
    """The n-th answer that is judged earns n, or all earn the same."""

    def __init__(self, *, rising: bool) -> None:
        super().__init__("counting")
        self.rising, self.calls = rising, 0

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="x")

    async def get_reward(self, response: str, problem: Problem) -> float:
        self.calls += 1
        return float(self.calls if self.rising else 1)


def test_a_pair_is_the_best_and_the_worst_of_a_group() -> None:
    source = BestAndWorst(Counting(rising=True), group_size=4)
    pairs = asyncio.run(source.get_contrastive_rollouts(Scripted(), num_pairs=3, args=GenericGenerationArgs()))
    assert len(pairs) == 3 and len({pair.chosen.problem_id for pair in pairs}) == 3
    for pair in pairs:
        assert pair.chosen.problem_id == pair.rejected.problem_id and pair.margin >= 3 and pair.prompt_length == 1
    assert min(pair.rejected.reward for pair in pairs) == 1 and max(pair.chosen.reward for pair in pairs) == 12


def test_groups_of_equal_rewards_make_no_pair_and_are_asked_for_only_so_often() -> None:
    agent = Counting(rising=False)
    source = BestAndWorst(agent, group_size=2, max_filter_ratio=2.5)
    assert asyncio.run(source.get_contrastive_rollouts(Scripted(), num_pairs=2, args=GenericGenerationArgs())) == []
    assert agent.calls == 5 * 2


def test_a_pair_of_different_prompts_or_equal_rewards_is_refused() -> None:
    fields: dict[str, Any] = {"generation_mask": (False, True), "logprobs": (-0.5,), "env_id": "e", "problem_id": "p"}
    one = TokenRollout(trajectory=(1, 2), reward=1.0, **fields)
    with pytest.raises(ValueError, match="pair answers to one prompt"):
        ContrastiveRollout(chosen=one, rejected=TokenRollout(trajectory=(3, 2), reward=0.0, **fields))
    with pytest.raises(ValueError, match=r"chosen.reward=1.0 must lie above rejected.reward=1.0"):
        ContrastiveRollout(chosen=one, rejected=one)
    with pytest.raises(ValueError, match="group_size=1 must be at least 2"):
        BestAndWorst(Counting(rising=True), group_size=1)


def test_environments_with_weights_are_judged_by_their_own_and_evaluated_in_full() -> None:
    mixed = WeightedMultiTask([CharacterShare(["x", "yz"], "a"), Counting(rising=False)], [3, 1])
    groups = asyncio.run(collect(mixed, Scripted(), 8))
    rewards = {"character_share": pytest.approx(2 / 3), "counting": 1.0}
    assert [len(group) for group in groups] == [3] * 8
    assert all(rollout.reward == rewards[rollout.env_id] for group in groups for rollout in group)
    assert sum(group[0].env_id == "counting" for group in groups) == 2
    assert {group[0].problem_id for group in groups if group[0].env_id == "counting"} == {"counting/0", "counting/1"}

    ids: list[str] = []
    for rank in range(2):
        mixed.start_at(0, rank=rank, num_ranks=2)
        response = asyncio.run(mixed.run_evaluation(Scripted(), num_prompts=2 - rank, args=GenericGenerationArgs(), num_samples=2))
        assert len(response.results) == 2 * 2 * (2 - rank) and response.env_id == "multi_task"
        ids += [result.problem_id for result in response.results if result.problem_id.startswith("counting/")]
    # Two samples to each of three problems, whatever the ranks.
    assert sorted(ids) == sorted(f"counting/{(1 << 32) + number}" for number in range(3) for _ in range(2))


def test_the_judge_of_each_environment_has_its_own_limit(caplog: pytest.LogCaptureFixture) -> None:
    slow = Judged(hangs, judge_timeout_s=1.0)
    mixed = WeightedMultiTask([slow, CharacterShare(["x"], "a")], [1, 1])
    assert mixed.judge_timeout_s == 60
    groups = asyncio.run(collect(mixed, Scripted(), 4))
    # Problems 0 and 1 of the slow one; one answer to the second of them is lost.
    assert sorted(len(group) for group in groups) == [2, 3, 3, 3]
    assert "problem 'judged/1'" in caplog.text
