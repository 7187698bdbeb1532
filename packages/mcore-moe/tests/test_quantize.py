# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Numbers of rows for products in few bits, and routings padded to them."""

import itertools

import pytest
import torch

from mcore_moe import MoEConfig, get_fp4_align_size, get_fp8_align_size, pad_routing_map
from mcore_parallel.backends import Fp8Config


def test_sizes_of_the_recipes() -> None:
    assert {recipe: get_fp8_align_size(recipe) for recipe in ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8")} == {
        "tensorwise": 16, "rowwise": 16, "delayed": 16, "blockwise": 16, "mxfp8": 32,
    }  # fmt: skip
    assert get_fp8_align_size(Fp8Config().recipe) == 16 and get_fp4_align_size("nvfp4") == 128
    with pytest.raises(ValueError, match="fp8_recipe='nvfp4' must be one of tensorwise, rowwise, delayed, blockwise, mxfp8"):
        get_fp8_align_size("nvfp4")
    with pytest.raises(ValueError, match="fp4_recipe='mxfp8' must be one of nvfp4"):
        get_fp4_align_size("mxfp8")


def test_maps_are_padded_as_a_loop_pads_them() -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, multiple, share in itertools.product((0, 1, 5, 33), (1, 4, 16), (0.0, 0.3, 1.0)):
        routed = torch.rand(tokens, 6, generator=generator) < share
        before = routed.clone()
        padded, aligned = pad_routing_map(routed, multiple)
        assert torch.equal(routed, before) and padded.dtype == torch.bool and padded.shape == routed.shape
        for column, got, enough in zip(before.t().tolist(), padded.t().tolist(), aligned.tolist(), strict=True):
            wanted = list(column)
            missing = -sum(column) % multiple
            assert enough == (missing <= column.count(False))
            for token in [token for token, chosen in enumerate(column) if not chosen][: missing if enough else 0]:
                wanted[token] = True
            assert got == wanted
            assert not enough or sum(got) % multiple == 0


def test_nothing_is_read_back() -> None:
    padded, aligned = pad_routing_map(torch.empty(8, 4, dtype=torch.bool, device="meta"), 16)
    assert padded.shape == (8, 4) and aligned.shape == (4,)


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="pad_multiple=0 must be at least 1"):
        pad_routing_map(torch.ones(2, 2, dtype=torch.bool), 0)
    for name in ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8"):
        with pytest.raises(ValueError, match=f"{name}=True is reserved and not implemented"):
            MoEConfig(num_moe_experts=8, **{name: True})
