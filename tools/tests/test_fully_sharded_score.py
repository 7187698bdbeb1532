# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A fully sharded model scores tokens as one rank does, dense and with experts."""

import pytest
import torch

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig, dense_feed_forward
from mcore_parallel.training import Batch, score
from mcore_rl import FrozenWeights, with_old_logprobs, with_ref_logprobs
from mcore_tools.assembly import FullyShardedModel, TorchShardedModel

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


def check_reference(kind: type[FullyShardedModel | TorchShardedModel], dtype: torch.dtype) -> None:
    """The frozen weights score as those of the model did, however it learnt since, and the model's own come back bit by bit."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    rows = torch.randint(64, (2, 2, 9), generator=torch.Generator().manual_seed(0))
    batches = [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 8)) for row in rows]
    whole = GPTModel(SIZES, groups, dtype=dtype)
    model = kind(whole, groups)
    for trains in (False, True):
        model.train(trains)
        assert {module.training for module in whole.modules()} == {trains}

    def scores(reference: FrozenWeights | None = None) -> list[torch.Tensor]:
        if reference is None:
            scored = with_old_logprobs(model, batches, groups)
            return [batch.extras["old_logprobs"] for batch in scored]
        return [batch.extras["ref_logprobs"] for batch in with_ref_logprobs(reference, batches, groups)]

    # Each layer is in its own mode again afterwards.
    whole.layers["0"].eval()
    modes = [module.training for module in whole.modules()]
    first, reference = scores(), FrozenWeights(model)
    assert [module.training for module in whole.modules()] == modes and set(modes) == {False, True}
    boxes = [box.tensor for boxes in model.parameter_shards().values() for box in boxes]
    with torch.no_grad():
        for box in boxes:
            box.mul_(1.5)
    model.start_param_sync()
    learnt, own = scores(), [box.clone() for box in boxes]
    assert all(torch.equal(ours, expected) for ours, expected in zip(scores(reference), first, strict=True))
    assert not torch.equal(learnt[0], first[0])
    assert all(torch.equal(box, before) for box, before in zip(boxes, own, strict=True))
    assert all(torch.equal(ours, expected) for ours, expected in zip(scores(), learnt, strict=True))
    with pytest.raises(RuntimeError, match="inside"), reference.swapped():
        raise RuntimeError("inside")
    assert all(torch.equal(box, before) for box, before in zip(boxes, own, strict=True))


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [FullyShardedModel, TorchShardedModel])
def test_the_reference_of_a_sharded_model_is_its_shards_of_then(world, kind: type[FullyShardedModel], dtype: torch.dtype) -> None:
    world(check_reference, kind=kind, dtype=dtype)


@pytest.mark.world(2)
@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_a_sharded_model_scores_like_one_rank(world, experts: bool) -> None:
    world(check, experts=experts)
