# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights for all engines of a coordinator, over real sockets."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

pytest.importorskip("zmq")

from mcore_inference import CoordinatorError, EngineRunner, SamplingParams, WeightLoadError, WeightSlice
from mcore_inference.coordinator import EngineWorker, InferenceClient
from mcore_parallel import named_shards
from mcore_parallel.data import ByteTokenizer
from tests.support.coordinated_engines import serve

Make = Callable[..., Any]
TEN = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True, top_n_logprobs=2)
LONG = SamplingParams(num_tokens_to_generate=400, ignore_eos=True, seed=1)


def weights_of(engine: Any) -> list[tuple[str, torch.Tensor]]:
    return [(shard.name, shard.parameter.detach().clone()) for shard in named_shards(engine.model)]


@pytest.fixture
def renewed(make_model: Make, make_engine: Make) -> Any:
    """An engine of other weights."""
    return make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1, seed=1), ByteTokenizer(), max_sequence_length=512)


@pytest.mark.parametrize(
    "policy", ["recompute", pytest.param("keep", marks=pytest.mark.journey), pytest.param("drain", marks=pytest.mark.journey)]
)
def test_weights_reach_all_engines_while_they_serve(runners: list[EngineRunner], renewed: Any, policy: Any) -> None:
    new, old = weights_of(renewed), weights_of(runners[0].engine)
    [expected] = renewed.generate(["abc"], TEN)

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            params = dataclasses.replace(LONG, num_tokens_to_generate=150)
            streams = [await client.submit(f"{index}", params) for index in range(4)]
            for stream in streams:
                await anext(aiter(stream))
            assert await client.load_weights(new, in_flight=policy) == 1
            for record in await asyncio.gather(*(client.add_request("abc", TEN) for _ in range(4))):
                assert record.generated_tokens == expected.generated_tokens
                assert record.weight_versions == [(1, 10)]
            for stream in streams:
                record = await stream.record()
                assert record.error is None and len(record.generated_tokens) == 150
                assert {version for version, _ in record.weight_versions} == ({0} if policy == "drain" else {0, 1})
            if policy != "keep":
                return
            # Boxes of parameters, backwards, with a number of the caller's, however requests go on.
            rows = [
                (name, WeightSlice(tensor=tensor[at : at + 1], offsets=(at, *(0,) * (tensor.dim() - 1))))
                for name, tensor in old
                for at in reversed(range(len(tensor)))
            ]
            assert await client.load_weights(rows, version=7) == 7
            assert [engine.weight_version for engine in (await client.status()).engines] == [7, 7]

    with ExitStack() as stack:
        # Many buckets, into which no parameter fits whole.
        asyncio.run(main(serve(stack, runners, max_message_bytes=8192).address))
    for runner in runners:
        for (_, tensor), (_, loaded) in zip(old if policy == "keep" else new, weights_of(runner.engine), strict=True):
            assert torch.equal(tensor, loaded)


def test_an_engine_that_refuses_weights_is_named_and_none_is_half_loaded_after_the_next(runners: list[EngineRunner], renewed: Any) -> None:
    new = weights_of(renewed)
    [expected] = renewed.generate(["abc"], TEN)
    load, failures = runners[1].engine.load_weights, [RuntimeError("the disk is full")]

    def fail_once(chunks: Any, *arguments: Any, **named: Any) -> None:
        chunks = iter(chunks)
        next(chunks)
        if failures:
            raise failures.pop()
        load([new[0], *chunks], *arguments, **named)

    runners[1].engine.load_weights = fail_once  # type: ignore[method-assign]

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(ValueError, match="in_flight='both'"):
                await client.load_weights(new, in_flight="both")  # type: ignore[arg-type]
            with pytest.raises(WeightLoadError, match="dp-1: RuntimeError: the disk is full$"):
                await client.load_weights(new)
            with pytest.raises(WeightLoadError, match=r"dp-0: WeightLoadError: nothing is no parameter of the model.*dp-1: "):
                await client.load_weights([("nothing", torch.zeros(1))])

            def broken() -> Iterator[tuple[str, torch.Tensor]]:
                yield from new[:2]
                raise OSError("the file is gone")

            with pytest.raises(OSError, match="the file is gone"):
                await client.load_weights(broken())
            assert (await client.status()).state == "running"
            assert await client.load_weights(new, version=3) == 3
            for record in await asyncio.gather(*(client.add_request("abc", TEN) for _ in range(4))):
                assert (record.generated_tokens, record.weight_versions) == (expected.generated_tokens, [(3, 10)])

    with ExitStack() as stack:
        asyncio.run(main(serve(stack, runners, max_message_bytes=600_000).address))


def test_an_engine_that_is_lost_in_a_load_is_named_and_the_others_have_the_weights(runners: list[EngineRunner], renewed: Any) -> None:
    new = weights_of(renewed)

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        yield from new[:-1]
        worker.close()
        time.sleep(0.2)
        yield new[-1]

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(CoordinatorError, match=r"lost while weights were loaded \(dp-1: (it left|its connection is gone)\)"):
                await client.load_weights(slowly())
            status = await client.status()
            assert [(engine.name, engine.weight_version) for engine in status.engines] == [("dp-0", 1)]
            # The one that missed the load may come back, and gets no request before the next one.
            with EngineWorker(runners[1], address, name="dp-1", heartbeat_s=0.05):
                while len((await client.status()).engines) < 2:
                    await asyncio.sleep(0.01)
                records = await asyncio.gather(*(client.add_request("abc", TEN) for _ in range(4)))
                assert all(record.weight_versions == [(1, 10)] for record in records)
                assert await client.load_weights(new) == 2
                assert [engine.weight_version for engine in (await client.status()).engines] == [2, 2]

    with ExitStack() as stack:
        coordinator = serve(stack, runners[:1])
        worker = stack.enter_context(EngineWorker(runners[1], coordinator.address, name="dp-1", heartbeat_s=0.05))
        coordinator.wait_for_engines(2)
        asyncio.run(main(coordinator.address))
