# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine over tensor-parallel ranks serves a mixture of experts: the tokens are those of one rank."""

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
from mcore_moe import MoEConfig, TopKRouter, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step

CONFIG = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=64, init_method_std=0.3
)
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9]]


def make_engine(groups: ProcessGroups) -> DynamicInferenceEngine:
    experts = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_router_topk=2))
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


@pytest.mark.gpu
def test_recorded_steps_give_the_tokens_of_plain_ones() -> None:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=32, vocab_size=128, init_method_std=0.2
    )
    experts = moe_feed_forward(MoEConfig(num_moe_experts=8, moe_router_topk=2))
    model = GPTModel(
        config, ProcessGroups.single(), feed_forward=experts, attention_core=PagedAttention(), device="cuda", dtype=torch.bfloat16
    ).eval()
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, block_size_tokens=16, num_blocks=64)
    prompts, records = [prompt[:9] for prompt in (*PROMPTS, [5, 4])], []
    for use_graphs in (True, False):
        context = DynamicInferenceContext.for_model(model, sizes)
        engine = DynamicInferenceEngine(model, context, execution=ExecutionConfig(use_graphs=use_graphs))
        params = SamplingParams(temperature=0, num_tokens_to_generate=12, return_log_probs=True)
        # Five rows take the recording of eight: three are padding.
        records.append(engine.generate(prompts, params))
    compared = 0
    reference = GPTModel(config, ProcessGroups.single(), feed_forward=experts, dtype=torch.float64).eval()
    reference.load_state_dict(model.state_dict())
    for text, recorded, plain in zip(prompts, *records, strict=True):
        same = next(
            (i for i, pair in enumerate(zip(recorded.generated_tokens, plain.generated_tokens, strict=True)) if len(set(pair)) > 1), 12
        )
        # Padding changes how products are tiled: a near tie of two experts, and then of two tokens, may fall otherwise.
        settled = settled_places(reference, [*text, *plain.generated_tokens]) - len(text) + 1
        same = max(0, min(same, settled))
        compared += same
        # Logits of 4 to 8 in bfloat16 are 1/32 apart, and either may be some of these off.
        torch.testing.assert_close(recorded.generated_log_probs[:same], plain.generated_log_probs[:same], rtol=0, atol=4 / 32)
    assert compared >= 24


def settled_places(model: GPTModel, tokens: list[int]) -> int:
    """Leading tokens whose experts no rounding exchanges."""
    gaps: list[torch.Tensor] = []

    def measure(router: TopKRouter, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        best = (inputs[0] @ router.weight.T).topk(3, dim=-1).values
        gaps.append(best[:, 1] - best[:, 2])

    hooks = [module.register_forward_hook(measure) for module in model.modules() if isinstance(module, TopKRouter)]
    with torch.no_grad():
        model(torch.tensor(tokens), Step.causal(1, len(tokens)))
    for hook in hooks:
        hook.remove()
    close = torch.stack(gaps).amin(0) < 0.02
    return int(close.int().argmax()) if close.any() else len(tokens)
