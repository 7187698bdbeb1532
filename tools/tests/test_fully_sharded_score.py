# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A fully sharded model scores tokens as one rank does, dense and with experts."""

import pytest
import torch

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig, dense_feed_forward
from mcore_parallel.training import Batch, score
from mcore_tools.assembly import FullyShardedModel

SIZES = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=64)
MOE = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_aux_loss_coeff=0.01)


def check(experts: bool) -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    feed_forward = moe_feed_forward(MOE) if experts else dense_feed_forward
    rows = torch.randint(64, (4, 2, 9), generator=torch.Generator().manual_seed(0))
    batches = [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 8)) for row in rows[groups.dp.rank :: 2]]
    alone = GPTModel(SIZES, ProcessGroups.single(), feed_forward=feed_forward, dtype=torch.float64)
    sharded = FullyShardedModel(GPTModel(SIZES, groups, feed_forward=feed_forward, dtype=torch.float64), groups).train()
    scores = [
        score(model, batches, lambda output, batch: output.log_probs(batch.labels.flatten()), groups=layout)
        for model, layout in ((sharded, groups), (alone, ProcessGroups.single()))
    ]
    for ours, expected in zip(*scores, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_sharded_model_scores_like_one_rank(world, experts: bool) -> None:
    world(check, experts=experts)
