# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine over a batch-invariant model by kernels: the same bits in any company, in graphs and without, and those of the trainer.

In the interpreter a step is computed from the tensors that a graph would replay; on a GPU it is a graph.
"""

import dataclasses
import itertools
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
from mcore_inference.decoder import FusedDecoder
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, ModelOutput, TransformerConfig
from mcore_parallel.nn import Step
from tests.support.decode_graphs import record_eagerly
from tests.support.interpreter import round_dots_once, run_interpreted

SMALL = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=90, init_method_std=0.3)
REAL = TransformerConfig(
    num_layers=3, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=16, num_query_groups=4, vocab_size=25000, init_method_std=0.05
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"normalization": "RMSNorm", "activation": "swiglu"},
    "window and sinks": {"window_size": (20, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable", "qk_layernorm": True},
    "biases": {"normalization": "LayerNorm", "add_bias_linear": True, "activation": "gelu", "softmax_type": "off-by-one"},
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "processed_log_probs": True, "num_tokens_to_generate": 9},
    {"temperature": 0.7, "processed_log_probs": True, "top_n_logprobs": 2, "num_tokens_to_generate": 12},
    {"temperature": 0, "num_tokens_to_generate": 7, "skip_prompt_log_probs": False, "top_n_logprobs": 2},
    {"temperature": 0.9, "top_k": 20, "num_tokens_to_generate": 8},
    {"temperature": 1.3, "top_p": 0.9, "processed_log_probs": True, "top_n_logprobs": 4, "num_tokens_to_generate": 8},
    {"temperature": 1.0, "repetition_penalty": 1.2, "num_tokens_to_generate": 6},
)


def settings(count: int, shorter: int) -> list[SamplingParams]:
    """Of the kinds in turn, with 1 / ``shorter`` of their tokens."""
    chosen = [{**KINDS[i % len(KINDS)], "seed": i, "return_log_probs": True} for i in range(count)]
    return [SamplingParams(**{**one, "num_tokens_to_generate": one["num_tokens_to_generate"] // shorter}) for one in chosen]


def prompts(config: TransformerConfig, count: int) -> list[list[int]]:
    """Some begin alike."""
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(config.vocab_size, (32,), generator=generator).tolist()
    rest = [torch.randint(config.vocab_size, (1 + 7 * i,), generator=generator).tolist() for i in range(count)]
    return [(shared if i % 3 else []) + tail for i, tail in enumerate(rest)]


def engine_of(config: TransformerConfig, place: dict[str, Any], use_graphs: bool | None, **sizes: Any) -> DynamicInferenceEngine:
    backend = choose_backend(batch_invariant=True)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend, **place).eval()
    context = DynamicInferenceContext.for_model(model, InferenceConfig(block_size_tokens=16, **sizes))
    assert context.builder.has_kernel
    return DynamicInferenceEngine(model, context, execution=ExecutionConfig(use_graphs=use_graphs))


def outcome(records: Any) -> list[Any]:
    return [
        (r.generated_tokens, r.generated_log_probs, r.prompt_log_probs, r.generated_top_n_logprobs, r.prompt_top_n_logprobs)
        for r in records
    ]


def check_company(
    config: TransformerConfig, place: dict[str, Any], count: int, shorter: int, ways: tuple[tuple[bool | None, dict[str, Any]], ...]
) -> list[Any]:
    """Each alone, then all of them in every way (graphs or not, sizes); returns what each drew."""
    sizes = {"max_sequence_length": 16 * (4 + count // 2), "max_requests": count, "num_blocks": 24 * count, "max_tokens": 4096}
    sizes |= {"enable_prefix_caching": False}
    texts, params = prompts(config, count), settings(count, shorter)
    single = engine_of(config, place, None, **sizes)
    alone = [result for text, own in zip(texts, params, strict=True) for result in outcome(single.generate([text], own))]
    for use_graphs, way in ways:
        engine = engine_of(config, place, use_graphs, **{**sizes, **way})
        # The second time some beginnings are in the cache.
        for _ in range(2 if way.get("enable_prefix_caching") else 1):
            for number, (ours, own) in enumerate(zip(outcome(engine.generate(texts, params)), alone, strict=True)):
                assert ours == own, f"request {number} with use_graphs={use_graphs}, {way}"
        mixed = engine._executor.mixed_graphs
        # Prompts whose log-probabilities are asked for are launched.
        assert mixed is None if use_graphs is False else mixed is not None and (way == {} or mixed.step_counts.total() > 0)
    return alone


def check_trainer(config: TransformerConfig, place: dict[str, Any], count: int, drawn: list[Any]) -> None:
    """Log-probabilities of the trainer's forward, each sequence alone and all of them packed, less the engine's: exactly 0."""
    model = GPTModel(config, ProcessGroups.single(), backend=choose_backend(batch_invariant=True), **place)
    texts, device = prompts(config, count), place["device"]
    whole = [torch.tensor([*text, *tokens], device=device) for text, (tokens, *_) in zip(texts, drawn, strict=True)]
    bounds = torch.tensor([0, *(len(row) - 1 for row in whole)]).cumsum(0)
    places = torch.cat([torch.arange(len(row) - 1, device=device) for row in whole])
    step = Step(batch_size=1, seq_len=len(places), positions=places, cu_seqlens=bounds)
    packed, _ = model(torch.cat([row[:-1] for row in whole]), step)
    assert isinstance(packed, ModelOutput)
    labels = torch.cat([row[1:] for row in whole])
    compared = 0
    for temperature in {KINDS[i % len(KINDS)]["temperature"] or 1.0 for i in range(count)}:
        together = packed.log_probs(labels, temperature).detach()
        for number, (start, end) in enumerate(itertools.pairwise(bounds.tolist())):
            kind, (_, values, prompt_values, *_) = KINDS[number % len(KINDS)], drawn[number]
            if temperature != (kind["temperature"] if kind.get("processed_log_probs") else 1.0) or "top_p" in kind:
                continue
            row, text = whole[number], texts[number]
            alone, _ = model(row[:-1], Step.causal(1, len(row) - 1, device))
            assert isinstance(alone, ModelOutput)
            scores = alone.log_probs(row[1:], temperature).detach()
            assert torch.equal(scores, together[start:end])
            assert scores[len(text) - 1 :].tolist() == values, f"request {number}"
            if kind.get("skip_prompt_log_probs") is False:
                assert scores[: len(text) - 1].tolist() == list(prompt_values)
            compared += 1
    assert compared > count // 2


@pytest.mark.journey
def test_an_engine_by_kernels_is_invariant_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_and_log_probs_do_not_depend_on_company_and_are_the_trainers_on_a_gpu(name: str) -> None:
    config, place = dataclasses.replace(REAL, **VARIANTS[name]), {"device": "cuda", "dtype": torch.bfloat16}
    ways = ((None, {}), (None, {"max_tokens": 50, "enable_prefix_caching": True}), (False, {"max_tokens": 300}))
    drawn = check_company(config, place, 24, 1, ways)
    check_trainer(config, place, 24, drawn)


@pytest.mark.gpu
def test_decode_steps_are_graphs_and_not_those_of_the_fused_decoder_on_a_gpu() -> None:
    config = dataclasses.replace(REAL, **VARIANTS["plain"])
    sizes = {"max_sequence_length": 64, "max_requests": 8, "num_blocks": 40}
    engine = engine_of(config, {"device": "cuda", "dtype": torch.bfloat16}, None, **sizes)
    assert not FusedDecoder.fits(engine.model)
    engine.generate(prompts(config, 6), settings(6, 1))
    assert sum(engine.cuda_graph_request_count_map.values()) > 5


@pytest.mark.gpu
def test_blocks_without_a_kernel_are_refused_by_name_on_a_gpu() -> None:
    backend = choose_backend(batch_invariant=True)
    model = GPTModel(SMALL, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend, device="cuda", dtype=torch.bfloat16)
    sizes = InferenceConfig(max_sequence_length=64, max_requests=4, block_size_tokens=8, num_blocks=24)
    with pytest.raises(ValueError, match="block_size_tokens=8 of torch.bfloat16; set block_size_tokens=64"):
        DynamicInferenceEngine(model.eval(), DynamicInferenceContext.for_model(model, sizes))


if __name__ == "__main__":
    from mcore_inference.attention import _backends
    from mcore_inference.sampling import _sampler
    from mcore_parallel.nn.attention import _batch_invariant as attention
    from mcore_parallel.tensor_parallel import _batch_invariant as rows

    # Matmuls, attention, statistics and draws in the interpreter; torch computes norms and activations, each row alone.
    round_dots_once()
    _backends.has_kernels = _sampler.has_kernels = lambda *_: True
    rows.has_row_kernels = attention.has_row_kernels = lambda _: True
    record_eagerly()
    here = {"device": "cpu", "dtype": torch.float32}
    small = dataclasses.replace(SMALL, **{**VARIANTS["window and sinks"], "window_attn_skip_freq": None})
    check_trainer(small, here, 2, check_company(small, here, 2, 4, ((None, {"max_tokens": 20, "enable_prefix_caching": True}),)))
    print("same")
