# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which of several engines answers: one for a group, as long as that is no burden to it."""

import asyncio
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def test_event_loops_in_two_threads_may_begin_and_end_the_same_prompt_at_once() -> None:
    begun, ended = threading.Event(), threading.Event()

    class Homes(dict[tuple[int, ...], Any]):
        def setdefault(self, key: tuple[int, ...], default: Any = None) -> Any:
            home = super().setdefault(key, default)
            if home is not default:
                # The first one ends here, unless it waits.
                begun.set()
                ended.wait(0.5)
            return home

    def again() -> int:
        with affinity.engine([1], [0, 0]) as number:
            return number

    affinity = PromptAffinity()
    affinity._homes = Homes()
    with ThreadPoolExecutor(1) as threads:
        with affinity.engine([1], [0, 0]) as first:
            second = threads.submit(again)
            assert begun.wait(100)
        ended.set()
        assert second.result(100) == first and not affinity._homes


def test_answers_of_event_loops_in_several_threads_are_counted() -> None:
    class Slow(list[int]):
        def __getitem__(self, number: Any) -> Any:
            value = super().__getitem__(number)
            time.sleep(1e-3)
            return value

    async def ask() -> None:
        request = InferenceRequest(prompts=[[48 + number] for number in range(10)], n=4, generation_args=ARGS)
        for _ in range(3):
            await balanced.agenerate(request)

    balanced = BalancedInference([Engine()])
    balanced._num_open = Slow([0])
    with ThreadPoolExecutor(3) as threads:
        for call in [threads.submit(asyncio.run, ask()) for _ in range(3)]:
            call.result(100)
    assert list(balanced._num_open) == [0] and not balanced._affinity._homes
