# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The feed-forward slot: what fills it maps hidden states to hidden states, and may return auxiliary losses and counts, as declared."""

import pytest
import torch

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.models import FeedForwardBuilder, Site, TransformerConfig, TransformerLayer, dense_feed_forward, self_attention
from mcore_parallel.nn import Step, causal_attention
from tests.contracts.conformance import mismatches

CONFIG = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, vocab_size=32, init_method_std=0.1)

# Builder, and whether it has an auxiliary loss.
PROVIDERS: dict[str, tuple[FeedForwardBuilder, bool]] = {
    "dense": (dense_feed_forward, False),
    "moe": (moe_feed_forward(MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01)), True),
    "moe-without-loss": (moe_feed_forward(MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.0)), False),
}


def site(device: str = "cpu") -> Site:
    return Site(layer=1, local_layer=0, config=CONFIG, groups=ProcessGroups.single(), dtype=torch.float64, device=device)


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_layer_with_the_slot_filled_learns_through_it(name: str) -> None:
    builder, has_loss = PROVIDERS[name]
    assert mismatches(builder, FeedForwardBuilder) == []
    torch.manual_seed(0)
    layer = TransformerLayer(site(), self_attention(causal_attention), builder)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, step = torch.randn(64, 16, dtype=torch.float64, requires_grad=True), Step.causal(4, 16)
    y, aux = layer.mlp(x, step)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    total = None if aux is None else aux.total()
    assert (total is not None) is has_loss
    if aux is not None:
        spec = builder.aux_spec(1, CONFIG)
        assert (set(aux.losses), set(aux.counts)) == ({(1, loss) for loss in spec.losses}, {1})
        assert len(aux.counts[1]) == spec.num_counts
    if total is not None:
        assert total.shape == () and total.requires_grad and total > 0
    (y.square().sum() + (0 if total is None else total)).backward()
    assert x.grad is not None and (x.grad.abs().sum(1) > 0).all()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in layer.mlp.parameters())


@pytest.mark.parametrize("name", PROVIDERS)
def test_parameters_are_declared_and_follow_the_site(name: str) -> None:
    module = PROVIDERS[name][0](site("meta"))
    shards = list(named_shards(module))
    assert len(shards) == len(list(module.parameters())) > 0
    for shard in shards:
        assert shard.parameter.is_meta and shard.parameter.dtype == torch.float64
        assert shard.spec.local_shape(ProcessGroups.single()) == tuple(shard.parameter.shape)
