# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests with several adapters in one engine, each against an engine over the model that its adapter is merged into, in float64."""

import functools
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    ExecutionConfig,
    InferenceConfig,
    LoraInUseError,
    LoraLoadError,
    LoraSlots,
    LoraWeights,
    MtpSpeculation,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
    UnknownLoraError,
)
from mcore_inference.adapters import LoraTable, adapter_bytes, check_slots
from mcore_inference.decoder import FusedDecoder, TorchDecoder
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig, Step
from mcore_parallel.tensor_parallel import LoraConfig, add_lora, is_adapter, merge_lora
from tests.support.adapters import TARGETS, adaptable, attend_by_torch, merged, random_adapter
from tests.support.decode_graphs import serve_as_on_a_gpu
from tests.support.engine_checks import check_idle

SHARED = list(range(20))
NAMES = ("a", "b", "c", None)
RANKS = {"a": 4, "b": 2, "c": 3}
LATENT = LatentAttentionConfig(q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, chunk_size=4)
# Of each kind the fields of its config, and the layers with adapters.
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, TARGETS),
    "with biases": ({"add_bias_linear": True, "normalization": "LayerNorm", "activation": "gelu"}, TARGETS),
    "attention alone": ({}, ("qkv", "out")),
    "latents": ({"latent_attention": LATENT, "num_query_groups": None}, ("q_down", "q_up", "kv_down", "out", "up", "down")),
    "mixture": ({}, ("qkv", "out")),
    "states": ({"hybrid_layer_pattern": "M*M-", "mamba": MAMBA}, ("in_proj", "out_proj", *TARGETS)),
    "delta net": ({"hybrid_layer_pattern": "G*-", "delta_net": DELTA}, ("in_proj", "out_proj", *TARGETS)),
}


@functools.cache
def make_model(kind: str = "plain", seed: int = 0) -> GPTModel:
    fields = KINDS.get(kind, ({}, ()))[0]
    sizes = {
        "num_layers": len(fields.get("hybrid_layer_pattern", "**")),
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_query_groups": 2,
    }
    config = TransformerConfig(**{**sizes, "vocab_size": 64, "init_method_std": 0.3, **fields})
    parts = {"feed_forward": moe_feed_forward(MoEConfig(num_moe_experts=4))} if kind == "mixture" else {}
    return GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64, seed=seed, **parts).eval()


def adapters_of(model: GPTModel, targets: Sequence[str] = TARGETS) -> dict[str, LoraWeights]:
    return {name: random_adapter(model, rank, seed, targets) for seed, (name, rank) in enumerate(RANKS.items())}


def build(
    model: GPTModel, execution: ExecutionConfig | None = None, slots: LoraSlots | None = None, **sizes: Any
) -> DynamicInferenceEngine:
    sizes = {"max_sequence_length": 96, "num_blocks": 64, "block_size_tokens": 4, "max_requests": 8, "max_tokens": 64} | sizes
    context = DynamicInferenceContext.for_model(model, InferenceConfig(lora=slots, **sizes))
    return DynamicInferenceEngine(model, context, execution=execution)


def loaded(model: GPTModel, targets: Sequence[str] = TARGETS, execution: ExecutionConfig | None = None, **sizes: Any) -> Any:
    """An engine with three adapters, and those."""
    engine = build(model, execution, LoraSlots(max_loras=3, max_lora_rank=4, targets=tuple(targets)), **sizes)
    adapters = adapters_of(model, targets)
    for name, weights in adapters.items():
        engine.load_lora(name, weights)
    return engine, adapters


def settings(number: int) -> SamplingParams:
    kinds = [
        {"temperature": 0.0, "num_tokens_to_generate": 9},
        {"temperature": 1.0, "num_tokens_to_generate": 14, "frequency_penalty": 0.5},
        {"temperature": 0.7, "num_tokens_to_generate": 3, "skip_prompt_log_probs": False},
        {"temperature": 0.0, "num_tokens_to_generate": 6, "top_n_logprobs": 2},
    ]
    return SamplingParams(seed=number, return_log_probs=True, **kinds[number % len(kinds)])


def requests_of(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams, str | None]]:
    """Prompts with shared beginnings, so that requests with other adapters meet known blocks of equal tokens."""
    return [
        (
            SHARED[: rng.choice([3, 8, 16, 20])] + [rng.randrange(64) for _ in range(rng.choice([0, 1, 4]))],
            settings(number),
            rng.choice(NAMES),
        )
        for number in range(count)
    ]


def run_mixed(engine: DynamicInferenceEngine, requests: Sequence[tuple[list[int], SamplingParams, str | None]], rng: random.Random) -> Any:
    records: list[DynamicInferenceRequestRecord] = []
    for number, (prompt, params, lora) in enumerate(requests):
        engine.add_request(prompt, params, request_id=number, lora=lora)
        if rng.random() < 0.5:
            records += engine.step()
    while engine.has_unfinished_requests():
        records += engine.step()
    check_idle(engine)
    return sorted(records, key=lambda record: record.request_id)


def wanted_of(model: GPTModel, adapters: dict[str, LoraWeights], requests: Any) -> list[DynamicInferenceRequestRecord]:
    """Of each request what an engine over its merged model gives, one request after the other."""
    engines = {name: build(merged(model, adapters.get(name or "")), enable_prefix_caching=False) for name in NAMES}
    return [engines[lora].generate([prompt], params)[0] for prompt, params, lora in requests]


def check_equal(records: Sequence[Any], wanted: Sequence[Any]) -> None:
    for one, other in zip(records, wanted, strict=True):
        assert one.generated_tokens == other.generated_tokens and one.finish_reason is other.finish_reason
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=1e-9, atol=1e-9)
        assert [list(best) for best in one.generated_top_n_logprobs] == [list(best) for best in other.generated_top_n_logprobs]


@pytest.mark.parametrize(
    "execution", [ExecutionConfig(run_ahead=False), ExecutionConfig(run_ahead=True), ExecutionConfig(speculation=NgramSpeculation())],
    ids=["in turn", "ahead", "speculation"],
)  # fmt: skip
@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 14, "max_tokens": 9}, {"block_size_tokens": 1, "num_blocks": 200}])
def test_each_request_gets_what_its_merged_model_gives(execution: ExecutionConfig, sizes: dict[str, Any]) -> None:
    model, rng = make_model(), random.Random(len(sizes))
    engine, adapters = loaded(model, execution=execution, **sizes)
    assert isinstance(engine._executor._decoder, TorchDecoder)
    requests = requests_of(rng, 24)
    records = run_mixed(engine, requests, rng)
    check_equal(records, wanted_of(model, adapters, requests))
    assert [record.lora for record in records] == [lora for _, _, lora in requests]
    assert {record.merge().lora for record in records} == set(NAMES)
    assert engine.stats()["prefix_cache_hits"] > 20
    if sizes.get("num_blocks", 64) < 64:
        assert engine.num_preemptions


@pytest.mark.parametrize("kind", list(KINDS))
def test_models_of_every_kind(kind: str) -> None:
    model, targets, rng = make_model(kind), KINDS[kind][1], random.Random(7)
    engine, adapters = loaded(model, targets, num_blocks=40, max_tokens=12, enable_prefix_caching=True)
    assert {name.rpartition(".")[2] for name in adapters["a"].matrices} == set(targets)
    requests = requests_of(rng, 12)
    check_equal(run_mixed(engine, requests, rng), wanted_of(model, adapters, requests))
    assert engine.stats()["prefix_cache_hits"]


def test_weights_in_fp8_beside_adapters() -> None:
    model, rng = merged(make_model(), None), random.Random(5)
    engine, adapters = loaded(model, weight_dtype="fp8_weight_only")
    rounded = merged(make_model(), None)
    with torch.no_grad():
        for name, layer in adaptable(model).items():
            weight = layer.products.widened(layer.weight.flatten(0, -2), torch.float64)
            assert layer.weight.dtype == torch.float8_e4m3fn
            rounded.get_parameter(f"{name}.weight").copy_(weight.view(layer.weight.shape))
    requests = requests_of(rng, 12)
    check_equal(run_mixed(engine, requests, rng), wanted_of(rounded, adapters, requests))


@pytest.mark.parametrize("weight_dtype", [None, "fp8_weight_only"])
def test_the_decoder_of_a_gpu_adds_adapters_to_its_matmuls(monkeypatch: pytest.MonkeyPatch, weight_dtype: Any) -> None:
    monkeypatch.setattr(FusedDecoder, "_attend", attend_by_torch)
    model, rng = merged(make_model(), None), random.Random(2)
    requests = requests_of(rng, 12)
    results = []
    for fused in (False, True):
        engine, _ = loaded(model, weight_dtype=weight_dtype)
        if fused:
            engine._executor._decoder = FusedDecoder(model, 8)
        results.append(run_mixed(engine, requests, random.Random(2)))
    check_equal(*results)
    assert {record.lora for record in results[1]} == set(NAMES)


def check_recorded(kind: str, execution: ExecutionConfig) -> tuple[bool, bool]:
    model, targets, rng = make_model(kind), KINDS[kind][1], random.Random(3)
    requests = requests_of(rng, 24)
    wanted = wanted_of(model, adapters_of(model, targets), requests)
    serve_as_on_a_gpu()
    engine, _ = loaded(model, targets, execution)
    engine.create_cuda_graphs()
    graphs = engine._executor.graphs
    assert graphs is not None and set(graphs._adapted) == set(graphs._recorded) == set(graphs._sizes)
    check_equal(run_mixed(engine, requests, rng), wanted)
    # What recordings read is written in place.
    engine.unload_lora("b")
    other = random_adapter(model, 4, 9, targets)
    engine.load_lora("d", other)
    params = settings(0)
    records = engine.generate([SHARED] * 3, params, lora=["d", None, "a"])
    adapters = {**adapters_of(model, targets), "d": other}
    check_equal(records, [build(merged(model, adapters.get(name))).generate([SHARED], params)[0] for name in ("d", "", "a")])
    executor = engine._executor
    mixed = executor.proposal_graphs if execution.speculation is not None else executor.mixed_graphs
    return bool(executor.graphs and executor.graphs.request_counts), bool(mixed and mixed.step_counts)


def check_recordings_of_the_base() -> None:
    serve_as_on_a_gpu()
    engine, _ = loaded(make_model())
    graphs = engine._executor.graphs
    assert graphs is not None
    engine.generate([SHARED, [1]], settings(0))
    assert set(graphs._recorded) == {2} and not graphs._adapted
    engine.generate([SHARED, [1]], settings(0), lora=[None, "a"])
    assert set(graphs._recorded) == {2} == set(graphs._adapted)
    # As each step has one.
    engine.add_request(SHARED, settings(3), lora="b")
    engine.add_request(SHARED, settings(0))
    while engine.has_unfinished_requests():
        engine.step()
    assert set(graphs._recorded) == {1, 2} and set(graphs._adapted) == {2}


def check_recordings_of_proposals_to_the_base() -> None:
    serve_as_on_a_gpu()
    engine, adapters = loaded(make_model(), execution=ExecutionConfig(speculation=NgramSpeculation(num_tokens=3, min_ngram=1)))
    # Each drawn token is among those of the prompt.
    graphs, prompt = engine._executor.proposal_graphs, list(range(64))
    assert graphs is not None
    for lora in (None, "a"):
        params = SamplingParams(num_tokens_to_generate=9, temperature=0.0, ignore_eos=True, return_log_probs=True)
        records = engine.generate([prompt] * 2, params, lora=[None, lora])
        wanted = [build(merged(make_model(), adapters.get(name or ""))).generate([prompt], params)[0] for name in (None, lora)]
        check_equal(records, wanted)
        assert graphs._recorded and bool(graphs._adapted) == (lora is not None)
    engine.create_cuda_graphs()
    assert set(graphs._recorded) == set(graphs._adapted) == set(graphs._sizes)


@pytest.mark.world(1)
def test_steps_that_verify_proposals_to_the_base_alone_are_recordings_of_their_own(world: Callable[..., list[Any]]) -> None:
    world(check_recordings_of_proposals_to_the_base)


@pytest.mark.world(1)
def test_decode_steps_of_the_base_alone_are_recordings_of_their_own(world: Callable[..., list[Any]]) -> None:
    world(check_recordings_of_the_base)


@pytest.mark.parametrize("kind", ["plain", "latents", "states"])
@pytest.mark.world(1)
def test_recorded_steps_read_which_adapter_each_token_has(world: Callable[..., list[Any]], kind: str) -> None:
    execution = ExecutionConfig(use_cuda_graphs_for_non_decode_steps=True)
    assert world(functools.partial(check_recorded, kind, execution)) == [(True, True)]


@pytest.mark.world(1)
def test_recorded_steps_that_verify_proposals(world: Callable[..., list[Any]]) -> None:
    assert world(functools.partial(check_recorded, "plain", ExecutionConfig(speculation=NgramSpeculation())))[0][1]


@pytest.mark.parametrize("kind", ["plain", "latents"])
def test_what_was_trained_beside_a_model_is_served_beside_it(kind: str) -> None:
    model, targets, config = make_model(kind), KINDS[kind][1], LoraConfig(rank=3, alpha=5.0, targets=KINDS[kind][1])
    trained = merged(model, None)
    add_lora(trained, config, trained.groups)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: parameter for name, parameter in trained.named_parameters() if is_adapter(name)}
    with torch.no_grad():
        for parameter in tensors.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    engine = build(model, slots=LoraSlots(targets=targets))
    engine.load_lora("trained", LoraWeights.of(tensors, rank=config.rank, alpha=config.alpha))
    records = engine.generate([SHARED, [1, 2]], settings(2), lora="trained")
    merge_lora(trained)
    check_equal(records, build(trained).generate([SHARED, [1, 2]], settings(2)))


def test_heads_draft_from_adapted_states() -> None:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 64, "init_method_std": 0.3}
    config = TransformerConfig(mtp_num_layers=2, **sizes)
    model, rng = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64).eval(), random.Random(1)
    engine, adapters = loaded(model, execution=ExecutionConfig(speculation=MtpSpeculation()))
    requests = requests_of(rng, 12)
    check_equal(run_mixed(engine, requests, rng), wanted_of(model, adapters, requests))
    assert engine.num_drafted > 20


def test_what_the_cache_holds_of_an_adapter_is_no_one_elses() -> None:
    model, params = make_model(), settings(0)
    engine, adapters = loaded(model)
    hits = []
    for lora in ("a", "a", "b", None, None, "a"):
        before = engine.stats()["prefix_cache_hits"]
        (record,) = engine.generate([SHARED], params, lora=lora)
        hits.append(engine.stats()["prefix_cache_hits"] - before)
        check_equal([record], build(merged(model, adapters.get(lora or ""))).generate([SHARED], params))
    assert hits == [0, 16, 0, 0, 16, 16]
    # Another adapter of the same name finds nothing of the first.
    engine.unload_lora("a")
    other = random_adapter(model, 4, 11)
    engine.load_lora("a", other)
    (record,) = engine.generate([SHARED], params, lora="a")
    assert record.cached_prompt_tokens == 0
    check_equal([record], build(merged(model, other)).generate([SHARED], params))


def test_the_base_has_the_bits_of_an_engine_without_slots() -> None:
    model, params = make_model(), [settings(number) for number in range(4)]
    # Equal steps, so that GEMMs are of equal shapes.
    engine, _ = loaded(model, enable_prefix_caching=False)
    prompts = [SHARED, SHARED[:5], [7], [1, 2, 3]]
    alone = build(model, enable_prefix_caching=False).generate(prompts, params)
    for mixed in ([None] * 4, [None, None, None, "a"]):
        records = engine.generate(prompts, params, lora=mixed)
        for record, wanted, lora in zip(records, alone, mixed, strict=True):
            if lora is None:
                assert record.generated_tokens == wanted.generated_tokens
                assert record.generated_log_probs == wanted.generated_log_probs
    # Outside of steps the model is the base.
    assert all(layer.lora is None for layer in adaptable(model).values())


def test_adapters_stay_over_new_weights_and_suspension() -> None:
    model, fresh = merged(make_model(), None), make_model(seed=1)
    engine, adapters = loaded(model)
    params = [settings(number) for number in range(4)]
    numbers = [engine.add_request(SHARED, one, lora=lora) for one, lora in zip(params, NAMES, strict=True)]
    records = [*engine.step(), *engine.step()]
    engine.suspend()
    engine.resume()
    while engine.has_unfinished_requests():
        records += engine.step()
    records.sort(key=lambda record: numbers.index(record.request_id))
    check_equal(records, [wanted_of(make_model(), adapters, [(SHARED, one, lora)])[0] for one, lora in zip(params, NAMES, strict=True)])
    engine.load_weights([(shard.name, shard.parameter.detach()) for shard in named_shards(fresh)])
    assert engine.loras == ("a", "b", "c")
    check_equal(
        engine.generate([SHARED] * 4, params, lora=NAMES),
        wanted_of(fresh, adapters, [(SHARED, one, lora) for one, lora in zip(params, NAMES, strict=True)]),
    )


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_weights_that_come_under_a_running_request(policy: Any) -> None:
    model = merged(make_model(), None)
    engine, _ = loaded(model)
    number = engine.add_request(SHARED, settings(0), lora="b")
    engine.step()
    engine.load_weights([(shard.name, shard.parameter.detach().clone()) for shard in named_shards(model)], in_flight=policy)
    records = [*engine.step()]
    while engine.has_unfinished_requests():
        records += engine.step()
    (record,) = records
    assert record.request_id == number and record.lora == "b" and all(part.lora == "b" for part in record.requests)
    check_equal([record], build(merged(model, adapters_of(model)["b"])).generate([SHARED], settings(0)))


def test_an_adapter_in_use_is_not_unloaded() -> None:
    engine, _ = loaded(make_model(), max_requests=1)
    first, second = (engine.add_request(SHARED, settings(1), lora="a") for _ in range(2))
    engine.step()
    with pytest.raises(LoraInUseError, match="2 requests use the adapter a"):
        engine.unload_lora("a")
    engine.unload_lora("b")
    engine.abort(first)
    # One in the queue uses it as well.
    with pytest.raises(LoraInUseError, match="1 requests use"):
        engine.unload_lora("a")
    engine.abort(second)
    engine.unload_lora("a")
    assert engine.loras == ("c",) and engine.stats()["loras"] == 1 and engine.stats()["lora_slots"] == 3
    with pytest.raises(UnknownLoraError, match="lora='a' is no loaded adapter; loaded are c"):
        engine.add_request(SHARED, settings(1), lora="a")
    with pytest.raises(UnknownLoraError, match="loaded are c"):
        engine.unload_lora("a")


def test_loads_and_unloads_take_no_results_of_steps_in_flight() -> None:
    """Of the ranks of a split model one may refuse what others do, or not hear of it."""
    engine, adapters = loaded(make_model(), execution=ExecutionConfig(run_ahead=True))
    number = engine.add_request(SHARED, settings(1), lora="a")
    for _ in range(3):
        engine.step()
    drawn = list(engine.get_request(number).generated_tokens)
    with pytest.raises(LoraInUseError):
        engine.unload_lora("a")
    with pytest.raises(LoraLoadError):
        engine.load_lora("a", adapters["a"])
    engine.unload_lora("b")
    engine.load_lora("b", adapters["b"])
    assert engine.get_request(number).generated_tokens == drawn
    engine.step()
    assert len(engine.get_request(number).generated_tokens) == len(drawn) + 1


@pytest.mark.parametrize(
    "execution", [ExecutionConfig(run_ahead=True), ExecutionConfig(speculation=NgramSpeculation())], ids=["ahead", "speculation"]
)
def test_adapters_come_and_go_while_requests_run(execution: ExecutionConfig) -> None:
    """Of six in two slots, some under names that others had."""
    model, rng = make_model(), random.Random(4)
    pool = [random_adapter(model, 1 + seed % 4, seed) for seed in range(6)]
    references = [build(merged(model, weights), enable_prefix_caching=False) for weights in (*pool, None)]
    engine = build(model, execution, LoraSlots(max_loras=2, max_lora_rank=4), num_blocks=24, max_tokens=12)
    held: dict[str, int] = {}
    requests: dict[int, tuple[list[int], SamplingParams, int]] = {}
    records: list[DynamicInferenceRequestRecord] = []
    counts = {"loads": 0, "refused": 0}
    for turn in range(160):
        if len(held) < 2:
            name = rng.choice([name for name in ("x", "y", "z") if name not in held])
            held[name] = rng.randrange(len(pool))
            engine.load_lora(name, pool[held[name]])
            counts["loads"] += 1
        if len(requests) - len(records) < 5:
            name = rng.choice([*held, None])
            prompt, params = [*SHARED[: rng.choice([5, 12, 20])], turn % 64], settings(turn)
            number = engine.add_request(prompt, params, lora=name)
            requests[number] = prompt, params, held[name] if name is not None else len(pool)
        records += engine.step()
        name = rng.choice(list(held))
        try:
            engine.unload_lora(name)
            del held[name]
        except LoraInUseError:
            counts["refused"] += 1
    while engine.has_unfinished_requests():
        records += engine.step()
    records.sort(key=lambda record: record.request_id)
    wanted = [
        references[which].generate([prompt], params)[0] for prompt, params, which in (requests[record.request_id] for record in records)
    ]
    check_equal(records, wanted)
    assert len(records) == len(requests) > 40 and counts["loads"] > 8 and counts["refused"] > 8, counts
    assert engine.stats()["prefix_cache_hits"] and {which for _, _, which in requests.values()} == set(range(7))


def test_unknown_adapters_end_their_request_alone() -> None:
    engine, _ = loaded(make_model())
    refused, served, wrong = engine.generate([SHARED, SHARED, SHARED], settings(0), lora=["z", "a", 3])  # type: ignore[list-item]
    assert isinstance(refused.error, UnknownLoraError) and refused.lora == "z" and served.error is None
    assert "lora is a int" in str(wrong.error)
    with pytest.raises(ValueError, match=r"lora has 2 entries for 3 prompts"):
        engine.generate([SHARED] * 3, lora=["a", "b"])
    for other in (5, True, b"a", {"a": 1}):
        with pytest.raises(ValueError, match=f"lora is a {type(other).__name__}; give the name of a loaded adapter for all"):
            engine.generate([SHARED], lora=other)  # type: ignore[arg-type]
    plain = build(make_model())
    assert plain.loras == () and plain.stats()["lora_slots"] == 0
    with pytest.raises(UnknownLoraError, match="no slots for adapters"):
        plain.add_request(SHARED, lora="a")
    with pytest.raises(LoraLoadError, match="no slots for adapters"):
        plain.load_lora("a", random_adapter(make_model(), 2, 0))


def test_adapters_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    model = make_model()
    engine = build(model, slots=LoraSlots(max_loras=2, max_lora_rank=4))
    good, params = random_adapter(model, 4, 0), settings(0)
    engine.load_lora("a", good)
    before = engine.generate([SHARED], params, lora="a")

    def changed(name: str, A: torch.Tensor | None = None, B: torch.Tensor | None = None) -> LoraWeights:
        own = good.matrices[name]
        pair = own[0] if A is None else A, own[1] if B is None else B
        return LoraWeights(rank=4, alpha=4.0, matrices={**good.matrices, name: pair})

    qkv = "layers.1.attention.qkv"
    A, B = good.matrices[qkv]
    cases = [
        ("a", good, "an adapter a is loaded"),
        ("", good, "must be 1 to 256"),
        (" b", good, "must be 1 to 256"),
        (3, good, "must be 1 to 256"),
        ("b", random_adapter(model, 5, 0), "rank=5 and max_lora_rank=4"),
        ("b", changed(qkv, A=A[:, 1:]), r"A \[4, 15\].*base weight is"),
        ("b", changed(qkv, B=B.flatten(0, -2)), r"base weight is"),
        ("b", changed(qkv, A=A.clone().fill_(torch.nan)), "A of layers.1.attention.qkv holds numbers that are not finite"),
        ("b", changed(qkv, B=B.clone().fill_(torch.inf)), "B of layers.1.attention.qkv holds numbers that are not finite"),
        ("b", LoraWeights(rank=4, alpha=4.0, matrices={"layers.9.attention.qkv": (A, B)}), "layers.9.attention.qkv has no slots"),
        ("b", LoraWeights(rank=4, alpha=4.0, matrices={"layers.1.mlp.experts.up": (A, B)}), "never beside experts"),
        ("b", {"rank": 4}, "weights is a dict"),
    ]  # fmt: skip
    for name, weights, words in cases:
        with pytest.raises(LoraLoadError, match=words):
            engine.load_lora(name, weights)  # type: ignore[arg-type]
    assert engine.loras == ("a",)
    check_equal(engine.generate([SHARED], params, lora="a"), before)
    engine.load_lora("b", good)
    with pytest.raises(LoraLoadError, match="all max_loras=2 slots are taken, by a, b"):
        engine.load_lora("c", good)


def test_numbers_of_one_adapter_do_not_reach_the_requests_of_another() -> None:
    model = make_model()
    engine, adapters = loaded(model)
    engine.unload_lora("c")
    # What it gives is infinite, for the tokens of others too.
    huge = LoraWeights(rank=1, alpha=1.0, matrices={name: (A[:1] * 1e308, B[..., :1]) for name, (A, B) in adapters["c"].matrices.items()})
    engine.load_lora("huge", huge)
    params = settings(0)
    records = engine.generate([SHARED] * 3, params, lora=["a", "huge", None])
    # It draws from NaN alone.
    assert records[1].error is not None
    wanted = [build(merged(model, adapters.get(name))).generate([SHARED], params)[0] for name in ("a", "")]
    check_equal([records[0], records[2]], wanted)


@pytest.mark.parametrize(("kind", "count"), [("plain", 8), ("latents", 12), ("mixture", 4), ("states", 4)])
def test_slots_without_targets_are_beside_the_layers_that_the_model_has(kind: str, count: int) -> None:
    model = make_model(kind)
    adapter = random_adapter(model, 2, 0, (*TARGETS, "q_down", "q_up", "kv_down"))
    assert len(adapter.matrices) == count
    engine = build(model, slots=LoraSlots())
    engine.load_lora("a", adapter)
    records = engine.generate([SHARED], settings(0), lora="a")
    check_equal(records, build(merged(model, adapter)).generate([SHARED], settings(0)))


def test_models_that_cannot_have_slots_are_refused_at_construction() -> None:
    slots = LoraSlots()
    with pytest.raises(ValueError, match="targets='q_down' of LoraSlots names no linear layer"):
        build(make_model(), slots=LoraSlots(targets=("qkv", "q_down")))
    with pytest.raises(ValueError, match="targets='up' of LoraSlots names no linear layer"):
        build(make_model("mixture"), slots=LoraSlots(targets=("qkv", "up")))
    states = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=64, hybrid_layer_pattern="M", mamba=MAMBA)
    alone = GPTModel(states, ProcessGroups.single(), attention_core=PagedAttention()).eval()
    with pytest.raises(ValueError, match="targets=None of LoraSlots is one of qkv, out, .* this model has none; name others"):
        check_slots(alone, slots)
    config = make_model().config
    exact = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), backend=choose_backend(batch_invariant=True)).eval()
    with pytest.raises(ValueError, match="batch_invariant=True of the backend exclude each other"):
        build(exact, slots=slots)
    for kind, target, allowed in (("plain", "up", ("up", "down")), ("plain", "up", ("qkv",)), ("mixture", "experts", ("qkv", "out"))):
        trained = merged(make_model(kind), None)
        add_lora(trained, LoraConfig(rank=2, targets=(target,)), trained.groups)
        # Beside a layer with slots, or one without.
        with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.{target}[.a-z]* has an adapter of its own"):
            build(trained, slots=LoraSlots(targets=allowed))
    # One that comes later would be left out in silence.
    engine, _ = loaded(later := merged(make_model(), None))
    add_lora(later, LoraConfig(rank=2), later.groups)
    engine.add_request(SHARED, lora="a")
    with pytest.raises(RuntimeError, match="has got adapters from elsewhere"):
        engine.step()
    assert all(layer.lora is not None for layer in adaptable(later).values())
    with pytest.raises(ValueError, match="lora is a dict"):
        InferenceConfig(lora={"max_loras": 2})  # type: ignore[arg-type]


def test_another_thread_does_not_compute_with_the_adapters_of_a_step() -> None:
    model, errors = make_model(), list[str]()
    table = LoraTable(model, LoraSlots())

    def compute() -> None:
        try:
            model(torch.arange(3), Step.causal(1, 3))
        except RuntimeError as error:
            errors.append(str(error))

    with table.applied(torch.zeros(3, dtype=torch.int32)):
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        compute()
    compute()
    assert len(errors) == 1 and "another thread computes with the model" in errors[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_loras": 0}, "max_loras=0"),
        ({"max_loras": True}, "max_loras=True"),
        ({"max_lora_rank": 1.5}, "max_lora_rank=1.5"),
        ({"targets": "qkv"}, "targets='qkv' is a str"),
        ({"targets": 3}, "targets=3 is a int"),
        ({"targets": (["up"],)}, "no linear layer that can have adapters"),
        ({"targets": ()}, "at least one"),
        ({"targets": ("up", "up")}, "each once"),
        ({"targets": ("kv_up",)}, "absorbed into queries"),
        ({"targets": ("embedding",)}, "no linear layer that can have adapters"),
    ],
)
def test_slots_are_checked(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LoraSlots(**fields)


def test_slots_take_the_memory_that_they_say() -> None:
    model = make_model()
    table = LoraTable(model, slots := LoraSlots(max_loras=3, max_lora_rank=5))
    held = sum(stack.A.nbytes + stack.B.nbytes for _, stack in table._stacks.values())
    assert adapter_bytes(model, slots) == held > 0 == adapter_bytes(model, None)


def test_weights_are_checked() -> None:
    A, B = torch.ones(2, 4), torch.ones(3, 2)
    good: dict[str, Any] = {"rank": 2, "alpha": 4, "matrices": {"x": (A, B)}}
    cases = [
        ({"rank": 0}, "rank=0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": True}, "alpha=True"),
        ({"matrices": {}}, "of no layer"),
        ({"matrices": {"x": A}}, "the pair of A and B"),
        ({"matrices": {"x": (A, [1])}}, "B of x is a list"),
        ({"matrices": {"x": (A.long(), B)}}, "A of x has dtype torch.int64"),
        ({"matrices": {"x": (A, B.to(torch.float8_e4m3fn))}}, "B of x has dtype"),
        ({"matrices": {"x": (A, B.to("meta"))}}, "without memory"),
        ({"matrices": {"x": (B, A)}}, r"for rank=2 they are \[2, in\]"),
        ({"rank": 3}, r"for rank=3"),
    ]
    for fields, words in cases:
        with pytest.raises(ValueError, match=words):
            LoraWeights(**{**good, **fields})
    weights = LoraWeights(**good)
    again = LoraWeights.of(weights.tensors(), rank=2, alpha=4)
    assert again.matrices == weights.matrices and again.scaling == 2.0
    with pytest.raises(ValueError, match=r"x has \.lora\.A alone"):
        LoraWeights.of({"x.lora.A": A}, rank=2, alpha=4)
    with pytest.raises(ValueError, match=r"x\.weight is no matrix"):
        LoraWeights.of({"x.weight": A}, rank=2, alpha=4)


def test_a_context_of_another_engine_forgets_the_adapters_of_the_first() -> None:
    model, params = make_model(), settings(0)
    engine, adapters = loaded(model)
    engine.generate([SHARED], params, lora="a")
    second = DynamicInferenceEngine(model, engine.context)
    assert second.loras == ()
    second.load_lora("a", adapters["b"])
    check_equal(second.generate([SHARED], params, lora="a"), build(merged(model, adapters["b"])).generate([SHARED], params))
    with pytest.raises(RuntimeError, match="given to another one"):
        engine.load_lora("z", adapters["a"])
