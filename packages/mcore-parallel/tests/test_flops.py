# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Counted parameters and operations."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig, flops_per_token, num_parameters
from mcore_parallel.nn import Step

SIZES = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 40}


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_query_groups": 2, "ffn_hidden_size": 20}, {"kv_channels": 10}, {"share_embeddings_and_output_weights": True}],
)
def test_counts_equal_the_model_and_the_counter_of_torch(changes: dict[str, int]) -> None:
    config = TransformerConfig(**SIZES, **changes)
    model = GPTModel(config, ProcessGroups.single(), device="meta")
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    tokens, step = torch.zeros(32, dtype=torch.int64, device="meta"), Step.causal(2, 16, "meta")
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output, _ = model(tokens, step)
        output.logits().sum().backward()
    assert counter.get_total_flops() == 32 * flops_per_token(config, 16, causal=False)


def test_a_causal_token_sees_half_of_the_others_on_average() -> None:
    config = TransformerConfig(**SIZES)
    saved = flops_per_token(config, 9, causal=False) - flops_per_token(config, 9)
    assert saved == 6 * 3 * 2 * 24 * (9 - 5)


def test_another_feed_forward_replaces_the_dense_one() -> None:
    config = TransformerConfig(**SIZES)
    dense = 3 * 24 * 96
    assert num_parameters(config, feed_forward=0) == num_parameters(config) - 3 * dense
    assert flops_per_token(config, 4, feed_forward=2 * dense) == flops_per_token(config, 4) + 6 * 3 * dense
