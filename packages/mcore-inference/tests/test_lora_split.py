# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters over tensor-parallel ranks and stages: what one engine over whole merged models gives, in float64."""

import asyncio
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineRunner,
    InferenceConfig,
    LockstepConfig,
    LoraInUseError,
    LoraLoadError,
    LoraSlots,
    LoraWeights,
    PagedAttention,
    RankFailedError,
    SamplingParams,
    UnknownLoraError,
    WeightLoadError,
    follow_runner,
)
from mcore_inference.adapters import LoraTable
from mcore_inference.adapters._stacked import StackedAdapters
from mcore_inference.decoder import FusedDecoder
from mcore_inference.engine import _weight_broadcast
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import LatentAttentionConfig
from tests.support.adapters import TARGETS, attend_by_torch, merged, random_adapter
from tests.support.decode_graphs import serve_as_on_a_gpu

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "init_method_std": 0.3}
LATENT = LatentAttentionConfig(q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
# Of each kind the config, and the layers with adapters.
KINDS = {
    "heads": (TransformerConfig(num_query_groups=2, **SIZES), TARGETS),
    "latents": (TransformerConfig(latent_attention=LATENT, **SIZES), ("q_down", "q_up", "kv_down", "out", "up", "down")),
    # The second stage alone has a feed-forward.
    "uneven": (TransformerConfig(num_query_groups=2, hybrid_layer_pattern="*-", **SIZES), TARGETS),
    # One layer has experts, the other a plain feed-forward.
    "mixture": (TransformerConfig(num_query_groups=2, **SIZES), TARGETS),
}
MIXTURE = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_layer_freq=(1, 0))
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9], list(range(20)), [4, 5]]
LORAS = ["a", None, "b", "a", "a", "b"]
PATIENT = LockstepConfig(join_timeout_s=50, silence_timeout_s=20)


def make_model(groups: ProcessGroups, kind: str = "heads") -> GPTModel:
    parts = {"feed_forward": moe_feed_forward(MIXTURE)} if kind == "mixture" else {}
    return GPTModel(KINDS[kind][0], groups, attention_core=PagedAttention(), dtype=torch.float64, seed=0, **parts).eval()


def make_engine(model: GPTModel, slots: LoraSlots | None, **sizes: Any) -> DynamicInferenceEngine:
    sizes = {"max_sequence_length": 40, "num_blocks": 9, "block_size_tokens": 4, "max_tokens": 12, "max_requests": 4} | sizes
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, InferenceConfig(lora=slots, **sizes)))


def adapters_of(kind: str = "heads") -> dict[str, LoraWeights]:
    whole = make_model(ProcessGroups.single(), kind)
    return {"a": random_adapter(whole, 3, 0, KINDS[kind][1]), "b": random_adapter(whole, 2, 1, KINDS[kind][1])}


def settings() -> list[SamplingParams]:
    common = {"num_tokens_to_generate": 8, "return_log_probs": True, "skip_prompt_log_probs": False}
    return [SamplingParams(temperature=float(i % 2), top_p=0.9, seed=i, **common) for i in range(len(PROMPTS))]


def wanted_of(kind: str = "heads") -> list[Any]:
    adapters, whole = adapters_of(kind), make_model(ProcessGroups.single(), kind)
    engines = {name: make_engine(merged(whole, adapters.get(name or "")), None, num_blocks=60) for name in ("a", "b", None)}
    return [engines[lora].generate([prompt], params)[0] for prompt, params, lora in zip(PROMPTS, settings(), LORAS, strict=True)]


def check_equal(records: Sequence[Any], wanted: Sequence[Any]) -> None:
    for one, other in zip(records, wanted, strict=True):
        assert one.generated_tokens == other.generated_tokens
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=1e-9, atol=1e-9)


def check_split(tp: int, pp: int, kind: str) -> tuple[str, ...]:
    model = make_model(ProcessGroups.build(ParallelPlan(tp=tp, pp=pp, sequence_parallel=False)), kind)
    engine = make_engine(model, LoraSlots(max_loras=2, max_lora_rank=3, targets=KINDS[kind][1]))
    adapters = adapters_of(kind)
    engine.load_lora("b", adapters["b"])
    # Of a stage that may be another one's.
    for number in range(2):
        name = next(name for name in adapters["a"].matrices if name.startswith(f"layers.{number}."))
        A, B = adapters["a"].matrices[name]
        with pytest.raises(LoraLoadError, match=f"{name} of the adapter has A"):
            engine.load_lora("a", LoraWeights(rank=3, alpha=1.0, matrices={name: (A[:, 1:], B)}))
    with pytest.raises(LoraLoadError, match=r"layers\.2\.mlp\.up has no slots"):
        engine.load_lora("a", LoraWeights(rank=3, alpha=1.0, matrices={"layers.2.mlp.up": (A, B)}))
    engine.load_lora("a", adapters["a"])
    check_equal(engine.generate(PROMPTS, settings(), lora=LORAS), wanted_of(kind))
    assert engine.num_preemptions
    engine.suspend()
    engine.resume()
    check_equal(engine.generate(PROMPTS, settings(), lora=LORAS), wanted_of(kind))
    return engine.loras


@pytest.mark.parametrize("kind", ["heads", "latents"])
@pytest.mark.world(2, shared=True)
def test_tensor_parallel_ranks(world: Callable[..., list[Any]], kind: str) -> None:
    assert world(functools.partial(check_split, 2, 1, kind)) == [("b", "a")] * 2


@pytest.mark.parametrize("kind", ["heads", "uneven"])
@pytest.mark.world(2, shared=True)
def test_stages(world: Callable[..., list[Any]], kind: str) -> None:
    assert world(functools.partial(check_split, 1, 2, kind)) == [("b", "a")] * 2


@pytest.mark.world(4, shared=True)
def test_stages_of_split_layers(world: Callable[..., list[Any]]) -> None:
    assert world(functools.partial(check_split, 2, 2, "heads")) == [("b", "a")] * 4


def check_fused() -> None:
    """The decoder of a GPU, whose sums of partial results take those of adapters in."""
    model = make_model(ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False)))
    engine = make_engine(model, LoraSlots(max_loras=2, max_lora_rank=3))
    for name, weights in adapters_of().items():
        engine.load_lora(name, weights)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FusedDecoder, "_attend", attend_by_torch)
        engine._executor._decoder = FusedDecoder(model, 4)
        check_equal(engine.generate(PROMPTS, settings(), lora=LORAS), wanted_of())


def check_shared_experts(*, recorded: bool) -> tuple[str, ...]:
    """Each rank has requests and adapters of its own."""
    groups, adapters, wanted = ProcessGroups.build(ParallelPlan(dp=2, ep=2)), adapters_of("mixture"), wanted_of("mixture")
    if recorded:
        serve_as_on_a_gpu()
    engine, rank = make_engine(make_model(groups, "mixture"), LoraSlots(max_loras=2, max_lora_rank=3)), groups.dp.rank

    def serve_own(numbers: Sequence[int]) -> None:
        records = engine.generate([PROMPTS[i] for i in numbers], [settings()[i] for i in numbers], lora=[LORAS[i] for i in numbers])
        check_equal(records, [wanted[i] for i in numbers])

    for name in (("a", "b"), ("b",))[rank]:
        engine.load_lora(name, adapters[name])
    # Steps of the base on one rank beside steps with adapters on the other.
    serve_own(([0, 3], [1, 2])[rank])
    if rank:
        engine.load_lora("a", adapters["a"])
    serve_own(([4], [1])[rank] if recorded else range(len(PROMPTS)))
    assert bool(engine.stats()["graph_steps"]) == recorded
    return engine.loras


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.world(2)
def test_engines_that_share_experts_have_adapters_of_their_own(world: Callable[..., list[Any]], recorded: bool) -> None:
    assert world(functools.partial(check_shared_experts, recorded=recorded)) == [("a", "b"), ("b", "a")]


@pytest.mark.world(2, shared=True)
def test_the_decoder_of_gpus_sums_adapters_with_partial_results(world: Callable[..., list[Any]]) -> None:
    world(check_fused)


def check_unequal_slots() -> str:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    with pytest.raises(ValueError, match="from") as caught:
        make_engine(make_model(groups), LoraSlots(max_loras=2, max_lora_rank=2 + groups.pp.rank))
    with pytest.raises(ValueError, match="targets of lora is"):
        make_engine(make_model(groups), LoraSlots(targets=("qkv",) if groups.pp.rank else ("out",)))
    # Of the usual layers those that some stage has.
    make_engine(make_model(groups), LoraSlots())
    # A layer that no stage has.
    with pytest.raises(ValueError, match="targets='q_up' of LoraSlots names no linear layer"):
        make_engine(make_model(groups), LoraSlots(targets=("q_up",)))
    return str(caught.value).partition(" is ")[0]


@pytest.mark.world(2, shared=True)
def test_ranks_with_other_slots_are_refused(world: Callable[..., list[Any]]) -> None:
    assert world(check_unequal_slots) == ["max_lora_rank"] * 2


def check_no_memory_for_slots(*, pp: bool) -> str:
    groups = ProcessGroups.build(ParallelPlan(pp=2) if pp else ParallelPlan(tp=2, sequence_parallel=False))
    with pytest.MonkeyPatch.context() as patched:
        if groups.tp_pp.rank:
            patched.setattr(StackedAdapters, "__init__", no_memory)
        with pytest.raises((RankFailedError, torch.OutOfMemoryError)) as caught:
            make_engine(make_model(groups), LoraSlots(max_loras=2, max_lora_rank=3))
    # Nothing of it is left.
    make_engine(make_model(groups), LoraSlots(max_loras=2, max_lora_rank=3))
    return str(caught.value)


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("pp", [False, True])
@pytest.mark.world(2, shared=True)
def test_a_rank_without_memory_for_slots_is_named_by_the_others(world: Callable[..., list[Any]], pp: bool) -> None:
    other, own = world(functools.partial(check_no_memory_for_slots, pp=pp))
    assert "rank 1 of the world refused the engine" in other and own == "no memory"


async def answers(runner: EngineRunner) -> list[Any]:
    streams = [await runner.submit(prompt, params, lora=lora) for prompt, params, lora in zip(PROMPTS, settings(), LORAS, strict=True)]
    return [await stream.record() for stream in streams]


def check_run(tp: int, pp: int) -> tuple[str, ...]:
    model = make_model(ProcessGroups.build(ParallelPlan(tp=tp, pp=pp, sequence_parallel=False)))
    engine = make_engine(model, LoraSlots(max_loras=2, max_lora_rank=3), num_blocks=40)
    # Matrices in several buckets.
    _weight_broadcast._BUCKET_BYTES = 2048
    if model.groups.tp_pp.rank:
        follow_runner(engine, PATIENT)
        return engine.loras
    adapters = adapters_of()

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            await runner.load_lora("a", adapters["b"])
            await runner.unload_lora("a")
            for name, weights in adapters.items():
                await runner.load_lora(name, weights)
            with pytest.MonkeyPatch.context() as patched:
                # Nothing of what is refused here is sent.
                patched.setattr(_weight_broadcast, "_buffer", no_memory)
                with pytest.raises(LoraLoadError, match="an adapter a is loaded"):
                    await runner.load_lora("a", adapters["a"])
                with pytest.raises(LoraLoadError, match="weights is a dict"):
                    await runner.load_lora("c", {})  # type: ignore[arg-type]
            assert runner.loras == ("a", "b")
            check_equal(await answers(runner), wanted_of())
            with pytest.raises(UnknownLoraError, match="loaded are a, b"):
                await runner.submit([1], lora="c")
            held = await runner.submit([1], SamplingParams(num_tokens_to_generate=30, ignore_eos=True), lora="b")
            with pytest.raises(LoraInUseError):
                await runner.unload_lora("b")
            # In the order in which they were asked for.
            held.abort()
            await runner.unload_lora("b")
            await held.record()
            await runner.suspend()
            await runner.load_lora("c", adapters["b"])
            await runner.resume()
            await runner.unpause()
            record = await (await runner.submit(PROMPTS[2], settings()[2], lora="c")).record()
            check_equal([record], wanted_of()[2:3])
            await runner.unload_lora("c")
            assert runner.loras == ("a",)

    asyncio.run(main())
    return engine.loras


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
@pytest.mark.world(2)
def test_a_runner_brings_adapters_to_all_ranks(world: Callable[..., list[Any]], tp: int, pp: int) -> None:
    assert world(functools.partial(check_run, tp, pp)) == [("a",)] * 2


def check_refused_elsewhere() -> tuple[str, ...]:
    """A rank that has no memory, say, refuses what the first one has loaded."""
    model = make_model(ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False)))
    engine, load = make_engine(model, LoraSlots(max_loras=2, max_lora_rank=3), num_blocks=40), LoraTable.load
    if model.groups.tp.rank:
        LoraTable.load = lambda table, name, weights: 1 / 0 if name == "b" else load(table, name, weights)  # type: ignore[method-assign]
        follow_runner(engine, PATIENT)
        return engine.loras
    adapters = adapters_of()

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            await runner.load_lora("a", adapters["a"])
            with pytest.raises(LoraLoadError, match="tp rank 1 refused the adapter: ZeroDivisionError"):
                await runner.load_lora("b", adapters["b"])
            assert runner.loras == ("a",)
            check_equal([await (await runner.submit(PROMPTS[0], settings()[0], lora="a")).record()], wanted_of()[:1])

    asyncio.run(main())
    return engine.loras


def check_no_memory_for_buckets() -> tuple[str, ...]:
    """A rank takes what it has no memory for to its end, and the engine goes on."""
    model = make_model(ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False)))
    engine, buffer = make_engine(model, LoraSlots(max_loras=2, max_lora_rank=3), num_blocks=40), _weight_broadcast._buffer
    _weight_broadcast._BUCKET_BYTES = 2048
    if model.groups.tp.rank:
        # Of the second bucket of the first load, and the first one of the load of weights.
        lacking = iter([False, True, True])
        _weight_broadcast._buffer = lambda *sizes: no_memory() if next(lacking, False) else buffer(*sizes)
        follow_runner(engine, PATIENT)
        return engine.loras
    adapters, weights = adapters_of(), [(shard.name, shard.parameter) for shard in named_shards(make_model(ProcessGroups.single()))]

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            with pytest.raises(LoraLoadError, match="tp rank 1 refused load_lora: OutOfMemoryError: no memory"):
                await runner.load_lora("a", adapters["a"])
            assert runner.loras == ()
            with pytest.raises(WeightLoadError, match="tp rank 1 refused load_weights: OutOfMemoryError: no memory"):
                await runner.load_weights(weights)
            await runner.load_weights(weights)
            await runner.load_lora("a", adapters["a"])
            check_equal([await (await runner.submit(PROMPTS[0], settings()[0], lora="a")).record()], wanted_of()[:1])

    asyncio.run(main())
    return engine.loras


@pytest.mark.world(2)
def test_a_rank_without_memory_for_a_bucket_refuses_the_load(world: Callable[..., list[Any]]) -> None:
    assert world(check_no_memory_for_buckets) == [("a",)] * 2


@pytest.mark.world(2)
def test_an_adapter_that_one_rank_refuses_is_loaded_on_none(world: Callable[..., list[Any]]) -> None:
    assert world(check_refused_elsewhere) == [("a",)] * 2
