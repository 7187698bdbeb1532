# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters on a GPU, in recorded steps: what engines over merged models give."""

import dataclasses
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    LoraSlots,
    LoraWeights,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_inference.adapters import adapter_bytes
from mcore_inference.decoder import FusedDecoder
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.adapters import merged, random_adapter

pytestmark = pytest.mark.gpu

SIZES = TransformerConfig(num_layers=3, hidden_size=64, num_attention_heads=4, num_query_groups=2, vocab_size=128, init_method_std=0.2)
LORAS = ["a", None, "b", "c", "a", None, "c", "b"]
CONTEXT: dict[str, Any] = {"max_sequence_length": 96, "max_requests": 8, "max_tokens": 128, "block_size_tokens": 16, "num_blocks": 40}


def make_model(device: str, dtype: torch.dtype = torch.float32) -> GPTModel:
    model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), device=device, dtype=dtype, seed=0).eval()
    if dtype != torch.float32:
        model.load_state_dict(make_model("cpu").state_dict())
    return model


def adapters() -> dict[str, LoraWeights]:
    whole = make_model("cpu")
    return {name: random_adapter(whole, rank, seed, std=0.15) for seed, (name, rank) in enumerate({"a": 8, "b": 3, "c": 16}.items())}


def build(model: GPTModel, *, slots: bool = True, execution: ExecutionConfig | None = None, **sizes: Any) -> DynamicInferenceEngine:
    lora = LoraSlots(max_loras=3) if slots else None
    context = DynamicInferenceContext.for_model(model, InferenceConfig(lora=lora, **CONTEXT, **sizes))
    engine = DynamicInferenceEngine(model, context, execution=execution)
    for name, weights in adapters().items() if slots else ():
        engine.load_lora(name, weights)
    return engine


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(128, (3 + 5 * i,), generator=generator).tolist() for i in range(len(LORAS))]


@pytest.mark.parametrize("speculation", [None, NgramSpeculation()], ids=["one token", "proposals"])
def test_recorded_steps_give_the_tokens_of_a_cpu(speculation: NgramSpeculation | None) -> None:
    params = SamplingParams(temperature=0, num_tokens_to_generate=24, return_log_probs=True)
    wanted = build(make_model("cpu")).generate(prompts(), params, lora=LORAS)
    engine = build(make_model("cuda"), execution=ExecutionConfig(speculation=speculation))
    engine.create_cuda_graphs()
    for turn in range(2):
        for one, other in zip(engine.generate(prompts(), params, lora=LORAS), wanted, strict=True):
            assert one.generated_tokens == other.generated_tokens
            assert one.generated_log_probs == pytest.approx(other.generated_log_probs, abs=1e-4)
        if not turn:
            # Into other slots, under the recordings.
            for name in ("a", "b", "c"):
                engine.unload_lora(name)
            for name in ("c", "b", "a"):
                engine.load_lora(name, adapters()[name])
    assert engine.stats()["graph_steps"] > 0.5 * engine.step_count


@pytest.mark.parametrize("weight_dtype", [None, "fp8_weight_only", "fp8"])
def test_bfloat16_scores_are_those_of_merged_models_up_to_rounding(weight_dtype: Any) -> None:
    if weight_dtype is not None and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    params = SamplingParams(temperature=0, num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=False)
    engine = build(make_model("cuda", torch.bfloat16), weight_dtype=weight_dtype)
    assert isinstance(engine._executor._decoder, FusedDecoder)
    wanted = {
        name: build(merged(make_model("cuda"), adapters().get(name or "")), slots=False).generate(prompts(), params)
        for name in ("a", "b", "c", None)
    }
    ours = [record.prompt_log_probs for record in engine.generate(prompts(), params, lora=LORAS)]

    def error(names: list[str | None]) -> float:
        theirs = [wanted[name][number].prompt_log_probs for number, name in enumerate(names)]
        return float(torch.cat([(torch.tensor(one) - torch.tensor(other)).abs() for one, other in zip(ours, theirs, strict=True)]).mean())

    # Weights in fp8 alone move them as far as a tenth; those of another adapter by whole numbers.
    assert error(LORAS) < (0.08 if weight_dtype is None else 0.4)
    assert error(LORAS[1:] + LORAS[:1]) > 1.0


@pytest.mark.parametrize("weight_dtype", [None, "fp8_weight_only"])
def test_the_base_alone_has_the_bits_and_the_kernels_of_an_engine_without_slots(weight_dtype: Any) -> None:
    params = SamplingParams(temperature=0, num_tokens_to_generate=20, return_log_probs=True)
    results = []
    for slots in (True, False):
        engine = build(make_model("cuda", torch.bfloat16), slots=slots, weight_dtype=weight_dtype)
        results.append(engine.generate(prompts(), params))
        graphs = engine._executor.graphs
        assert graphs is not None and graphs._recorded and not graphs._adapted
    for one, other in zip(*results, strict=True):
        assert one.generated_tokens == other.generated_tokens and one.generated_log_probs == other.generated_log_probs


def test_bfloat16_decode_steps_replay_with_adapters() -> None:
    params = SamplingParams(temperature=0, num_tokens_to_generate=40, return_log_probs=True)
    engine = build(make_model("cuda", torch.bfloat16))
    records = engine.generate(prompts(), params, lora=LORAS)
    assert sum(engine.cuda_graph_request_count_map.values()) >= 38
    # The tokens that were drawn, scored by merged models.
    scored = dataclasses.replace(params, num_tokens_to_generate=1, skip_prompt_log_probs=False)
    for record, lora in zip(records, LORAS, strict=True):
        reference = build(merged(make_model("cuda"), adapters().get(lora or "")), slots=False)
        (other,) = reference.generate([record.prompt_tokens + record.generated_tokens], scored)
        assert other.prompt_log_probs is not None
        gap = torch.tensor(other.prompt_log_probs[len(record.prompt_tokens) - 1 :]) - torch.tensor(record.generated_log_probs)
        assert gap.abs().mean() < 0.1, (lora, gap)


def test_a_cache_that_takes_what_is_left_leaves_the_slots_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, memory = make_model("cuda"), torch.cuda.mem_get_info()
    # Other processes take and free memory of the same card meanwhile.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: memory)
    sizes, buffers = {"max_sequence_length": 96, "max_requests": 8, "max_tokens": 128, "buffer_size_gb": None}, []
    for slots in (None, LoraSlots(max_loras=8, max_lora_rank=512)):
        context = DynamicInferenceContext.for_model(model, InferenceConfig(lora=slots, **sizes))
        buffers.append(context.config.buffer_size_gb)
    assert (buffers[0] - buffers[1]) * 2**30 == pytest.approx(adapter_bytes(model, slots), rel=1e-3)
