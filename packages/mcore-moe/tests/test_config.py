# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Mixtures that cannot be are refused before the first tensor."""

from typing import Any

import pytest
import torch

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan
from mcore_parallel.backends import check_grouped_width
from mcore_parallel.models import TransformerConfig, check_layout

MODEL = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=16)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_ffn_hidden_size": -8}, "moe_ffn_hidden_size=-8 must be at least 1; leave it out"),
        ({"moe_ffn_hidden_size": 0}, "moe_ffn_hidden_size=0 must be at least 1"),
        ({"moe_ffn_hidden_size": 8.0}, "moe_ffn_hidden_size=8.0 must be an integer or None"),
        ({"num_moe_experts": "4"}, "num_moe_experts='4' must be an integer, not str; write 4"),
    ],
)
def test_fields_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{"num_moe_experts": 4, **values})


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"ep": 8, "dp": 8}, "ep=8 must divide num_moe_experts=4; lower ep"),
        ({"etp": 3, "dp": 3}, "etp=3 must divide the expert width 20; lower etp"),
        ({"tp": 2, "dp": 2, "ep": 4, "etp": 1, "sequence_parallel": False}, "ep=4 and etp=1 spread the experts beyond the tp=2 ranks"),
    ],
)
def test_layouts_are_checked(degrees: dict[str, Any], message: str) -> None:
    feed_forward = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_ffn_hidden_size=20))
    with pytest.raises(ValueError, match=message):
        check_layout(MODEL, ParallelPlan(**degrees), feed_forward=feed_forward)
    check_layout(MODEL, ParallelPlan(tp=2, ep=2, dp=2), feed_forward=feed_forward)


def test_widths_of_grouped_products() -> None:
    feed_forward = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_ffn_hidden_size=24))
    place: dict[str, Any] = {"feed_forward": feed_forward, "dtype": torch.bfloat16, "device": "cuda"}
    check_layout(MODEL, ParallelPlan(), **place)
    with pytest.raises(ValueError, match="moe_ffn_hidden_size=12 on a rank must be a multiple of 8: .* rows of 16 bytes; use 16 on a rank"):
        check_layout(MODEL, ParallelPlan(dp=2, etp=2), **place)
    # Other dtypes take one matmul per expert, of any width.
    check_layout(MODEL, ParallelPlan(dp=2, etp=2), **{**place, "dtype": torch.float32})
    check_grouped_width("hidden_size", 12, torch.bfloat16, "cpu")
