# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Groups drawn ahead: in their order, as many as may be, filtered and ended in time, each once."""

import asyncio
import dataclasses
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
from torch import Tensor

from mcore_rl import GenericGenerationArgs, GRPOConfig, InferenceInterface, InferenceRequest, InferenceResponse, NumberedProblems, Problem
from mcore_rl._rollouts._stream import LiveWeights, RolloutStream

CONFIG = GRPOConfig(num_groups=2, group_size=2, seq_len=8, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=1))


class Scripted(InferenceInterface):
    """An answer to prompt n comes once n is released."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.released: set[int] = set()
        self.changed = threading.Condition()
        self.loaded: list[tuple[int | None, str]] = []

    def encode(self, text: str) -> Sequence[int]:
        return [int(text)]

    def release(self, *numbers: int) -> None:
        with self.changed:
            self.released.update(numbers)

    def wait_for(self, count: int) -> list[int]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, 10)
            return sorted(set(self.asked))

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [[number]] = request.prompts
        with self.changed:
            self.asked.append(number)
            self.changed.notify_all()
        while number not in self.released:
            await asyncio.sleep(0.001)
        return [[InferenceResponse(response="", token_ids=[number, 1], prompt_length=1, logprobs=[-1.0])]]

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int | None = None, *, in_flight: str = "drain") -> None:
        self.loaded.append((version, in_flight))


class Numbers(NumberedProblems):
    """Every third problem has equal rewards."""

    def __init__(self) -> None:
        super().__init__("numbers")
        self.judged = 0

    def problem(self, number: int) -> Problem:
        if number >= 90:
            raise LookupError("no more problems")
        return Problem(problem_id=str(number), prompt=str(number), golden="")

    async def get_reward(self, response: str, problem: Problem) -> float:
        self.judged += 1
        return 0.0 if int(problem.problem_id) % 3 == 0 else float(self.judged)


@pytest.fixture
def interface() -> Scripted:
    return Scripted()


@pytest.fixture
def stream(interface: Scripted) -> Iterator[Any]:
    opened = []

    def open_stream(max_lag: int = 1, agent: Numbers | None = None, **changes: Any) -> RolloutStream:
        opened.append(RolloutStream(dataclasses.replace(CONFIG, **changes), agent or Numbers(), interface, 2, max_lag))
        return opened[-1]

    yield open_stream
    for each in opened:
        each.close()
        each.close()
        assert not each._thread.is_alive()


def numbers(groups: Sequence[Sequence[Any]]) -> list[int]:
    return [int(rollout.problem_id) for group in groups for rollout in group]


def wait_until_judged(agent: Numbers, count: int) -> None:
    """So many answers are there, so that their time cannot run out."""
    deadline = time.monotonic() + 30.0
    while agent.judged < count:
        assert time.monotonic() < deadline, agent.judged
        time.sleep(0.001)


def test_groups_come_in_their_order_whatever_ends_first(interface: Scripted, stream: Any) -> None:
    assert isinstance(interface, LiveWeights)
    own = stream(max_lag=2)
    interface.release(0, 1)
    first = own.take()
    assert numbers(first.groups) == [0, 0, 1, 1] and (first.num_posed, first.oldest, first.num_asked) == (2, 0, 4)
    # Four more are open, and no others.
    assert interface.wait_for(12) == [0, 1, 2, 3, 4, 5]
    own.load_weights([], 1, "keep")
    interface.release(3, 4, 5)
    done = threading.Thread(target=lambda: interface.release(2))
    done.start()
    second = own.take()
    done.join()
    assert numbers(second.groups) == [2, 2, 3, 3] and (second.num_posed, second.oldest) == (4, 0)
    own.load_weights([], 2, "keep")
    third = own.take()
    assert numbers(third.groups) == [4, 4, 5, 5] and third.oldest == 0 and interface.wait_for(20) == list(range(10))
    interface.release(6, 7)
    assert own.take().oldest == 1 and interface.loaded == [(1, "keep"), (2, "keep")]


def test_equal_groups_are_replaced_by_the_next_ones(interface: Scripted, stream: Any) -> None:
    own = stream(filter_equal_groups=True)
    interface.release(*range(20))
    first, second = own.take(), own.take()
    assert numbers(first.groups) == [1, 1, 2, 2] and (first.num_filtered, first.num_posed) == (1, 3)
    assert numbers(second.groups) == [4, 4, 5, 5] and (second.num_filtered, second.num_posed) == (1, 6)
    capped = stream(filter_equal_groups=True, max_filter_ratio=1.0)
    third = capped.take()
    assert numbers(third.groups) == [1, 1, 0, 0] and (third.num_filtered, third.num_posed) == (0, 2)


def test_a_late_group_ends_with_what_it_has_and_later_ones_go_on(interface: Scripted, stream: Any) -> None:
    agent = Numbers()
    own = stream(agent=agent, rollout_timeout_s=0.3)
    interface.release(1)
    own.pose_ahead()
    wait_until_judged(agent, 2)
    first = own.take()
    assert numbers(first.groups) == [1, 1] and first.num_asked == 4 and first.num_posed == 2
    interface.release(2, 3)
    wait_until_judged(agent, 6)
    assert numbers(own.take().groups) == [2, 2, 3, 3]


def test_drawing_poses_nothing_before_the_weights_that_it_would_wait_for(interface: Scripted, stream: Any) -> None:
    own = stream()
    interface.release(0, 1, 2, 3)
    assert numbers(own.draw().groups) == [0, 0, 1, 1] and interface.wait_for(4) == [0, 1]
    own.load_weights([], 1, "keep")
    own.pose_ahead()
    assert interface.wait_for(8) == [0, 1, 2, 3]
    # A refit comes while they are drawn, and they were posed before it.
    own.load_weights([], 2, "keep")
    assert own.draw().oldest == 1


@pytest.mark.journey
def test_groups_have_their_time_from_when_they_are_expected(interface: Scripted, stream: Any) -> None:
    agent = Numbers()
    own = stream(agent=agent, rollout_timeout_s=0.3)
    interface.release(1, 2, 3)
    taken: list[Any] = []
    drawing = threading.Thread(target=lambda: taken.append(own.draw()))
    drawing.start()
    drawing.join(1.0)
    assert drawing.is_alive() and not taken
    wait_until_judged(agent, 2)
    own.expect()
    drawing.join(10)
    assert numbers(taken[0].groups) == [1, 1] and taken[0].num_asked == 4
    # Of an expectation that came early the next draw knows nothing.
    own.pose_ahead()
    wait_until_judged(agent, 6)
    own.expect()
    assert numbers(own.draw().groups) == [2, 2, 3, 3]
    late = threading.Thread(target=lambda: taken.append(own.draw()))
    late.start()
    late.join(1.0)
    assert late.is_alive()
    interface.release(4, 5)
    late.join(10)
    assert numbers(taken[1].groups) == [4, 4, 5, 5]


def test_a_stream_that_is_closed_lets_go_of_whoever_draws(interface: Scripted, stream: Any) -> None:
    own, raised = stream(), []

    def draw() -> None:
        try:
            own.draw()
        except RuntimeError as error:
            raised.append(str(error))

    drawing = threading.Thread(target=draw)
    drawing.start()
    interface.wait_for(4)
    own.close()
    drawing.join(10)
    assert raised == ["the rollouts are given up: the loop was closed"]


def test_a_failing_environment_reaches_whoever_takes(interface: Scripted, stream: Any) -> None:
    class Endless(Numbers):
        async def get_reward(self, response: str, problem: Problem) -> float:
            return math.inf

    own = stream(agent=Endless())
    interface.release(0)
    with pytest.raises(ValueError, match="reward=inf of problem '0'"):
        own.take()


def test_an_environment_without_more_problems_is_named(interface: Scripted, stream: Any, caplog: pytest.LogCaptureFixture) -> None:
    agent = Numbers()
    agent.start_at(89)
    own = stream(agent=agent)
    interface.release(89)
    assert numbers(own.take().groups) == [89, 89]
    assert "no more problems" in caplog.text


def test_a_problem_that_cannot_be_posed_is_left_behind(interface: Scripted, stream: Any, caplog: pytest.LogCaptureFixture) -> None:
    class OneBroken(Numbers):
        def problem(self, number: int) -> Problem:
            if number == 1:
                raise LookupError("problem 1 is broken")
            return super().problem(number)

    own = stream(agent=OneBroken())
    interface.release(*range(20))
    taken = own.take()
    assert (numbers(taken.groups), taken.num_asked, taken.num_posed) == ([0, 0], 4, 2)
    assert "problem 1 is broken" in caplog.text
    assert numbers(own.take().groups) == [2, 2, 3, 3]
