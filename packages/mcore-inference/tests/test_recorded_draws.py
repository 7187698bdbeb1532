# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Draws inside recorded decode steps: which steps have them, and that tokens are those of draws outside."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
)
from mcore_inference.sampling import Sampler
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import TorchBackend
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.decode_graphs import serve_as_on_a_gpu

CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.3)
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0, "return_log_probs": True},
    {"temperature": 1.0, "seed": -(2**63)},
    {"temperature": 0.4, "return_log_probs": True, "processed_log_probs": True},
    {"temperature": 1.3},
    {"top_k": 1},
]
OTHERS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "penalties": {"frequency_penalty": 0.7},
    "bias": {"logit_bias": {3: 2.0}},
    "best tokens": {"return_log_probs": True, "top_n_logprobs": 3},
}


def engine_of(execution: ExecutionConfig, device: str = "cpu", dtype: torch.dtype = torch.float64, **fields: Any) -> DynamicInferenceEngine:
    config = dataclasses.replace(CONFIG, **fields)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=dtype, device=device).eval()
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=64, block_size_tokens=16, max_requests=7, max_tokens=32)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)


def request_settings(extra: dict[str, Any] | None = None) -> list[SamplingParams]:
    """Of requests that end one after the other; more than run at a time."""
    kinds = [*PLAIN, *PLAIN[1:4], *([] if extra is None else [extra])]
    return [SamplingParams(**{"num_tokens_to_generate": 5 + number, **kind}) for number, kind in enumerate(kinds)]


def results(engine: DynamicInferenceEngine, settings: list[SamplingParams]) -> list[Any]:
    records = engine.generate([[1 + number, *range(number)] for number in range(len(settings))], settings)
    return [(record.generated_tokens, record.generated_log_probs, record.generated_top_n_logprobs) for record in records]


def count_draws(patch: pytest.MonkeyPatch) -> Counter[str]:
    """How often tokens were drawn outside of a recording, and taken from one."""
    counts: Counter[str] = Counter()
    for name in ("draw", "take"):
        method = getattr(Sampler, name)

        def counted(*inputs: Any, name: str = name, method: Callable[..., Any] = method, **options: Any) -> Any:
            counts[name] += 1
            return method(*inputs, **options)

        patch.setattr(Sampler, name, counted)
    return counts


def same(ours: list[Any], wanted: list[Any], tolerance: float) -> None:
    assert [tokens for tokens, *_ in ours] == [tokens for tokens, *_ in wanted]
    for (_, values, best), (_, other, ranked) in zip(ours, wanted, strict=True):
        assert values == pytest.approx(other, abs=tolerance)
        assert [list(one) for one in best] == [list(one) for one in ranked]


def check_recorded() -> None:
    serve_as_on_a_gpu()
    with pytest.MonkeyPatch.context() as patch:
        counts = count_draws(patch)
        for extra in (None, OTHERS["top-k"], OTHERS["penalties"] | OTHERS["best tokens"]):
            wanted = results(engine_of(ExecutionConfig(use_graphs=False)), request_settings(extra))
            assert not counts["take"]
            for ahead in (False, True):
                counts.clear()
                engine = engine_of(ExecutionConfig(run_ahead=ahead, use_cuda_graphs_for_non_decode_steps=False))
                same(results(engine, request_settings(extra)), wanted, 1e-6)
                # The last of them runs on alone; steps with prompts draw outside, and so do those with one that asks for more.
                assert counts["draw"] + counts["take"] == engine.step_count and counts["draw"] > 1
                assert (counts["take"] > 5) == (extra is None)
                counts.clear()


@pytest.mark.journey
@pytest.mark.world(1)
def test_plain_steps_draw_inside_and_others_outside(world: Callable[..., Any]) -> None:
    world(check_recorded)


def check_invariant() -> None:
    serve_as_on_a_gpu()
    with pytest.MonkeyPatch.context() as patch:
        counts = count_draws(patch)
        backend = TorchBackend(batch_invariant=True)
        model = GPTModel(CONFIG, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64, backend=backend).eval()
        sizes = InferenceConfig(max_sequence_length=64, num_blocks=64, block_size_tokens=16, max_requests=7, max_tokens=32)
        execution = ExecutionConfig(use_cuda_graphs_for_non_decode_steps=False)
        engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)
        results(engine, request_settings()[:2])
        assert engine.cuda_graph_request_count_map and counts["draw"] and not counts["take"]


@pytest.mark.world(1)
def test_batch_invariant_engines_draw_outside(world: Callable[..., Any]) -> None:
    world(check_invariant)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("extra", [None, *OTHERS])
def test_draws_inside_are_those_outside_on_a_gpu(extra: str | None, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"hidden_size": 128, "ffn_hidden_size": 256, "normalization": "RMSNorm", "activation": "swiglu", "vocab_size": 66000}
    settings = request_settings(None if extra is None else OTHERS[extra])
    execution = ExecutionConfig(run_ahead=ahead)
    ours = results(engine_of(execution, "cuda", torch.bfloat16, **fields), settings)
    # Recordings without draws.
    monkeypatch.setattr(Sampler, "draws_plainly", False)
    wanted = results(engine_of(execution, "cuda", torch.bfloat16, **fields), settings)
    same(ours, wanted, 1e-6)
