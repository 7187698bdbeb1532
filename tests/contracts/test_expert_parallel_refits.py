# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""New weights for engines that share experts: all load between the same two steps, and what cannot be agreed on changes nothing."""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import EngineRunner, LockstepConfig, SamplingParams, WeightLoadError, WeightSlice, follow_runner
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from tests.contracts.test_expert_parallel_engine import PROMPTS, SPLIT, make_engine, shared_engine, slow_down

World = Callable[..., list[Any]]
POLICIES = ["recompute", "keep", "drain"]
# Short enough for the cache: what is preempted is computed again by new weights, under keep too.
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=18, ignore_eos=True, return_log_probs=True)
PATIENT = LockstepConfig(join_timeout_s=50, silence_timeout_s=20, vote_interval_steps=3)


def weights(seed: int, **fields: Any) -> list[tuple[str, Tensor]]:
    return [(shard.name, shard.parameter.detach()) for shard in named_shards(make_engine(ProcessGroups.single(), seed, **fields).model)]


def own_parts(engine: Any, chunks: list[tuple[str, Tensor]]) -> list[tuple[str, WeightSlice]]:
    """Of each parameter what this rank holds."""
    groups, whole = engine.model.groups, dict(chunks)
    specs = {shard.name: shard.spec for shard in named_shards(engine.model)}
    return [(name, WeightSlice(tensor=whole[name][spec.slices(groups)], offsets=spec.offset(groups))) for name, spec in specs.items()]


def replayed(prompt: list[int], versions: list[tuple[int, int]], policies: list[str], **fields: Any) -> Any:
    """A request in one process, whose weights change after as many tokens."""
    engine = make_engine(ProcessGroups.single(), 0, **fields)
    for version in range(1, versions[0][0] + 1):
        engine.load_weights(weights(version, **fields), version)
    number, done = engine.add_request(prompt, GREEDY), []
    for (version, _), count in zip(versions, itertools.accumulate(count for _, count in versions), strict=True):
        for missed in range(engine.weight_version + 1, version + 1):
            engine.load_weights(weights(missed, **fields), missed, in_flight=policies[missed - 1])
        while not done and engine.get_request(number).num_generated < count:
            done += engine.step()
    [record] = done
    return record


def num_generated(engine: Any, number: int) -> int:
    """All tokens of a request that has ended."""
    try:
        return engine.get_request(number).num_generated
    except KeyError:
        return 18


def check_policies(plan: ParallelPlan, fields: dict[str, Any]) -> list[list[tuple[int, int]]]:
    groups = ProcessGroups.build(plan)
    engine, place = make_engine(groups, **fields), groups.dp.rank
    if groups.tp_pp.rank:
        follow_runner(engine, PATIENT)
        return []
    # Weights come long before the requests end.
    slow_down(engine, 0.03)
    new = [weights(version + 1, **fields) for version in range(3)]

    async def main() -> list[Any]:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            # One rank has two requests, the other none and then one.
            streams = [await runner.submit(prompt, GREEDY) for prompt in PROMPTS[: 2 * (1 - place)]]
            for version, policy in enumerate(POLICIES, 1):
                for stream in streams:
                    while await runner.call(lambda number=stream.request_id: num_generated(engine, number)) < 3 * version:
                        await asyncio.sleep(0.01)
                own = groups.tp_pp.size == 1 and place == 1
                await runner.load_weights(own_parts(engine, new[version - 1]) if own else new[version - 1], version, in_flight=policy)
                assert engine.weight_version == version
                if version == 1 and place:
                    streams.append(await runner.submit(PROMPTS[4], GREEDY))
            streams.append(await runner.submit(PROMPTS[3], GREEDY))
            ended = [await stream.record() for stream in streams]
            # Who closes first would fail the requests of the other.
            await asyncio.to_thread(dist.barrier, groups.dp.pg)
            return ended

    records = asyncio.run(main())
    for record in records:
        alone = replayed(record.prompt_tokens, record.weight_versions, POLICIES, **fields)
        assert record.generated_tokens == alone.generated_tokens
        torch.testing.assert_close(record.generated_log_probs, alone.generated_log_probs, rtol=1e-10, atol=1e-10)
    return [record.weight_versions for record in records]


@pytest.mark.journey
@pytest.mark.world(2)
def test_each_token_is_of_the_weights_it_is_stamped_with_under_every_policy(world: World) -> None:
    busy, other = world(check_policies, plan=ParallelPlan(dp=2, ep=2), fields={})
    # Requests in flight went through two loads, and none through the one that drains.
    assert any(len(versions) > 1 for versions in busy) and all(versions[-1][0] <= 2 for versions in busy[:-1])
    assert busy[-1] == other[-1] == [(3, 18)]


def check_work_of_others() -> int:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    engine = make_engine(groups)
    # Far longer than the other rank may look away.
    slow_down(engine, 0.1)

    async def main() -> int:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            assert not runner.others_have_work
            await asyncio.to_thread(dist.barrier, groups.dp.pg)
            if groups.dp.rank == 0:
                # To its end, though the other rank has nothing to do but to wait for it.
                return (await (await runner.submit(PROMPTS[0], GREEDY)).record()).num_generated
            seen = 0
            deadline = time.monotonic() + 20
            while (not seen or runner.others_have_work) and time.monotonic() < deadline:
                seen += runner.others_have_work
                await asyncio.sleep(0.005)
            assert seen and time.monotonic() < deadline
            return 0

    return asyncio.run(main())


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_waits_for_the_work_of_others_ends_none_of_it(world: World) -> None:
    assert world(check_work_of_others) == [18, 0]


@pytest.mark.journey
@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["tp2-ep4", "pp2-ep2"])
def test_engines_of_several_ranks_load_together(world: World, name: str) -> None:
    plan, fields = SPLIT[name]
    loaded = [versions for versions in world(check_policies, plan=plan, fields=fields) if versions]
    assert len(loaded) == 2 and all(versions[-1] == [(3, 18)] for versions in loaded)


def check_disagreement() -> None:
    engine, rank = shared_engine(), dist.get_rank()
    slow_down(engine)
    new = weights(1)
    quick = dataclasses.replace(PATIENT, step_timeout_s=1.5)

    async def main() -> None:
        with EngineRunner(engine, lockstep=quick) as runner:
            stream = await runner.submit(PROMPTS[rank], GREEDY)
            expected = make_engine(ProcessGroups.single()).generate([PROMPTS[rank]], GREEDY)[0].generated_tokens
            with pytest.raises(WeightLoadError, match="in_flight='keep'.*in_flight='recompute'.*make one call on all"):
                await runner.load_weights(new, 1, in_flight=["recompute", "keep"][rank])  # type: ignore[arg-type]
            await asyncio.to_thread(dist.barrier)
            if rank == 0:
                with pytest.raises(WeightLoadError, match=r"ep ranks \[1\] did not call load_weights\(version=1\) within 1.5 s; all have"):
                    await runner.load_weights(new, 1)
            # The old weights served on.
            assert (await stream.record()).generated_tokens == expected and engine.weight_version == 0
            await asyncio.to_thread(dist.barrier)
            await runner.pause()
            stream = await runner.submit(PROMPTS[rank], GREEDY)
            await asyncio.to_thread(dist.barrier)
            # Nothing is in flight, so nothing is to be drained.
            await runner.load_weights(new, 1, in_flight="drain")
            assert engine.weight_version == 1
            # What one rank refuses is said on both, and none steps before both have the weights.
            words = (
                "is no parameter of the model" if rank == 1 else "not every rank has loaded: ep rank 1 has weight_version=1 and ep rank 0 2"
            )
            with pytest.raises(WeightLoadError, match=words):
                await runner.load_weights([("none", torch.zeros(1))] if rank else weights(2), 2)
            await runner.unpause()
            await asyncio.sleep(0.1)
            assert not engine.num_in_flight and engine.weight_version == 2 - rank
            await runner.load_weights(weights(2), 2)
            record = await stream.record()
            assert record.weight_versions == [(2, 18)]
            assert record.generated_tokens == make_engine(ProcessGroups.single(), 2).generate([PROMPTS[rank]], GREEDY)[0].generated_tokens
            await asyncio.to_thread(dist.barrier)

    asyncio.run(main())


@pytest.mark.journey
@pytest.mark.world(2)
def test_loads_that_ranks_do_not_agree_on_change_nothing_and_name_who(world: World) -> None:
    world(check_disagreement)


def check_drained() -> None:
    """Without runners, by the engines themselves."""
    engine, rank = shared_engine(), dist.get_rank()
    if rank == 0:
        engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    engine.load_weights(weights(1), 1, in_flight="drain")
    if rank == 0:
        [record] = engine.take_finished()
        assert record.weight_versions == [(0, 18)]
    assert not engine.num_in_flight and engine.weight_version == 1


@pytest.mark.world(2)
def test_ranks_drain_together_without_runners(world: World) -> None:
    world(check_drained)
