# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines over batch-invariant models of every family: the same bits in any company, and those of the trainer."""

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, ModelOutput, TransformerConfig
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig, Step
from tests.support.decode_graphs import record_eagerly
from tests.support.interpreter import round_dots_once, run_interpreted

SIZES = TransformerConfig(
    num_layers=2, hidden_size=48, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=40, vocab_size=90, init_method_std=0.3
)
LATENT = LatentAttentionConfig(q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=12)
DEEPSEEK = MoEConfig(
    num_moe_experts=8, moe_router_topk=4, moe_layer_freq=(0, 1), moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
    moe_router_num_groups=4, moe_router_group_topk=2, moe_shared_expert_intermediate_size=24, moe_shared_expert_gate=True,
)  # fmt: skip
MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=8)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=6, key_head_dim=7, value_head_dim=5, chunk_size=8)
# Of each family the fields of its config, and its mixture.
FAMILIES: dict[str, tuple[dict[str, Any], MoEConfig | None]] = {
    "mixture": ({}, MoEConfig(num_moe_experts=8, moe_router_topk=3)),
    "biased mixture": (
        {"add_bias_linear": True, "activation": "quick_geglu", "glu_linear_offset": 1.0, "softmax_type": "learnable",
         "window_size": (9, 0)},
        MoEConfig(num_moe_experts=4),
    ),
    "deepseek's mixture": ({}, DEEPSEEK),
    "latent": ({"latent_attention": LATENT, "rotary_interleaved": True}, None),
    "latent of full queries, windows": (
        {"latent_attention": dataclasses.replace(LATENT, q_lora_rank=None, v_head_dim=16), "window_size": (9, 0)}, None,
    ),
    "latent of one head": ({"latent_attention": LATENT, "num_attention_heads": 1}, None),
    "deepseek's": ({"latent_attention": LATENT, "rotary_interleaved": True}, DEEPSEEK),
    "further tokens": ({"mtp_num_layers": 2}, DEEPSEEK),
    "output gate": ({"attention_output_gate": True, "qk_layernorm": True, "layernorm_zero_centered_gamma": True}, None),
    "pattern": ({"num_layers": 5, "hybrid_layer_pattern": "*E-*E"}, dataclasses.replace(DEEPSEEK, moe_layer_freq=1)),
    "mrope": ({"position_embedding_type": "mrope", "mrope_section": (2, 4, 2), "kv_channels": 16}, None),
    "norms across heads": ({"qk_layernorm": True, "qk_layernorm_across_heads": True}, None),
    "mamba": ({"num_layers": 4, "hybrid_layer_pattern": "M*-M", "mamba": MAMBA}, None),
    "mamba alone": ({"hybrid_layer_pattern": "MM", "mamba": dataclasses.replace(MAMBA, conv_kernel=1, use_conv_bias=False)}, None),
    "delta net": ({"num_layers": 4, "hybrid_layer_pattern": "G*-G", "delta_net": DELTA}, None),
    "delta net and mixture": ({"num_layers": 3, "hybrid_layer_pattern": "GE*", "delta_net": DELTA}, MoEConfig(num_moe_experts=4)),
}  # fmt: skip
# A state cannot go back: of these families nothing is proposed, and prompts share what stands before a snapshot of it.
RECURRENT = ("mamba", "mamba alone", "delta net", "delta net and mixture")
PARAMS = [
    SamplingParams(temperature=1.0, num_tokens_to_generate=9, return_log_probs=True, processed_log_probs=True, seed=3),
    SamplingParams(temperature=0.7, num_tokens_to_generate=12, return_log_probs=True, processed_log_probs=True, top_n_logprobs=2, seed=4),
    SamplingParams(temperature=0, num_tokens_to_generate=7, return_log_probs=True, skip_prompt_log_probs=False, top_n_logprobs=2),
    SamplingParams(temperature=0.9, top_k=20, num_tokens_to_generate=8, return_log_probs=True, seed=5),
]


def prompts(vocab_size: int = 90) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(vocab_size, (16,), generator=generator).tolist()
    return [shared + torch.randint(vocab_size, (1 + 7 * i,), generator=generator).tolist() for i in range(4)]


def model_of(family: str, core: PagedAttention | None, dtype: torch.dtype, device: str, **changes: Any) -> GPTModel:
    fields, mixture = FAMILIES[family]
    options: dict[str, Any] = {} if mixture is None else {"feed_forward": moe_feed_forward(mixture)}
    # Latents have no grouped queries.
    groups = {"num_query_groups": None} if "latent_attention" in fields else {}
    config = dataclasses.replace(SIZES, **{**fields, **changes, **groups})
    options |= {"attention_core": core, "backend": choose_backend(batch_invariant=True), "dtype": dtype, "device": device}
    model = GPTModel(config, ProcessGroups.single(), **options)
    generator = torch.Generator().manual_seed(3)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("bias"):
            value.data.copy_(0.2 * torch.randn(value.shape, generator=generator))
    return model


def engine_of(
    model: GPTModel, max_tokens: int, *, caching: bool, block_size: int = 8, cached_tokens: int = 192, **execution: Any
) -> DynamicInferenceEngine:
    sizes = InferenceConfig(
        max_sequence_length=80, max_requests=4, max_tokens=max_tokens, block_size_tokens=block_size, num_blocks=cached_tokens // block_size,
        enable_prefix_caching=caching,
    )  # fmt: skip
    context = DynamicInferenceContext.for_model(model, sizes)
    return DynamicInferenceEngine(model, context, execution=ExecutionConfig(**execution))


def results(records: Any) -> list[Any]:
    return [
        (r.generated_tokens, r.generated_log_probs, r.prompt_log_probs, r.generated_top_n_logprobs, r.prompt_top_n_logprobs)
        for r in records
    ]


def check_family(
    engine: Callable[..., DynamicInferenceEngine], trainer: GPTModel, ways: tuple[dict[str, Any], ...], settings: list[SamplingParams]
) -> None:
    """Each request alone, then all of them in every way, and the trainer's forward over the same tokens, alone and packed.

    Args:
        engine: makes one, of a model with the parameters of ``trainer``.
        trainer: whose forward is compared.
        ways: options of ``engine`` for all requests together.
        settings: of the requests.
    """
    texts, single = prompts(trainer.config.vocab_size)[: len(settings)], engine(80, caching=False)
    alone = [result for prompt, params in zip(texts, settings, strict=True) for result in results(single.generate([prompt], params))]
    for way in ways:
        beside = engine(**way)
        assert results(beside.generate(texts, settings)) == alone, way
        assert beside.stats()["preemptions"] > 0 or "cached_tokens" not in way
        # All prompts begin alike.
        assert beside.stats()["prefix_cache_hits"] > 0 or not way["caching"]
    device, temperatures = (
        next(trainer.parameters()).device,
        [params.temperature if params.processed_log_probs else 1.0 for params in settings],
    )
    whole = [torch.tensor([*text, *tokens], device=device) for text, (tokens, *_) in zip(texts, alone, strict=True)]
    bounds = torch.tensor([0, *(len(row) - 1 for row in whole)]).cumsum(0)
    positions = torch.cat([torch.arange(len(row) - 1, device=device) for row in whole])
    step = Step(batch_size=1, seq_len=len(positions), positions=positions, cu_seqlens=bounds)
    packed, _ = trainer(torch.cat([row[:-1] for row in whole]), step)
    assert isinstance(packed, ModelOutput)
    labels = torch.cat([row[1:] for row in whole])
    spans = itertools.pairwise(bounds.tolist())
    for row, text, temperature, own, (start, end) in zip(whole, texts, temperatures, alone, spans, strict=True):
        output, _ = trainer(row[:-1], Step.causal(1, len(row) - 1, device))
        assert isinstance(output, ModelOutput)
        scores = output.log_probs(row[1:], temperature).detach()
        assert torch.equal(scores, packed.log_probs(labels, temperature).detach()[start:end])
        assert scores[len(text) - 1 :].tolist() == own[1]
        if own[2]:
            assert scores[: len(text) - 1].tolist() == list(own[2])


@pytest.mark.journey
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=() if dtype is torch.bfloat16 or "deepseek" in family else pytest.mark.slow)
        for family in FAMILIES
        for dtype in (torch.bfloat16, torch.float32)
    ],
    ids=str,
)
def test_requests_have_the_same_bits_in_any_company_and_as_the_trainer(family: str, dtype: torch.dtype) -> None:
    def engine(*sizes: Any, **options: Any) -> DynamicInferenceEngine:
        return engine_of(model_of(family, PagedAttention(), dtype, "cpu").eval(), *sizes, **options)

    ways: tuple[dict[str, Any], ...] = ({"max_tokens": 80, "caching": False}, {"max_tokens": 7, "caching": False})
    ways += ({"max_tokens": 11, "caching": True},)
    if family in RECURRENT:
        # Not all requests have room: some are computed again.
        ways += ({"max_tokens": 11, "caching": False, "cached_tokens": 96},)
    else:
        ways += ({"max_tokens": 9, "caching": True, "speculation": NgramSpeculation(num_tokens=3, min_ngram=1)},)
    check_family(engine, model_of(family, None, dtype, "cpu"), ways, PARAMS)


def check_shared_experts() -> None:
    options: dict[str, Any] = {
        "feed_forward": moe_feed_forward(MoEConfig(num_moe_experts=4)),
        "backend": choose_backend(batch_invariant=True),
    }
    model = GPTModel(SIZES, ProcessGroups.build(ParallelPlan(dp=2, ep=2)), attention_core=PagedAttention(), **options)
    with pytest.raises(ValueError, match="batch_invariant=True of the backend is served with ep=1, found ep=2"):
        DynamicInferenceContext.for_model(model.eval())


@pytest.mark.world(2)
def test_engines_that_share_experts_are_refused_by_name(world) -> None:
    world(check_shared_experts)


def test_values_that_are_wider_than_keys_are_refused_by_name() -> None:
    wide = dataclasses.replace(LATENT, v_head_dim=20)
    model = model_of("latent", PagedAttention(), torch.float32, "cpu", latent_attention=wide).eval()
    with pytest.raises(ValueError, match="v_head_dim=20 is above the 16 channels of a key"):
        DynamicInferenceContext.for_model(model)


def test_a_cache_of_latents_is_refused_by_name() -> None:
    model = model_of("latent", PagedAttention(), torch.float32, "cpu").eval()
    sizes = InferenceConfig(max_sequence_length=80, max_requests=4, block_size_tokens=8, num_blocks=24)
    with pytest.raises(ValueError, match="is a LatentSelfAttention and the cache holds latents; use DynamicInferenceContext.for_model"):
        DynamicInferenceEngine(model, DynamicInferenceContext(model.config, sizes))


@pytest.mark.journey
@pytest.mark.parametrize("family", ["deepseek's", "mamba", "delta net"])
def test_kernels_are_invariant_in_the_interpreter(family: str) -> None:
    run_interpreted(__file__, family)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_requests_have_the_same_bits_in_any_company_and_as_the_trainer_on_a_gpu(family: str) -> None:
    large = {"hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 256, "vocab_size": 8000}
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", **large, "init_method_std": 0.05}

    def engine(*sizes: Any, **options: Any) -> DynamicInferenceEngine:
        return engine_of(model_of(family, PagedAttention(), **place).eval(), *sizes, block_size=16, **options)

    ways: tuple[dict[str, Any], ...] = ({"max_tokens": 80, "caching": False}, {"max_tokens": 20, "caching": True})
    ways += ({"max_tokens": 80, "caching": False, "use_graphs": False},)
    check_family(engine, model_of(family, None, **place), ways, PARAMS)
    made = engine(80, caching=False)
    made.generate(prompts(8000), PARAMS)
    # Nothing in a step waits for the device.
    assert sum(made.cuda_graph_request_count_map.values()) > 5


if __name__ == "__main__":
    from mcore_inference.attention import _backends
    from mcore_inference.sampling import _sampler
    from mcore_parallel.nn.attention import _batch_invariant as attention
    from mcore_parallel.nn.mixers import _linear_mixer as mixers
    from mcore_parallel.tensor_parallel import _batch_invariant as rows

    # Matmuls, attention, linear mixers, statistics and draws in the interpreter; norms, activations and the choice of experts by torch.
    round_dots_once()
    _backends.has_kernels = _sampler.has_kernels = lambda *_: True
    rows.has_row_kernels = attention.has_row_kernels = mixers.has_row_kernels = lambda _: True
    record_eagerly()
    small = {"hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2}
    brief = [dataclasses.replace(params, num_tokens_to_generate=3) for params in PARAMS[:2]]

    options = {"deepseek's": {}, "mamba": {"hybrid_layer_pattern": "M-"}, "delta net": {"hybrid_layer_pattern": "G-"}}
    family = sys.argv[1]
    place: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", **small, "num_layers": 2, **options[family]}

    def interpreted(max_tokens: int, *, caching: bool) -> DynamicInferenceEngine:
        engine = engine_of(model_of(family, PagedAttention(), **place).eval(), max_tokens, caching=caching, block_size=16)
        assert engine.context.builder.has_kernel
        assert family in RECURRENT or engine.context.cache.pages.shape[-2:] == (2, 16)
        return engine

    check_family(interpreted, model_of(family, None, **place), ({"max_tokens": 20, "caching": True},), brief)
    print("same")
