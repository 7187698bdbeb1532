# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The mixer slot: what fills it lets a token see its own sequence up to itself, and nothing else."""

import pytest
import torch

from mcore_inference import PagedAttention
from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.models import MixerBuilder, Site, TransformerConfig, self_attention
from mcore_parallel.nn import Step, causal_attention, default_attention
from tests.contracts.conformance import mismatches

CONFIG = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32)

PROVIDERS: dict[str, MixerBuilder] = {
    "self-attention": self_attention(causal_attention),
    "self-attention-default-core": self_attention(default_attention(ProcessGroups.single())),
    "self-attention-paged-core": self_attention(PagedAttention()),
}


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_token_sees_its_own_sequence_up_to_itself(name: str) -> None:
    builder = PROVIDERS[name]
    assert mismatches(builder, MixerBuilder) == []
    mixer = builder(Site(layer=0, local_layer=0, config=CONFIG, groups=ProcessGroups.single(), dtype=torch.float64))
    assert {shard.name for shard in named_shards(mixer)} == {name for name, _ in mixer.named_parameters()}
    torch.manual_seed(0)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x, step = torch.randn(2 * 6, 16, dtype=torch.float64), Step.causal(2, 6)
    other = x.clone()
    other[3] += 1.0
    before, after = mixer(x, step), mixer(other, step)
    assert (before.shape, before.dtype) == (x.shape, x.dtype)
    changed = (before - after).abs().sum(1) > 1e-12
    assert changed.tolist() == [False] * 3 + [True] * 3 + [False] * 6
