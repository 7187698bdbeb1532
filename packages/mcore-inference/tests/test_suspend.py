# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines that are suspended and resumed at any step, beside recurrent layers, shared beginnings and prompts in chunks."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
    StepFailedError,
)
from mcore_inference.sampling import Draws
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig, hybrid_config
from mcore_parallel.nn import GatedDeltaNetConfig, MambaConfig
from tests.support.engine_checks import check_idle
from tests.support.world import run

Make = Callable[..., Any]
SIZES: dict[str, Any] = {"max_sequence_length": 64, "num_blocks": 40, "block_size_tokens": 4, "max_requests": 4, "max_tokens": 6}
MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, chunk_size=4)
SHARED = list(range(9))
PROMPTS = [[*SHARED, 1, 2, 3, 4, 5, 6, 7, 8], [*SHARED, 20], [7], [*SHARED, 1, 2, 3, 4, 9, 9], [30] * 15]
"""Most of them longer than a step; some begin alike, and come when what they share is in the cache."""


def hybrid(pattern: str) -> GPTModel:
    mixers = {"mamba": MAMBA if "M" in pattern else None, "delta_net": DELTA if "G" in pattern else None}
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 64, "init_method_std": 0.4}
    config = hybrid_config(pattern, **mixers, **sizes)
    return GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64).eval()


def settings() -> list[SamplingParams]:
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"frequency_penalty": 0.7}, {"skip_prompt_log_probs": False}]
    common = {"num_tokens_to_generate": 4, "return_log_probs": True}
    return [SamplingParams(seed=number, **common, **kinds[number % 3]) for number in range(len(PROMPTS))]


def served(
    model: GPTModel, is_suspended_at: Callable[[int], bool], *, run_ahead: bool
) -> tuple[list[DynamicInferenceRequestRecord], DynamicInferenceEngine, int]:
    """Records in the order of the prompts, which come one at each second step, the engine, and the suspends beside a prompt in chunks."""
    context = DynamicInferenceContext.for_model(model, InferenceConfig(**SIZES))
    engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(run_ahead=run_ahead))
    left, ended, step, mid_chunk = list(enumerate(zip(PROMPTS, settings(), strict=True))), list[DynamicInferenceRequestRecord](), 0, 0
    while left or engine.has_unfinished_requests():
        if left and step % 2 == 0:
            number, (prompt, params) = left.pop(0)
            engine.add_request(prompt, params, request_id=number)
        if is_suspended_at(step):
            running = engine._admission.running
            mid_chunk += any(0 < context.num_cached(entry.record.request_id) < len(entry.record.prompt_tokens) for entry in running)
            engine.suspend()
            assert context.cache.pages.untyped_storage().size() == 0
            engine.resume()
        ended += engine.step()
        step += 1
        assert step < 400, "the engine does not come to an end"
    check_idle(engine)
    return sorted(ended, key=lambda record: record.request_id), engine, mid_chunk


def check_same(ours: list[DynamicInferenceRequestRecord], wanted: list[DynamicInferenceRequestRecord]) -> None:
    for one, other in zip(ours, wanted, strict=True):
        assert one.generated_tokens == other.generated_tokens and one.finish_reason is other.finish_reason
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=1e-9, atol=1e-9)


@pytest.mark.journey
@pytest.mark.parametrize(("kind", "run_ahead"), [("attention", False), ("attention", True), ("M*M-", True), ("G*-G", False)])
def test_suspends_at_any_steps_change_no_token(make_model: Make, kind: str, run_ahead: bool) -> None:
    model = make_model() if kind == "attention" else hybrid(kind)
    wanted, plain, _ = served(model, lambda step: False, run_ahead=run_ahead)
    num_steps, beside_chunks = plain.step_count, 0
    if kind == "attention":
        assert plain.stats()["prefix_cache_hits"] > 0
    for place in range(num_steps + 1):
        records, engine, mid_chunk = served(model, lambda step, place=place: step == place, run_ahead=run_ahead)
        check_same(records, wanted)
        beside_chunks += mid_chunk
    assert beside_chunks > 2
    for seed in range(2):
        # What a step computed of a prompt is lost with each suspend, so that not every step can have one.
        chosen = set(random.Random(seed).sample(range(3 * num_steps), num_steps))
        records, engine, _ = served(model, chosen.__contains__, run_ahead=run_ahead)
        check_same(records, wanted)
        assert engine.num_preemptions > 4


@pytest.mark.parametrize("call", ["suspend", "load_weights", "reset_prefix_cache"])
def test_a_step_in_flight_that_fails_ends_its_requests_and_not_the_call(
    make_model: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    model = make_model()
    context = DynamicInferenceContext.for_model(model, InferenceConfig(**SIZES))
    engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(run_ahead=True))
    (wanted,) = engine.generate([[7, 8]], settings()[0])
    engine.add_request([1, 2], settings()[0], request_id=10)
    engine.step()
    engine.add_request([7, 8], settings()[0], request_id=11)

    def fail(_: Draws) -> Any:
        raise RuntimeError("no results")

    with monkeypatch.context() as patched:
        patched.setattr(Draws, "wait", fail)
        weights = [(shard.name, shard.parameter.detach().clone()) for shard in named_shards(model)]
        getattr(engine, call)(*([weights] if call == "load_weights" else []))
    assert "a step in flight failed" in caplog.text
    assert engine.is_suspended == (call == "suspend") and engine.weight_version == (call == "load_weights")
    (failed,) = engine.take_finished()
    assert failed.request_id == 10 and isinstance(failed.error, StepFailedError)
    engine.resume()
    records = []
    while engine.has_unfinished_requests():
        records += engine.step()
    assert [(record.request_id, record.generated_tokens) for record in records] == [(11, wanted.generated_tokens)]
    check_idle(engine)


def suspend_gpus(plan: ParallelPlan) -> tuple[list[list[int]], list[list[int]], int]:
    """Tokens of a plain run, those of one that is suspended and resumed at three steps, and the bytes that a suspend frees."""
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128, vocab_size=128, init_method_std=0.2
    )
    groups = ProcessGroups.build(plan)
    # What is computed again is so in other shapes: in bfloat16 another token would be drawn now and then.
    model = GPTModel(config, groups, attention_core=PagedAttention(), device="cuda").eval()
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=64, block_size_tokens=16, max_requests=8, max_tokens=32)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), seed=0)
    params = SamplingParams(temperature=1.0, seed=3, num_tokens_to_generate=20, ignore_eos=True)
    plain = [record.generated_tokens for record in engine.generate(PROMPTS, params)]
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params, request_id=100 + number)
    ended, step, freed = [], 0, 0
    while engine.has_unfinished_requests():
        if step in {1, 4, 12}:
            free = torch.cuda.mem_get_info()[0]
            engine.suspend()
            freed = max(freed, torch.cuda.mem_get_info()[0] - free)
            engine.resume()
        ended += engine.step()
        step += 1
    ended.sort(key=lambda record: record.request_id)
    engine.close()
    return plain, [record.generated_tokens for record in ended], freed


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, sequence_parallel=False), ParallelPlan(pp=2)], ids=["tp", "pp"])
def test_engines_over_two_gpus_are_suspended_at_any_steps(plan: ParallelPlan) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for plain, suspended, freed in run(suspend_gpus, 2, backend="nccl", timeout_s=120.0, plan=plan):
        assert suspended == plain and len(plain) == len(PROMPTS) and freed > 0
