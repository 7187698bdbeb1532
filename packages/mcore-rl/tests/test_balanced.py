# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which of several engines answers: one for a group, as long as that is no burden to it."""

import asyncio
import math
from collections import Counter

import pytest

from mcore_rl import GenericGenerationArgs, InferenceInterface, InferenceRequest, InferenceResponse, NumberedProblems, Problem
from mcore_rl.inference import BalancedInference
from mcore_rl.inference._affinity import PromptAffinity

ARGS = GenericGenerationArgs(max_tokens=1)


class Engine(InferenceInterface):
    """Answers after a while; remembers which prompts it was asked."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: Counter[str] = Counter()
        self.fails = fails

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        self.asked[bytes(prompt).decode()] += request.n
        await asyncio.sleep(0.01)
        if self.fails:
            raise ConnectionError("the engine is gone")
        answer = InferenceResponse(response="x", token_ids=[*prompt, 120], prompt_length=len(prompt), logprobs=[0.0])
        return [[answer] * request.n]


class Task(NumberedProblems):
    def __init__(self) -> None:
        super().__init__("task")

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt=f"{number}")

    async def get_reward(self, response: str, problem: Problem) -> float:
        return 1.0


async def groups(interface: InferenceInterface, num_groups: int, size: int) -> None:
    async for group in Task().get_grouped_rollouts(interface, num_groups=num_groups, size=size, args=ARGS):
        assert len(group) == size


@pytest.mark.parametrize(("num_engines", "num_groups", "size"), [(2, 6, 8), (4, 16, 8), (3, 3, 16)])
def test_a_group_that_an_agent_asks_one_by_one_has_one_engine(num_engines: int, num_groups: int, size: int) -> None:
    engines = [Engine() for _ in range(num_engines)]
    asyncio.run(groups(BalancedInference(engines), num_groups, size))
    owners = Counter(prompt for engine in engines for prompt in engine.asked)
    assert len(owners) == num_groups and set(owners.values()) == {1}
    totals = [engine.asked.total() for engine in engines]
    assert sum(totals) == num_groups * size and max(totals) - min(totals) <= size


def test_a_prompt_of_many_answers_is_shared() -> None:
    engines = [Engine(), Engine()]
    asyncio.run(groups(BalancedInference(engines), 1, 100))
    totals = [engine.asked.total() for engine in engines]
    assert sum(totals) == 100 and abs(totals[0] - totals[1]) <= 16


def test_a_prompt_is_forgotten_once_its_answers_are_there_or_lost() -> None:
    engines = [Engine(), Engine(fails=True)]
    balanced = BalancedInference(engines)

    async def ask() -> None:
        requests = [InferenceRequest(prompts=[[48 + number]], n=4, generation_args=ARGS) for number in range(2)]
        answered, lost = await asyncio.gather(*map(balanced.agenerate, requests), return_exceptions=True)
        assert not isinstance(answered, BaseException) and len(answered[0]) == 4 and isinstance(lost, ConnectionError)

    asyncio.run(ask())
    assert not balanced._affinity._homes and balanced._num_open == [0, 0]


def test_a_prompt_moves_off_an_engine_that_is_to_get_none_and_stays_where_it_went() -> None:
    affinity = PromptAffinity()
    with affinity.engine([1], [0, 3]) as first, affinity.engine([1], [math.inf, 100]) as moved, affinity.engine([1], [90, 101]) as stays:
        assert (first, moved, stays) == (0, 1, 1)
    with affinity.engine([1], [math.inf, 5]) as number:
        assert number == 1
