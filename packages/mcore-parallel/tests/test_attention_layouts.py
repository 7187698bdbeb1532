# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Windows, sinks and norms of a config train on two ranks as on one: losses, gradients of the sinks, global gradient norms."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import ContextParallelBuilder, RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, model_state, train_step

CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=24,
    vocab_size=32,
    init_method_std=0.3,
    add_qkv_bias=True,
    attention_output_gate=True,
    softmax_type="learnable",
    window_size=(3, 0),
    window_attn_skip_freq=2,
)
LENGTHS = (8, 16, 8)
Run = tuple[list[float], dict[str, Tensor], dict[str, TensorShard]]


def train(config: TransformerConfig, groups: ProcessGroups, core: ContextParallelBuilder | None = None, **parts: Any) -> Run:
    """Losses and gradient norms of two steps, the gradients of the first, the parameters after the second."""
    model = GPTModel(config, groups, attention_core=core, dtype=torch.float64, seed=2, **parts)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0, clip_grad=0.5, weight_decay=0.1), sync, groups)
    numbers: list[float] = []
    gradients: dict[str, Tensor] = {}
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    for step in range(2):
        tokens = torch.randint(0, 32, (1, sum(LENGTHS) + 1), generator=torch.Generator().manual_seed(step))
        batch = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(1, sum(LENGTHS)), cu_seqlens=bounds)
        report = train_step(model, [batch], CrossEntropyObjective(), sync, optimizer, lr=0.02)
        numbers += [report.loss, report.grad_norm]
        gradients = gradients or {name: grad.clone() for name, grad in sync.gradients().items()}
    return numbers, gradients, model_state(model, groups)


def check_layouts(cases: list[tuple[ParallelPlan, TransformerConfig, str | None, Run]]) -> None:
    for plan, config, way, (numbers, gradients, parameters) in cases:
        found = train(config, ProcessGroups.build(plan), None if way is None else ContextParallelBuilder(way))
        torch.testing.assert_close(found[0], numbers, rtol=1e-9, atol=1e-12, msg=lambda text, plan=plan: f"{plan}: {text}")
        for name, shard in found[2].items():
            part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
            torch.testing.assert_close(found[1][name], gradients[name][part], rtol=1e-9, atol=1e-11, msg=name)
            torch.testing.assert_close(shard.data, parameters[name].data[part], rtol=1e-8, atol=1e-8)


@pytest.mark.journey
@pytest.mark.world(2)
def test_two_ranks_train_as_one(world) -> None:
    alone = ProcessGroups.single()
    cases = []
    for changes, layouts in (
        ({}, [(ParallelPlan(tp=2), None), (ParallelPlan(tp=2, sequence_parallel=False), None), (ParallelPlan(cp=2), None)]),
        ({"qk_layernorm": True, "qk_layernorm_across_heads": True}, [(ParallelPlan(tp=2), None), (ParallelPlan(cp=2), None)]),
        ({"attn_logit_softcapping": 0.7, "final_logit_softcapping": 0.9}, [(ParallelPlan(tp=2), None)]),
        # More ranks than key-value heads.
        ({"num_query_groups": 1, "softmax_type": "off-by-one"}, [(ParallelPlan(tp=2), None), (ParallelPlan(cp=2), "a2a")]),
    ):
        config = dataclasses.replace(CONFIG, **changes)
        expected = train(config, alone)
        sinks = [name for name in expected[1] if name.endswith("softmax_offset")]
        assert len(sinks) == (2 if config.softmax_type == "learnable" else 0)
        assert all(float(expected[1][name].abs().min()) > 0 for name in sinks)
        cases += [(plan, config, way, expected) for plan, way in layouts]
    world(check_layouts, cases=cases)


@pytest.mark.world(4)
def test_four_ranks_share_two_key_value_heads(world) -> None:
    expected = train(CONFIG, ProcessGroups.single())
    world(check_layouts, cases=[(ParallelPlan(tp=4), CONFIG, None, expected)])


def test_capped_scores_and_logits_recompute_to_the_same_bits_and_change_the_loss() -> None:
    alone, config = ProcessGroups.single(), dataclasses.replace(CONFIG, attn_logit_softcapping=0.7, final_logit_softcapping=0.9)
    plain, capped = train(CONFIG, alone), train(config, alone)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        one = train(dataclasses.replace(config, **{field: None}), alone)
        assert min(abs(one[0][0] - other[0][0]) for other in (plain, capped)) > 1e-4, field
    for recompute in (RecomputeConfig(granularity="full"), RecomputeConfig(modules=("core_attention",))):
        again = train(config, alone, recompute=recompute)
        assert again[0] == capped[0] and all(torch.equal(again[1][name], grad) for name, grad in capped[1].items())


def test_a_config_without_windows_and_one_whose_windows_hold_everything_agree() -> None:
    alone = ProcessGroups.single()
    wide = train(dataclasses.replace(CONFIG, window_size=(15, 0)), alone)
    none = train(dataclasses.replace(CONFIG, window_size=None, window_attn_skip_freq=None), alone)
    narrow = train(CONFIG, alone)
    torch.testing.assert_close(wide[0], none[0], rtol=1e-12, atol=0)
    assert abs(narrow[0][0] - none[0][0]) > 1e-4
