# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A problem that cannot be posed costs its own answers, and a run goes on behind it."""

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_rl import (
    BestAndWorst,
    GenericGenerationArgs,
    GRPOConfig,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    NumberedProblems,
    Problem,
)
from mcore_rl._loop._loop import rollout_means
from mcore_rl._rollouts._collect import Collection, draw, exchange, joined, share_of
from mcore_rl._rollouts._stream import RolloutStream


class Scripted(InferenceInterface):
    """One answer to all."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        return [[InferenceResponse(response="x", token_ids=[*prompt, 120], prompt_length=len(prompt), logprobs=[-1.0])]]


class Gaps(NumberedProblems):
    """Problem 2 cannot be made, or others."""

    def __init__(self, *broken: int) -> None:
        super().__init__("gaps")
        self.broken = broken or (2,)

    def problem(self, number: int) -> Problem:
        if number in self.broken:
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
    # Where in the environment.
    assert "Traceback (most recent call last)" in caplog.text and 'raise KeyError("a broken row")' in caplog.text
    report = rollout_means(config, Collection.of(config, taken.groups), None)
    assert (report["num_rollouts"], report["num_dropped"]) == (6, 2)
    agent.start_at(2)
    one_of_four = draw(config, agent, Scripted(), 1)
    assert one_of_four.failure is None and one_of_four.groups == []
    agent.start_at(2)
    assert asyncio.run(agent.rollout(Scripted(), args=GenericGenerationArgs())) is None


def test_an_environment_that_poses_nothing_says_what_it_raised() -> None:
    config = GRPOConfig(num_groups=4, group_size=2, seq_len=64)
    for num_groups in (2, 4):
        taken = draw(config, Gaps(*range(8)), Scripted(), num_groups)
        assert repr(taken.failure) == "KeyError('a broken row')" and taken.groups == []
    # Nobody else draws for the iteration.
    assert isinstance(draw(dataclasses.replace(config, num_groups=1), Gaps(0), Scripted(), 1).failure, KeyError)
    pairs = BestAndWorst(Gaps(*range(64)), group_size=2)
    with pytest.raises(KeyError, match="a broken row"):
        asyncio.run(pairs.get_contrastive_rollouts(Scripted(), num_pairs=2, args=GenericGenerationArgs()))


def test_an_environment_that_poses_nothing_says_what_it_raised_where_groups_are_drawn_ahead() -> None:
    class Live(Scripted):
        async def load_weights(self, *_: Any, **__: Any) -> None: ...

    config = GRPOConfig(num_groups=4, group_size=2, seq_len=64)
    stream = RolloutStream(config, Gaps(0, 2, 3), Live(), num_groups=2, max_lag=1)
    try:
        taken = stream.take()
        assert repr(taken.lost) == "KeyError('a broken row')" and [group[0].problem_id for group in taken.groups] == ["1"]
        with pytest.raises(KeyError, match="a broken row"):
            stream.take()
    finally:
        stream.close()


def test_an_iteration_without_rollouts_names_the_last_problem_that_was_lost() -> None:
    class Hasty(Gaps):
        async def get_reward(self, response: str, problem: Problem) -> float:
            raise RuntimeError("the judge fell over")

    config = GRPOConfig(num_groups=4, group_size=2, seq_len=64)
    taken = draw(config, Hasty(), Scripted(), 4)
    assert taken.failure is None and taken.groups == []
    message = r"no rollout of 4 groups of 2 is left: .*; last of each rank: \{0: \"KeyError\('a broken row'\), problem 2\"\}"
    with pytest.raises(RuntimeError, match=message) as raised:
        Collection.of(config, taken.groups, lost=taken.lost)
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(RuntimeError, match="last of each rank: {1: ") as raised:
        joined(config, [share_of([], 0, None, replica=0), share_of([], 0, None, replica=1, lost=taken.lost)])
    assert raised.value.__cause__ is None


def exchanged(broken: dict[int, tuple[int, ...]]) -> str:
    """What a rank whose own problems cannot be made hears, and what the others do."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    rank = groups.world.rank
    agent, config = Gaps(*broken[rank]), GRPOConfig(num_groups=4, group_size=2, seq_len=64)
    agent.start_at(0, rank=rank, num_ranks=2)
    try:
        collected = exchange(config, draw(config, agent, Scripted(), 2), groups, torch.device("cpu"), timeout_s=60)
    except (KeyError, RuntimeError) as error:
        return repr(error)
    return f"{len(collected.headers)} rollouts"


@pytest.mark.world(2, shared=True)
def test_all_ranks_end_where_one_of_them_can_pose_nothing(world) -> None:
    assert world(exchanged, broken={0: (0,), 1: (1,)}) == ["4 rollouts"] * 2
    ours, theirs = world(exchanged, broken={0: (0,), 1: (1, 3)})
    assert theirs == "KeyError('a broken row')"
    assert ours.startswith("RuntimeError('ranks failed: {1: ") and "a broken row" in ours and "problem 3" in ours
