# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokens that travel in fp8: what rounding costs, what crosses, and that no layout changes a number."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEAlltoAllTokenDispatcher, MoEConfig, MoELayer, _fp8_payload
from mcore_moe._fp8_payload import decode, encode, rounded
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import Site, TransformerConfig
from mcore_parallel.nn import Step
from tests.support.mixtures import equal_to_one_rank, filled_layer, random_routing

F64 = torch.float64
# Three blocks of scales, the last of them short.
D = 300
MODEL = TransformerConfig(num_layers=1, hidden_size=D, num_attention_heads=2, vocab_size=16, ffn_hidden_size=6)
PLAIN = MoEConfig(num_moe_experts=4, moe_aux_loss_coeff=0.1)
MIXTURE = dataclasses.replace(PLAIN, moe_dispatch_fwd_dtype="fp8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("width", [1, 8, 128, 129, 300])
def test_rounding_errs_by_a_sixteenth_at_most_and_what_is_rounded_stays(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    # Rows, and values in them, of very different sizes.
    exponents = torch.randint(-60, 60, (40, 1), generator=generator) + torch.randint(-12, 1, (40, width), generator=generator)
    x = torch.ldexp(torch.randn(40, width, generator=generator), exponents).to(dtype)
    coded = encode(x)
    assert coded.dtype == torch.uint8 and coded.shape == (40, width + -(-width // 128))
    y = decode(coded, width, dtype)
    largest = torch.cat([part.abs().amax(-1, keepdim=True).expand_as(part) for part in x.float().split(128, dim=-1)], dim=-1)
    # Where e4m3 has no more bits: half a step of the smallest values, whose scale is at most the 224th part of the largest.
    bound = torch.maximum(x.float().abs() / 16, largest / 224 * 2**-10)
    assert ((y.float() - x.float()).abs() <= bound).all()
    assert torch.equal(decode(encode(y), width, dtype), y)
    assert torch.equal(y.float(), decode(coded, width, torch.bfloat16).float())


def test_rounding_keeps_zeros_and_large_values_and_makes_blocks_that_are_not_finite_nan() -> None:
    x = torch.tensor([[0.0, 0.0], [-448.0, 449.0], [3e38, 1.0], [1e-38, 0.0], [float("inf"), 2.0], [float("nan"), -3.0]])
    y = rounded(x)
    assert y[:2].tolist() == [[0.0, 0.0], [-448.0, 448.0]] and y[2, 0].item() == pytest.approx(3e38, rel=1 / 16)
    assert y[3].tolist() == [0.0, 0.0] and y[4:].isnan().all()
    assert rounded(torch.zeros(0, D)).shape == (0, D)
    leaf = torch.randn(3, D, requires_grad=True)
    (grad,) = torch.autograd.grad((rounded(leaf) * torch.arange(D)).sum(), leaf)
    assert torch.equal(grad, torch.arange(D).float().expand(3, D))


def test_float16_is_refused() -> None:
    site = Site(layer=0, local_layer=0, config=MODEL, groups=ProcessGroups.single())
    with pytest.raises(ValueError, match="moe_dispatch_fwd_dtype='fp8' sends numbers that float16 does not have; build the model in"):
        MoELayer(MIXTURE, site, dtype=torch.float16)


def check_layouts(plan: ParallelPlan) -> None:
    groups = ProcessGroups.build(plan)
    ranks = groups.world.size
    x = torch.randn(ranks, 6, D, generator=torch.Generator().manual_seed(1), dtype=F64)
    parts = [list(x), list(x[:, :0])]
    if groups.dp.size > 1:
        parts.append([part[: 2 * rank] for rank, part in enumerate(x)])
    for tokens in parts:
        equal_to_one_rank(MODEL, MIXTURE, groups, tokens)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=2, ep=2),
        ParallelPlan(dp=2, ep=2),
        ParallelPlan(dp=2, etp=2),
        ParallelPlan(cp=2, ep=2),
    ],
    ids=["tp", "dp", "etp", "cp"],
)
def test_two_ranks_equal_one(world: Any, plan: ParallelPlan) -> None:
    world(check_layouts, plan=plan)


@pytest.mark.world(4)
def test_four_ranks_that_share_experts_equal_one(world: Any) -> None:
    world(check_layouts, plan=ParallelPlan(dp=4, ep=2, etp=2))


def check_messages() -> None:
    """One message forwards and one backwards, with the weights in it; ``pause`` is called in both."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    paused: list[int] = []
    dispatcher = MoEAlltoAllTokenDispatcher(4, groups.ep, pause=lambda: paused.append(1), fp8=True)
    sent: list[tuple[torch.dtype, int]] = []
    exchange = _fp8_payload.all_to_all

    def count(x: Tensor, *arguments: Any) -> Tensor:
        sent.append((x.dtype, x.shape[1]))
        return exchange(x, *arguments)

    x = torch.randn(9, D, dtype=torch.bfloat16).requires_grad_()
    routing = random_routing(9, 4, 2, groups.world.rank)
    routing = dataclasses.replace(routing, probs_TK=routing.probs_TK.detach().float().requires_grad_())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_fp8_payload, "all_to_all", count)
        rows = dispatcher.dispatch(x, routing)
        (rows.rows_RD.square().sum() * 0.5 + rows.weights_R.sum()).backward()
    assert sent == [(torch.uint8, D + 3 + 4), (torch.uint8, 2 * D + 4)] and len(paused) == 2
    sent_TK = routing.destinations(4) < 4
    torch.testing.assert_close(routing.probs_TK.grad, sent_TK.float())
    torch.testing.assert_close(x.grad, (rounded(x.detach()).float() * sent_TK.sum(-1, keepdim=True)).bfloat16())
    with pytest.raises(ValueError, match="fp8=True sends rows in one step, and meanwhile runs between two"):
        dispatcher.dispatch(x, routing, lambda: None)


@pytest.mark.world(2, shared=True)
def test_half_the_bytes_cross_in_one_message_and_gradients_cross_whole(world: Any) -> None:
    world(check_messages)


def test_experts_read_rounded_tokens_and_the_router_and_the_shared_experts_do_not() -> None:
    shared = {"moe_shared_expert_intermediate_size": 4}
    fp8, plain = (
        filled_layer(MODEL, dataclasses.replace(mixture, **shared), ProcessGroups.single()).eval() for mixture in (MIXTURE, PLAIN)
    )
    x = torch.randn(7, D, dtype=F64)
    y, expected = (layer(x, Step.causal(1, 7))[0] for layer in (fp8, plain))
    routing, _ = plain.router(x, Step.causal(1, 7))
    picks = plain.dispatcher.dispatch(rounded(x), routing)
    routed = plain.dispatcher.combine(plain.experts(picks.rows_RD, picks.ends_N, picks.weights_R), picks, routing)
    torch.testing.assert_close(y, routed + plain.shared_experts(x, Step.causal(1, 7))[0], rtol=1e-12, atol=1e-12)
    assert not torch.equal(y, expected) and (y - expected).norm() < 0.1 * expected.norm()
