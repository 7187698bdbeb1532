# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Numbers of rows for products in few bits, and routings padded to them."""

import itertools
from typing import Any

import pytest
import torch

from mcore_moe import (
    MoEConfig,
    MoELayer,
    get_fp4_align_size,
    get_fp8_align_size,
    moe_feed_forward,
    pad_routing_map,
)
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step


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


def narrow_losses(groups: ProcessGroups, recipe: Any) -> list[float]:
    """Losses of three steps of a mixture on the same eight sequences, whoever holds its experts."""
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64, ffn_hidden_size=48)
    experts = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01)
    backend = None if recipe is None else choose_backend("torch", fp8=Fp8Config(recipe=recipe))
    model = GPTModel(config, groups, backend=backend, feed_forward=moe_feed_forward(experts), dtype=torch.float64, seed=1)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-2), sync, groups)
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(0)).chunk(groups.dp.size)[groups.dp.rank]
    mask = torch.ones(len(tokens), 16)
    batch = Batch(tokens=tokens[:, :-1].contiguous(), labels=tokens[:, 1:].contiguous(), loss_mask=mask)
    return [train_step(model, [batch], CrossEntropyObjective(), sync, optimizer, lr=1e-2, groups=groups).loss for _ in range(4)]


def check_narrow_experts(recipe: Any) -> None:
    found = narrow_losses(ProcessGroups.build(ParallelPlan(dp=2, ep=2)), recipe)
    wanted, plain = narrow_losses(ProcessGroups.single(), recipe), narrow_losses(ProcessGroups.single(), None)
    # Dense layers scale the tokens of a rank, so their values differ by steps of the format.
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=5e-3, atol=0)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=2e-2, atol=0)
    assert found != plain and found[-1] < found[0]


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.journey)])
def test_experts_of_two_ranks_learn_in_fp8_as_on_one(world, recipe) -> None:
    world(check_narrow_experts, recipe=recipe)


def check_layer_over_ranks(recipe: Any) -> None:
    """A layer by itself has no dense layers: scales belong to rows or experts, and do not depend on who holds them."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    mixture, layers = MoEConfig(num_moe_experts=4), choose_backend("torch", fp8=Fp8Config(recipe=recipe)).layers(0, 1)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=64, ffn_hidden_size=48)
    single, place = ProcessGroups.single(), {"layer": 0, "local_layer": 0, "config": config, "layers": layers, "dtype": torch.float64}
    whole, ours = (MoELayer(mixture, Site(groups=those, **place), dtype=torch.float64) for those in (single, groups))
    generator = torch.Generator().manual_seed(0)
    mine = slice(groups.ep.rank * 2, groups.ep.rank * 2 + 2)
    with torch.no_grad():
        for (name, value), other in zip(whole.named_parameters(), ours.parameters(), strict=True):
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) * 0.3)
            other.copy_(value[mine] if "experts" in name else value)
    x, grad = (torch.randn(24, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    part = slice(groups.dp.rank * 12, groups.dp.rank * 12 + 12)
    leaf, share = x.clone().requires_grad_(), x[part].clone().requires_grad_()
    wanted, found = whole(leaf, Step.causal(1, 24))[0], ours(share, Step.causal(1, 12))[0]
    torch.testing.assert_close(found, wanted[part], rtol=1e-9, atol=1e-9)
    wanted.backward(grad)
    found.backward(grad[part])
    assert leaf.grad is not None and share.grad is not None and relative(share.grad, leaf.grad[part]) < 2e-2
    for name in ("up", "down"):
        assert relative(getattr(ours.experts, name).grad, getattr(whole.experts, name).grad[mine]) < 2e-2


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_layer_in_fp8_does_not_depend_on_where_its_experts_lie(world, recipe) -> None:
    world(check_layer_over_ranks, recipe=recipe)
