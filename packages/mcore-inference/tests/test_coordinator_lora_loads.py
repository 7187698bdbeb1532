# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters for all engines of a coordinator, over real sockets."""

import asyncio
import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("zmq")

from mcore_inference import (
    CoordinatorError,
    EngineRunner,
    LoraInUseError,
    LoraLoadError,
    LoraSlots,
    LoraWeights,
    SamplingParams,
    UnknownLoraError,
)
from mcore_inference.coordinator import (
    CoordinatedRunner,
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    InferenceClient,
)
from mcore_inference.coordinator._messages import LoadLora, WeightBucket
from mcore_inference.coordinator._weights import LoraReceiver, pack
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel
from tests.support.adapters import merged, random_adapter
from tests.support.coordinated_engines import QUICK, join, serve, until

Make = Callable[..., Any]
SLOTS = LoraSlots(max_loras=2, max_lora_rank=4)
TEN = SamplingParams(temperature=0.0, num_tokens_to_generate=10, ignore_eos=True)
LONG = SamplingParams(num_tokens_to_generate=80, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def model(make_model: Make) -> GPTModel:
    return make_model(vocab_size=272, dtype=torch.float64, layers=1).eval()


@pytest.fixture(scope="module")
def adapters(model: GPTModel) -> dict[str, LoraWeights]:
    return {name: random_adapter(model, rank, rank) for name, rank in (("sql", 2), ("chat", 4))}


@pytest.fixture(scope="module")
def answers(model: GPTModel, adapters: dict[str, LoraWeights], make_engine: Make) -> dict[str | None, list[int]]:
    """What models with merged weights generate."""
    tokens_of = {}
    for name in (None, "sql", "chat"):
        engine = make_engine(merged(model, None if name is None else adapters[name]), ByteTokenizer())
        tokens_of[name] = engine.generate(["abc"], TEN)[0].generated_tokens
    assert len({tuple(tokens) for tokens in tokens_of.values()}) == 3
    return tokens_of


@pytest.fixture
def engines(model: GPTModel, make_engine: Make) -> Iterator[Callable[[], EngineRunner]]:
    """Makes runners, each with a model of its own."""
    with ExitStack() as stack:

        def make(**sizes: Any) -> EngineRunner:
            engine = make_engine(copy.deepcopy(model), ByteTokenizer(), **{"lora": SLOTS, "run_ahead": True, **sizes})
            return stack.enter_context(EngineRunner(engine, stall_timeout_s=100.0))

        yield make


async def check(client: InferenceClient, answers: dict[str | None, list[int]], *names: str | None) -> None:
    for _ in range(2):
        records = await asyncio.gather(*(client.add_request("abc", TEN, lora=name) for name in names * 2))
        assert [record.generated_tokens for record in records] == [answers[name] for name in names * 2]
        assert [record.lora for record in records] == list(names * 2)


def test_adapters_reach_all_engines_in_parts_and_leave_them(
    engines: Callable[..., EngineRunner], adapters: dict[str, LoraWeights], answers: dict[str | None, list[int]]
) -> None:
    runners = [engines(), engines()]

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(UnknownLoraError, match="lora='sql' is not loaded; no adapter is loaded"):
                await client.add_request("abc", TEN, lora="sql")
            await client.load_lora("sql", adapters["sql"])
            # Beside requests that run.
            streams = [await client.submit(f"{index}", LONG, lora="sql") for index in range(4)]
            for stream in streams:
                await anext(aiter(stream))
            await client.load_lora("chat", adapters["chat"])
            assert (await client.status()).loras == ["sql", "chat"] == list(runners[0].loras) == list(runners[1].loras)
            await check(client, answers, "sql", None, "chat")
            with pytest.raises(LoraInUseError, match="lora='sql' is used by 4 requests"):
                await client.unload_lora("sql")
            for stream in streams:
                stream.abort()
            # The engines may still compute what was aborted.
            await client.unload_lora("sql")
            assert runners[0].loras == runners[1].loras == ("chat",)
            with pytest.raises(UnknownLoraError, match="lora='sql' is not loaded; loaded are 'chat'"):
                await client.unload_lora("sql")
            with pytest.raises(LoraLoadError, match="lora='chat' is loaded; unload it first"):
                await client.load_lora("chat", adapters["sql"])
            for name in ("", "x" * 257, 3):
                with pytest.raises(ValueError, match="must be a name of 1 to 256 characters"):
                    await client.load_lora(name, adapters["sql"])  # type: ignore[arg-type]
                with pytest.raises(ValueError, match="must be a name of 1 to 256 characters"):
                    await client.submit("abc", TEN, lora=name)  # type: ignore[arg-type]
            # The name comes again with another adapter: nothing cached of the first serves it.
            await client.load_lora("sql", adapters["chat"])
            [record] = await asyncio.gather(client.add_request("abc", TEN, lora="sql"))
            assert record.generated_tokens == answers["chat"]

    with ExitStack() as stack:
        # Matrices go in many parts.
        asyncio.run(main(serve(stack, runners, max_message_bytes=8192).address))


def test_what_one_engine_refuses_none_has(
    engines: Callable[..., EngineRunner], adapters: dict[str, LoraWeights], answers: dict[str | None, list[int]]
) -> None:
    runners = [engines(), engines(lora=LoraSlots(max_loras=2, max_lora_rank=2))]

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(LoraLoadError, match=r"no engine has lora='chat' \(dp-1: LoraLoadError: .*max_lora_rank=2"):
                await client.load_lora("chat", adapters["chat"])
            await client.load_lora("sql", adapters["sql"])
            assert runners[0].loras == runners[1].loras == ("sql",)
            with pytest.raises(LoraLoadError, match="dp-0: LoraLoadError: .*dp-1: LoraLoadError: "):
                await client.load_lora(" ", adapters["sql"])
            await check(client, answers, "sql", None)
        others = CoordinatorSecurity(secret="job")
        async with InferenceClient(guarded.address, security=others) as client:
            for call in (client.load_lora("sql", adapters["sql"]), client.unload_lora("sql")):
                with pytest.raises(CoordinatorError, match="_lora needs control_secret"):
                    await call

    with ExitStack() as stack:
        own = CoordinatorSecurity(secret="job", control_secret="key")
        guarded = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(security=own)))
        asyncio.run(main(serve(stack, runners).address))


def test_engines_that_come_later_have_the_adapters_and_those_of_another_coordinator_are_forgotten(
    engines: Callable[..., EngineRunner], adapters: dict[str, LoraWeights], answers: dict[str | None, list[int]]
) -> None:
    first, second, bare = engines(), engines(), engines(lora=None)

    async def ask(address: str, *names: str | None) -> None:
        async with InferenceClient(address) as client:
            await check(client, answers, *names)

    async def load(address: str, name: str) -> None:
        async with InferenceClient(address) as client:
            await client.load_lora(name, adapters[name])

    with ExitStack() as stack:
        coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**QUICK)))
        with join(stack, first, coordinator, "dp-0"):
            coordinator.wait_for_engines(1)
            asyncio.run(load(coordinator.address, "sql"))
            asyncio.run(load(coordinator.address, "chat"))
            join(stack, second, coordinator, "dp-1")
            coordinator.wait_for_engines(2)
        # The first one is gone.
        asyncio.run(ask(coordinator.address, "chat", "sql", None))
        assert second.loras == ("sql", "chat")
        # One that cannot have them is not served from, and says why.
        unfit = join(stack, bare, coordinator, "dp-2")
        until(lambda: unfit.refusal is not None and "it cannot take the adapter 'sql'" in unfit.refusal, "it is refused")
        assert "LoraSlots" in (unfit.refusal or "")
        # In the hands of a coordinator that has none, an engine forgets what it was given; what its process loaded stays.
        address = coordinator.address
        coordinator.close()
        host, port = address.removeprefix("tcp://").split(":")
        other = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**QUICK, host=host, port=int(port))))
        until(lambda: second.loras == (), "the adapters are forgotten", 60.0)
        until(lambda: other.num_engines == 2, "the other one may come again", 60.0)
        asyncio.run(ask(address, None))


def test_an_engine_that_was_given_up_for_a_while_comes_back_with_its_adapters(
    engines: Callable[..., EngineRunner], adapters: dict[str, LoraWeights], answers: dict[str | None, list[int]]
) -> None:
    runner = engines()

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            await client.load_lora("sql", adapters["sql"])
            loads: list[str] = []
            load = runner.load_lora

            async def counted(name: str, weights: LoraWeights) -> None:
                loads.append(name)
                await load(name, weights)

            runner.load_lora = counted  # type: ignore[method-assign]
            coordinator.lose_engine("dp-0", "a test says so")
            await check(client, answers, "sql", None)
            assert not loads
            await client.suspend_engines()
            await client.load_lora("chat", adapters["chat"])
            await client.resume_engines()
            await check(client, answers, "sql", None, "chat")
            assert loads == ["chat"]

    with ExitStack() as stack:
        coordinator = serve(stack, [runner])
        asyncio.run(main(coordinator.address))


def test_adapters_change_behind_a_slow_load_of_weights_and_cost_no_engine(
    engines: Callable[..., EngineRunner], model: GPTModel, adapters: dict[str, LoraWeights], answers: dict[str | None, list[int]]
) -> None:
    runners = [engines(), engines()]
    is_begun, may_end = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, Tensor]]:
        for index, (name, value) in enumerate(model.named_parameters()):
            if index == 2:
                is_begun.set()
                assert may_end.wait(60.0)
            yield name, value.detach()

    async def main(address: str) -> None:
        async with InferenceClient(address) as trainer, InferenceClient(address) as operator:
            await operator.load_lora("sql", adapters["sql"])
            loading = asyncio.ensure_future(trainer.load_weights(slow(), version=3))
            assert await asyncio.to_thread(is_begun.wait, 60.0)
            changing = asyncio.ensure_future(operator.unload_lora("sql"))
            # Longer than an engine gets to forget an adapter.
            await asyncio.sleep(5.0)
            assert not changing.done() and not loading.done()
            may_end.set()
            assert await loading == 3
            await changing
            status = await trainer.status()
            assert status.loras == [] and {engine.name: engine.weight_version for engine in status.engines} == {"dp-0": 3, "dp-1": 3}
            await operator.load_lora("chat", adapters["chat"])
            await check(operator, answers, "chat", None)

    with ExitStack() as stack:
        asyncio.run(main(serve(stack, runners, max_message_bytes=8192, signal_timeout_s=4.0).address))


@pytest.mark.parametrize("call", ["load_lora", "unload_lora"])
def test_an_engine_that_is_given_up_while_it_changes_adapters_comes_back_with_what_became_of_them(
    engines: Callable[..., EngineRunner], adapters: dict[str, LoraWeights], answers: dict[str | None, list[int]], call: str
) -> None:
    runner = engines(lora=LoraSlots(max_loras=1, max_lora_rank=4))
    is_begun, may_end = threading.Event(), threading.Event()

    async def main(coordinator: DataParallelInferenceCoordinator) -> None:
        async with InferenceClient(coordinator.address) as client:
            if call == "unload_lora":
                await client.load_lora("sql", adapters["sql"])
            change = getattr(runner, call)

            async def slow(*values: Any) -> None:
                is_begun.set()
                while not may_end.is_set():
                    await asyncio.sleep(0.01)
                await change(*values)

            setattr(runner, call, slow)
            arguments = ("sql", adapters["sql"]) if call == "load_lora" else ("sql",)
            changing = asyncio.ensure_future(getattr(client, call)(*arguments))
            assert await asyncio.to_thread(is_begun.wait, 60.0)
            coordinator.lose_engine("dp-0", "a test says so")
            with pytest.raises((LoraLoadError, CoordinatorError), match="dp-0: a test says so"):
                await changing
            # Some signs of life, of which none says that it has or lacks what is about to change.
            await asyncio.sleep(0.5)
            assert not coordinator.num_engines
            may_end.set()
            await asyncio.to_thread(coordinator.wait_for_engines, 1)
            # The only slot is free again.
            await client.load_lora("chat", adapters["chat"])
            assert runner.loras == ("chat",)
            await check(client, answers, "chat", None)

    with ExitStack() as stack:
        stack.callback(may_end.set)
        asyncio.run(main(serve(stack, [runner])))


@pytest.mark.parametrize("kind", ["weights", "adapters"])
def test_a_load_that_is_cancelled_while_it_waits_holds_nobody_up(
    engines: Callable[..., EngineRunner], model: GPTModel, adapters: dict[str, LoraWeights], kind: str
) -> None:
    is_begun, may_end = threading.Event(), threading.Event()

    class Slow:
        """An adapter whose matrices come when they may."""

        rank, alpha = adapters["sql"].rank, adapters["sql"].alpha

        def tensors(self) -> Any:
            return self

        def items(self) -> Iterator[tuple[str, Tensor]]:
            is_begun.set()
            assert may_end.wait(60.0)
            yield from chunks

    async def main(address: str) -> None:
        async with InferenceClient(address) as first, InferenceClient(address) as second, InferenceClient(address) as third:

            async def change(client: InferenceClient, name: str, weights: Any) -> None:
                if kind == "adapters":
                    await client.load_lora(name, weights)
                else:
                    await client.load_weights(weights.items())

            begun = asyncio.ensure_future(change(first, "first", Slow()))
            assert await asyncio.to_thread(is_begun.wait, 60.0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(change(second, "second", Slow()), 0.3)
            may_end.set()
            await begun
            # Long before a client that sends nothing is late.
            await asyncio.wait_for(change(third, "third", Slow()), 60.0)
            assert (await third.status()).loras == ([] if kind == "weights" else ["first", "third"])

    chunks = list((dict(model.named_parameters()) if kind == "weights" else adapters["sql"].tensors()).items())
    with ExitStack() as stack:
        stack.callback(may_end.set)
        asyncio.run(main(serve(stack, [engines()]).address))


def test_a_coordinated_runner_names_adapters_from_any_loop(
    engines: Callable[..., EngineRunner], adapters: dict[str, LoraWeights], answers: dict[str | None, list[int]]
) -> None:
    async def main(ours: CoordinatedRunner, others: CoordinatedRunner) -> None:
        assert ours.loras == ()
        await ours.load_lora("sql", adapters["sql"])
        assert ours.loras == ("sql",) == await others.find_loras() == others.loras
        record = await (await others.submit("abc", TEN, lora="sql")).record()
        assert (record.generated_tokens, record.lora) == (answers["sql"], "sql")
        with pytest.raises(UnknownLoraError, match="lora='chat' is not loaded; loaded are 'sql'"):
            await (await ours.submit("abc", TEN, lora="chat", stream=False)).record()
        with pytest.raises(LoraLoadError, match="is loaded"):
            await others.load_lora("sql", adapters["sql"])
        await others.unload_lora("sql")
        assert others.loras == ()
        ours.close()
        with pytest.raises(CoordinatorError, match="the runner was closed"):
            await ours.load_lora("sql", adapters["sql"])

    with ExitStack() as stack:
        address = serve(stack, [engines()]).address
        first, second = (stack.enter_context(CoordinatedRunner(address)) for _ in range(2))
        asyncio.run(main(first, second))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_matrices_are_the_same_behind_the_wire_however_they_are_cut(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    pair = torch.randn(3, 37, generator=generator).to(dtype), torch.randn(2, 11, 3, generator=generator).to(dtype)
    weights = LoraWeights(rank=3, alpha=6.0, matrices={"layers.0.mlp.up": pair})
    for size in (2**20, 600, 300):
        receiver = LoraReceiver(LoadLora(call=0, name="x", rank=3, alpha=6.0))
        for chunks in pack(weights.tensors().items(), size):
            assert not receiver.put(WeightBucket(call=0, index=1, chunks=chunks))
        assert receiver.put(WeightBucket(call=0, index=1, chunks=[], end="whole"))
        got = receiver.weights()
        assert (got.rank, got.alpha) == (3, 6.0)
        assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(got.matrices["layers.0.mlp.up"], pair, strict=True))
    # A part that is missing is found.
    receiver = LoraReceiver(LoadLora(call=0, name="x", rank=3, alpha=6.0))
    first, *_, last = pack(weights.tensors().items(), 300)
    for chunks in (first, last):
        receiver.put(WeightBucket(call=0, index=1, chunks=chunks))
    with pytest.raises(ValueError, match=r"layers.0.mlp.up.lora.\w"):
        receiver.weights()
