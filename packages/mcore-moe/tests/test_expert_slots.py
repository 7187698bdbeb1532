# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A layer whose experts have copies and move between ranks gives what it gives without."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_moe import MoEConfig, MoELayer
from mcore_moe.serving import _expert_slots
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import Site, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import LoraConfig
from tests.support.mixtures import filled_layer
from tests.support.world import run

World = Callable[..., list[Any]]
CONFIG = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=2, ffn_hidden_size=10, vocab_size=16, add_bias_linear=True)
MIXTURE = MoEConfig(num_moe_experts=8, moe_router_topk=2, moe_shared_expert_intermediate_size=6)
LOADS = [[90, 5, 40, 3, 1, 1, 1, 2], [0, 0, 1, 1, 60, 60, 2, 1], [7] * 8]


def tokens_of(groups: ProcessGroups, num_tokens: int) -> torch.Tensor:
    """Others on each rank of another engine."""
    draw = torch.Generator().manual_seed(groups.dp.rank)
    return torch.randn(num_tokens, CONFIG.hidden_size, generator=draw, dtype=torch.float64)


@torch.no_grad()
def check_moves(plan: ParallelPlan, fields: dict[str, Any], redundant: int, exact: bool) -> tuple[list[int], list[int]]:
    """Loads that were counted here, and slots that were filled at each move."""
    # Several parts of a weight.
    _expert_slots._BUCKET_BYTES = 256
    groups = ProcessGroups.build(plan)
    mixture = dataclasses.replace(MIXTURE, **fields)
    config = dataclasses.replace(CONFIG, add_bias_linear=mixture.moe_latent_size is None)
    plain, moving = (filled_layer(config, mixture, groups).eval() for _ in range(2))
    x_TD = tokens_of(groups, 9)
    uneven, equal = Step.causal(1, 9), dataclasses.replace(Step.causal(1, 9), equal_lengths=True)
    valid = torch.arange(9) != 4
    steps = [uneven, dataclasses.replace(equal, valid=valid)]
    expected = [plain(x_TD, step)[0] for step in steps]
    names = {shard.name: shard.parameter for shard in named_shards(moving)}

    def compare() -> None:
        for step, y_TD in zip(steps, expected, strict=True):
            moved_TD = moving(x_TD, step)[0]
            # With copies an expert's matmul has fewer rows, and may add up in another order.
            if exact and not redundant and not step.equal_lengths:
                assert torch.equal(moved_TD, y_TD)
            torch.testing.assert_close(moved_TD, y_TD, rtol=1e-12, atol=1e-12)

    slots = moving.add_redundant_experts(redundant)
    assert moving.add_redundant_experts(redundant) is slots
    # Parameters are who they were, in shape too.
    assert all(shard.parameter is names[shard.name] for shard in named_shards(moving))
    addresses = [tensor.data_ptr() for tensor in (slots.loads, slots._copies_E, slots._slots_EC, *slots._weights)]
    slots.settle()
    compare()
    slots.loads.zero_()
    compare()
    counted, moved = slots.loads.tolist(), []
    for loads in LOADS:
        before, after, filled = slots.rebalance(loads)
        assert 1 <= after <= before and (after < before) == (filled > 0)
        moved.append(filled)
        compare()
    # New weights come to the parameters, and go from there to all copies.
    with torch.no_grad():
        for layer in (plain, moving):
            for shard in named_shards(layer):
                # Of moved experts nothing is left in the parameters.
                values = torch.randn(shard.spec.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
                shard.parameter.copy_(values[shard.spec.slices(groups)])
    slots.weights_changed()
    with pytest.raises(RuntimeError, match="layers.0 has redundant experts, which are not in their slots after new weights"):
        moving(x_TD, uneven)
    expected = [plain(x_TD, step)[0] for step in steps]
    slots.settle()
    compare()
    assert addresses == [tensor.data_ptr() for tensor in (slots.loads, slots._copies_E, slots._slots_EC, *slots._weights)]
    return counted, moved


EP2 = ParallelPlan(dp=2, ep=2)
LAYOUTS: dict[str, tuple[int, ParallelPlan, dict[str, Any], bool]] = {
    # Picks of a token are added up in their order, wherever its experts are.
    "alltoall": (2, EP2, {}, True),
    "allgather": (2, EP2, {"moe_token_dispatcher_type": "allgather"}, False),
    "overlap": (2, EP2, {"moe_shared_expert_overlap": True}, True),
    "latent": (2, EP2, {"moe_latent_size": 6}, True),
    # Equal tokens on both, of which each takes those of its own slots.
    "tp2": (2, ParallelPlan(tp=2, ep=2, sequence_parallel=False), {}, False),
    "tp2-ep4": (4, ParallelPlan(tp=2, dp=2, ep=4, etp=1, sequence_parallel=False), {}, False),
    "ep2-etp2": (4, ParallelPlan(tp=2, dp=2, ep=2, etp=2, sequence_parallel=False), {}, False),
}


@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if LAYOUTS[name][0] > 2 else ()) for name in LAYOUTS])
def test_a_layer_gives_the_same_wherever_its_experts_lie(name: str, redundant: int) -> None:
    num_ranks, plan, fields, exact = LAYOUTS[name]
    results = run(check_moves, num_ranks, plan=plan, fields=fields, redundant=redundant, exact=exact)
    counted, moved = zip(*results, strict=True)
    # Padding is not counted, tokens of tp ranks that share them once, and equal tokens on every rank that holds them.
    once = 2 * (9 + 8) * (1 if name == "tp2" else num_ranks // plan.tp)
    assert sum(map(sum, counted)) == once * (2 if name == "tp2" else 1)
    assert all(one == moved[0] for one in moved) and moved[0][1] > 0
    if not redundant:
        assert moved[0][2] == 0


@torch.no_grad()
def check_broken_move() -> None:
    groups = ProcessGroups.build(EP2)
    plain, moving = (filled_layer(CONFIG, MIXTURE, groups).eval() for _ in range(2))
    slots, x_TD, step = moving.add_redundant_experts(4), tokens_of(groups, 9), Step.causal(1, 9)
    slots.settle()

    def lose(*_: Any) -> None:
        raise ConnectionError("lost")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_expert_slots, "all_to_all", lose)
        with pytest.raises(ConnectionError):
            slots.rebalance(LOADS[0])
    slots.weights_changed()
    slots.settle()
    torch.testing.assert_close(moving(x_TD, step)[0], plain(x_TD, step)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.world(2)
def test_new_weights_mend_a_move_that_broke(world: World) -> None:
    world(check_broken_move)


def check_refused() -> None:
    def layer(groups: ProcessGroups, **fields: Any) -> MoELayer:
        site = Site(layer=0, local_layer=0, config=CONFIG, groups=groups)
        return MoELayer(dataclasses.replace(MIXTURE, **fields), site)

    shared = ProcessGroups.build(EP2)
    for groups, fields, redundant, message in [
        (ProcessGroups.single(), {}, 2, "num_redundant_experts=2 copies experts to other ranks, and with ep=1 each rank holds all"),
        (shared, {}, 3, "ep=2 must divide num_moe_experts=8 and num_redundant_experts=3"),
        (shared, {}, 10, "num_redundant_experts=10 leaves slots for two copies .* at most 8 copies"),
        (shared, {"moe_expert_capacity_factor": 1.0}, 2, "moe_expert_capacity_factor=1.0 counts on one place an expert; set .*=None"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer(groups, **fields).add_redundant_experts(redundant)
    mixture = layer(shared)
    mixture.experts.up.grad = torch.zeros_like(mixture.experts.up)
    with pytest.raises(ValueError, match="GroupedMLP is a layer whose experts are being trained"):
        mixture.add_redundant_experts(2)
    mixture = layer(shared)
    mixture.add_redundant_experts(2).settle()
    with pytest.raises(ValueError, match="num_redundant_experts=4, and the model has 2 already; build another model"):
        mixture.add_redundant_experts(4)
    with pytest.raises(RuntimeError, match="has redundant experts, which are not trained; run the model by its engine"):
        mixture.train()(torch.zeros(2, CONFIG.hidden_size), Step.causal(1, 2))
    assert "redundant copies already; round them before" in str(mixture.fp8_obstacle())
    with pytest.raises(ValueError, match="experts have redundant copies, which would have no adapters"):
        mixture.experts.add_lora(LoraConfig(), seed=0)
    dist.barrier()


@pytest.mark.world(2)
def test_what_cannot_have_copies_is_refused_by_name(world: World) -> None:
    world(check_refused)
