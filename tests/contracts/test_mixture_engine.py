# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine over tensor-parallel ranks serves a mixture of experts: the tokens are those of one rank, and those of transformers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt.hf import import_hf
from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
)
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.parity.ours import transformer_config
from tests.parity.references import build
from tests.support.mixtures import compare_records

CONFIG = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=64, init_method_std=0.3
)
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9]]


def make_engine(groups: ProcessGroups, **fields: Any) -> DynamicInferenceEngine:
    experts = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_router_topk=2, **fields))
    model = GPTModel(CONFIG, groups, feed_forward=experts, attention_core=PagedAttention(), dtype=torch.float64).eval()
    sizes = InferenceConfig(max_sequence_length=40, num_blocks=40, block_size_tokens=4, max_tokens=8, max_requests=4)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))


def check_engine(plan: ParallelPlan) -> list[list[int]]:
    split, whole = make_engine(ProcessGroups.build(plan)), make_engine(ProcessGroups.single())
    params = [SamplingParams(temperature=float(i % 2), num_tokens_to_generate=10, return_log_probs=True) for i in range(4)]
    ours, theirs = split.generate(PROMPTS, params), whole.generate(PROMPTS, params)
    for one, other in zip(ours, theirs, strict=True):
        assert one.generated_tokens == other.generated_tokens
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-10, atol=1e-10)
    return [record.generated_tokens for record in ours]


@pytest.mark.world(2)
@pytest.mark.parametrize("cut", [{"ep": 2, "etp": 1}, {"ep": 1, "etp": 2}, {"ep": 1, "etp": 1}], ids=str)
def test_two_ranks_serve_the_tokens_of_one(world, cut: dict[str, int]) -> None:
    one, two = world(check_engine, plan=ParallelPlan(tp=2, sequence_parallel=False, **cut))
    assert one == two and all(len(tokens) == 10 for tokens in one)


@pytest.mark.filterwarnings("ignore:moe_router_force_load_balancing")
def test_a_mixture_that_routes_at_random_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.mlp is a MoELayer that routes at random \(moe_router_force_load_balancing=True\)"):
        make_engine(ProcessGroups.single(), moe_router_force_load_balancing=True)


# Experts and attention as in gpt-oss.
BIASED: dict[str, Any] = {
    "add_bias_linear": True, "activation": "quick_geglu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
    "softmax_type": "learnable", "window_size": (20, 0), "window_attn_skip_freq": 2,
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, BIASED], ids=["plain", "gpt-oss"])
def test_recorded_steps_give_the_tokens_of_plain_ones(fields: dict[str, Any]) -> None:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=32, vocab_size=128, init_method_std=0.2,
        **fields,
    )  # fmt: skip
    experts = moe_feed_forward(MoEConfig(num_moe_experts=8, moe_router_topk=2))
    model = GPTModel(
        config, ProcessGroups.single(), feed_forward=experts, attention_core=PagedAttention(), device="cuda", dtype=torch.bfloat16
    ).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, block_size_tokens=16, num_blocks=64)
    prompts, records = [prompt[:9] for prompt in (*PROMPTS, [5, 4])], []
    for use_graphs in (True, False):
        context = DynamicInferenceContext.for_model(model, sizes)
        engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(use_graphs=use_graphs))
        params = SamplingParams(temperature=0, num_tokens_to_generate=12, return_log_probs=True)
        # Five rows take the recording of eight: three are padding.
        records.append(engine.generate(prompts, params))
        assert engine.stats()["graph_steps"] == (engine.step_count if use_graphs else 0)
    reference = GPTModel(config, ProcessGroups.single(), feed_forward=experts, dtype=torch.float64).eval()
    reference.load_state_dict(model.state_dict())
    assert compare_records(reference, prompts, *records) >= 24


@pytest.mark.parametrize("name", ["olmoe_grouped", "nemotron_h_latent"])
def test_an_imported_mixture_is_served_with_the_best_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs = build(name)
    theirs.save_pretrained(tmp_path)
    read = import_hf(tmp_path)
    known = {field.name for field in dataclasses.fields(MoEConfig)}
    experts = moe_feed_forward(MoEConfig.from_dict({key: value for key, value in read.config.items() if key in known}))
    config = transformer_config(read.config)
    model = GPTModel(config, ProcessGroups.single(), feed_forward=experts, attention_core=PagedAttention(), seed=None).eval()
    sizes = InferenceConfig(max_sequence_length=40, num_blocks=40, block_size_tokens=4, max_tokens=8, max_requests=4)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
    engine.load_weights(read.tensors)
    for prompt, record in zip(PROMPTS, engine.generate(PROMPTS, SamplingParams(temperature=0, num_tokens_to_generate=8)), strict=True):
        tokens = torch.tensor([[*prompt, *record.generated_tokens]])
        with torch.no_grad():
            scores = theirs(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 : -1]
        picked = scores.gather(1, tokens[0, len(prompt) :, None])[:, 0]
        assert len(record.generated_tokens) == 8 and (scores.amax(1) - picked).max() <= 1e-4 * scores.std()
