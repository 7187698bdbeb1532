# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Each way of exchanging tokens against one rank, with ranks, experts and batches that are empty."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from mcore_moe import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher, MoEConfig, MoELayer, moe_feed_forward
from mcore_moe.dispatch import _allgather
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import Site, TransformerConfig
from mcore_parallel.nn import Step, quick_geglu
from tests.support.mixtures import equal_to_one_rank, filled_layer

D = 8
F64 = torch.float64
MODEL = TransformerConfig(
    num_layers=1, hidden_size=D, num_attention_heads=2, vocab_size=16, ffn_hidden_size=6, activation="quick_geglu", add_bias_linear=True
)
MIXTURE = MoEConfig(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "global_aux_loss"),
    moe_aux_loss_coeff=(0.1, 0.2, 0.3),
    moe_z_loss_coeff=0.4,
)


check = functools.partial(equal_to_one_rank, MODEL)


def check_exchange(plan: ParallelPlan, exchange: str) -> None:
    groups = ProcessGroups.build(plan)
    mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type=exchange)
    kind = {"alltoall": MoEAlltoAllTokenDispatcher, "allgather": MoEAllGatherTokenDispatcher}[exchange]
    assert type(filled_layer(MODEL, mixture, groups).dispatcher) is kind
    ranks = groups.world.size
    x = torch.randn(ranks, 6, D, generator=torch.Generator().manual_seed(1), dtype=F64)
    check(mixture, groups, list(x))
    # All tokens alike: two experts get everything, two nothing.
    check(mixture, groups, list(x[0, :1].expand(ranks, 6, D)))
    check(mixture, groups, list(x[:, :1]))
    check(mixture, groups, list(x[:, :0]))
    if groups.tp.size > 1:
        valid = torch.arange(6 * ranks).view(ranks, 6) % 3 != 1
        valid[0] = False
        check(mixture, groups, list(x), list(valid))
    else:
        # Ranks of dp may hold different numbers of tokens.
        check(mixture, groups, [part[: 2 * rank] for rank, part in enumerate(x)])
        check(mixture, groups, [part[: rank == 0] for rank, part in enumerate(x)])


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, ep=2), ParallelPlan(dp=2, ep=2), ParallelPlan(dp=2, etp=2)], ids=["tp", "dp", "etp"])
def test_two_ranks_equal_one(world, plan: ParallelPlan, exchange: str) -> None:
    world(check_exchange, plan=plan, exchange=exchange)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp=4, ep=4),
        ParallelPlan(dp=4, ep=2),
        ParallelPlan(tp=4, ep=2, etp=2),
        ParallelPlan(dp=4, ep=2, etp=2),
    ],
    ids=["ep4", "dp4-ep2", "tp4-ep2-etp2", "dp4-ep2-etp2"],
)
def test_four_ranks_equal_one(world, plan: ParallelPlan) -> None:
    world(check_exchange, plan=plan, exchange="allgather")


def check_bits(plan: ParallelPlan) -> None:
    """A second run gives the same bits."""
    groups = ProcessGroups.build(plan)
    x = torch.randn(5, D, generator=torch.Generator().manual_seed(groups.world.rank))
    for exchange in ("allgather", "alltoall"):
        layer = filled_layer(MODEL, dataclasses.replace(MIXTURE, moe_token_dispatcher_type=exchange), groups).float()
        one, two = (layer(x, Step.causal(1, 5))[0] for _ in range(2))
        assert torch.equal(one, two)


ON_INPUT = dataclasses.replace(MIXTURE, moe_router_topk=1, moe_router_score_function="sigmoid", moe_apply_probs_on_input=True)


def test_weights_on_the_input_multiply_the_token_before_its_expert() -> None:
    layer = filled_layer(MODEL, ON_INPUT, ProcessGroups.single())
    x = torch.randn(6, D, dtype=F64, requires_grad=True)
    y, _ = layer(x, Step.causal(1, 6))
    scores, experts = ((x @ layer.router.weight.t() + layer.router.bias).sigmoid()).max(-1)
    rows = []
    for token, score, expert in zip(x, scores, experts.tolist(), strict=True):
        gate, value = layer.experts.up[expert] @ (token * score) + layer.experts.up_bias[expert]
        rows.append(layer.experts.down[expert] @ quick_geglu(gate, value) + layer.experts.down_bias[expert])
    expected = torch.stack(rows)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    leaves = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad(result.square().sum(), leaves) for result in (y, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def check_weights_on_the_input(plan: ParallelPlan) -> None:
    groups = ProcessGroups.build(plan)
    x = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(1), dtype=F64)
    for exchange in ("allgather", "alltoall"):
        check(dataclasses.replace(ON_INPUT, moe_token_dispatcher_type=exchange), groups, list(x))


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, ep=2), ParallelPlan(dp=2, etp=2)], ids=["ep", "etp"])
def test_weights_on_the_input_in_every_exchange(world, plan: ParallelPlan) -> None:
    world(check_weights_on_the_input, plan=plan)


@pytest.mark.world(2, shared=True)
def test_the_same_bits_twice(world) -> None:
    world(check_bits, plan=ParallelPlan(dp=2, ep=2))


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="moe_token_dispatcher_type='ring' must be alltoall, allgather or flex"):
        MoEConfig(num_moe_experts=4, moe_token_dispatcher_type="ring")
    site = Site(layer=0, local_layer=0, config=MODEL, groups=ProcessGroups.single())
    for kind in ("allgather", "flex"):
        mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type=kind)
        for build in (moe_feed_forward, functools.partial(MoELayer, site=site)):
            with pytest.raises(ValueError, match=f"pause overlaps all-to-alls, found moe_token_dispatcher_type='{kind}'; set it to"):
                build(mixture, pause=lambda: None)


def check_equal_lengths(plan: ParallelPlan, exchange: str) -> None:
    """A forward of an engine, whose ranks of dp have as many tokens, some of them padding."""
    groups = ProcessGroups.build(plan)
    mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type=exchange)
    layer, alone = (filled_layer(MODEL, mixture, place).eval() for place in (groups, ProcessGroups.single()))
    x = torch.randn(groups.dp.size, 6, D, generator=torch.Generator().manual_seed(1), dtype=F64)
    valid = torch.arange(x.shape[0] * 6).view(-1, 6) % 3 != 1
    valid[0] = False
    gathered: list[int] = []

    def count(name: str) -> Any:
        original = getattr(_allgather, name)
        return lambda *arguments, **options: (gathered.append(len(arguments[0])), original(*arguments, **options))[1]

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_allgather, "all_gather", count("all_gather"))
        for mask in (None, valid):
            step = Step.causal(1, 6)
            own = dataclasses.replace(step, valid=None if mask is None else mask[groups.dp.rank], equal_lengths=True)
            expected, _ = alone(x[groups.dp.rank], dataclasses.replace(own, equal_lengths=False))
            torch.testing.assert_close(layer(x[groups.dp.rank], own)[0], expected, rtol=1e-10, atol=1e-12)
    # One collective brings the tokens of all, and none their number.
    assert gathered == [6, 6]


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("exchange", ["allgather", "alltoall"])
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp=4, ep=4),
        ParallelPlan(dp=4, ep=2, etp=2),
        ParallelPlan(tp=2, dp=2, ep=4, etp=1, sequence_parallel=False),
        ParallelPlan(tp=2, dp=2, ep=2, etp=2, sequence_parallel=False),
    ],
    ids=["ep4", "ep2-etp2", "tp2-ep4", "tp2-ep2-etp2"],
)
def test_ranks_with_equally_many_tokens_exchange_them_without_asking(world, plan: ParallelPlan, exchange: str) -> None:
    world(check_equal_lengths, plan=plan, exchange=exchange)
