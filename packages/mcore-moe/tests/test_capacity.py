# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts with room for so many tokens: what they drop, what fills them up, and the layer against loops."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_moe import MoEConfig, MoELayer, Routing, apply_router_token_dropping, get_capacity, moe_feed_forward
from mcore_moe.dispatch import LocalTokenDispatcher
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineConfig, one_f_one_b
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step

E, K, D = 4, 2, 8
F64 = torch.float64
MODEL = TransformerConfig(num_layers=1, hidden_size=D, num_attention_heads=2, vocab_size=16, ffn_hidden_size=6)
MIXTURE = MoEConfig(num_moe_experts=E, moe_router_topk=K, moe_expert_capacity_factor=0.75)
VARIANTS = [
    {"moe_token_drop_policy": policy, "moe_pad_expert_input_to_capacity": pad}
    for policy, pad in itertools.product(("probs", "position"), (False, True))
]


def kept_by_hand(picks: list[tuple[float, int]], capacity: int, policy: str) -> set[int]:
    """Of the (weight, token) pairs of one expert the tokens it keeps."""
    order = sorted(picks, key=(lambda pick: (-pick[0], pick[1])) if policy == "probs" else (lambda pick: pick[1]))
    return {token for _, token in order[:capacity]}


def weights(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name)), dtype=F64) / shape[-1] ** 0.5


def build(groups: ProcessGroups, mixture: MoEConfig, model: TransformerConfig = MODEL) -> MoELayer:
    layer = MoELayer(mixture, Site(layer=0, local_layer=0, config=model, groups=groups), dtype=F64)
    with torch.no_grad():
        for shard in named_shards(layer):
            shard.parameter.copy_(weights(shard.name, shard.spec.shape)[shard.spec.slices(groups)])
    return layer


def loop(x: Tensor, parameters: dict[str, Tensor], mixture: MoEConfig, valid: list[bool] | None = None) -> Tensor:
    """Expert by expert and token by token: what the tokens of one rank become."""
    probs, chosen = (x @ parameters["router.weight"].t()).topk(K)
    probs = probs.softmax(-1)
    factor = mixture.moe_expert_capacity_factor
    capacity = len(x) if factor is None else min(get_capacity(len(x) * K, E, factor), len(x))
    rows = [torch.zeros(D, dtype=F64) for _ in x]
    for expert in range(E):
        picks = {token: probs[token, slot] for token, slot in (chosen == expert).nonzero().tolist() if valid is None or valid[token]}
        policy = mixture.moe_token_drop_policy
        for token in kept_by_hand([(weight.item(), token) for token, weight in picks.items()], capacity, policy):
            gate, value = parameters["experts.up"][expert] @ x[token]
            rows[token] = rows[token] + picks[token] * (parameters["experts.down"][expert] @ (F.silu(gate) * value))
    return torch.stack(rows) if rows else x * 0


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_the_dense_form_keeps_what_a_loop_keeps_and_fills_up_with_weight_0(policy: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for tokens, factor in itertools.product((1, 5, 16), (0.3, 1.0, 1.7, 50.0)):
        chosen = torch.rand(tokens, E, generator=generator).argsort(-1)[:, :K]
        routed = torch.zeros(tokens, E, dtype=torch.bool).scatter(1, chosen, True)
        # Few distinct weights, so that ties are common.
        probs = (torch.randint(1, 4, (tokens, E), generator=generator).double() / 4 * routed).requires_grad_()
        capacity = min(get_capacity(tokens * K, E, factor), tokens)
        kept = torch.zeros_like(routed)
        for expert in range(E):
            picks = [(probs[token, expert].item(), token) for token in routed[:, expert].nonzero().flatten().tolist()]
            kept[list(kept_by_hand(picks, capacity, policy)), expert] = True
        for pad in (False, True):
            left, left_map = apply_router_token_dropping(probs, routed, K, factor, policy, pad)
            assert torch.equal(left, torch.where(kept, probs, 0))
            (grad,) = torch.autograd.grad(left.sum(), probs)
            assert torch.equal(grad, kept.double())
            if pad:
                assert (left_map.sum(0) == capacity).all() and left_map[kept].all()
                assert not left_map[routed & ~kept].any(), "a dropped token does not come back to fill"
            else:
                assert torch.equal(left_map, kept)
    empty = torch.zeros(0, E)
    assert [part.shape for part in apply_router_token_dropping(empty, empty.bool(), K, 1.0, policy, True)] == [(0, E)] * 2
    with pytest.raises(ValueError, match="drop_policy='last' must be probs or position"):
        apply_router_token_dropping(empty, empty.bool(), K, 1.0, "last")


def test_fillers_of_the_experts_are_spread_over_the_tokens() -> None:
    routed = torch.zeros(8, E, dtype=torch.bool)
    routed[:2, 0] = True
    _, filled = apply_router_token_dropping(routed.double(), routed, 1, 1.0, "probs", True)
    assert [column.nonzero().flatten().tolist() for column in filled.t()] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_layer_says_whether_it_drops_tokens() -> None:
    groups = ProcessGroups.single()
    assert build(groups, MIXTURE).drops_tokens
    assert not build(groups, MoEConfig(num_moe_experts=E, moe_router_topk=K)).drops_tokens


def test_capacities() -> None:
    assert [get_capacity(32, 8, factor) for factor in (0.1, 1.0, 1.25, 1.3)] == [1, 4, 5, 6]
    assert get_capacity(32, 8, 1.0, min_capacity=6) == 6 and get_capacity(0, 8, 1.0) == 0


@pytest.mark.parametrize("variant", VARIANTS, ids=["probs", "probs-padded", "position", "position-padded"])
@pytest.mark.parametrize("factor", [0.3, 0.75, 9.0])
@pytest.mark.parametrize("masked", [False, True])
def test_the_layer_equals_the_loop(variant: dict[str, Any], factor: float, masked: bool) -> None:
    mixture = dataclasses.replace(MIXTURE, moe_expert_capacity_factor=factor, **variant)
    layer = build(ProcessGroups.single(), mixture)
    x = torch.randn(11, D, dtype=F64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    valid = [token % 4 != 1 for token in range(11)] if masked else None
    step = Step.causal(1, 11)
    y, _ = layer(x, dataclasses.replace(step, valid=torch.tensor(valid)) if masked else step)
    leaves = {"x": x, **dict(layer.named_parameters())}
    expected = loop(x, leaves, mixture, valid)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    grads = (torch.autograd.grad(result.square().sum(), list(leaves.values())) for result in (y, expected))
    for name, ours, theirs in zip(leaves, *grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=name)


def test_losses_counts_and_the_bias_know_nothing_of_the_drop() -> None:
    many: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.1, 0.2, 0.3),
        "moe_z_loss_coeff": 0.4,
    }
    x = torch.randn(12, D, dtype=F64)
    record: list[Tensor] = []
    step = dataclasses.replace(Step.causal(2, 6), routing_recorder=lambda layer, experts, probs: record.append(experts))
    whole = build(ProcessGroups.single(), MoEConfig(num_moe_experts=E, moe_router_topk=K, **many))(x, step)
    cut = build(ProcessGroups.single(), dataclasses.replace(MIXTURE, moe_expert_capacity_factor=0.3, **many))(x, step)
    assert not torch.equal(whole[0], cut[0]) and torch.equal(*record)
    assert torch.equal(whole[1].counts[0], cut[1].counts[0]) and whole[1].counts[0].sum() == 12 * K
    assert len(whole[1].losses) == 4
    assert set(cut[1].losses) - set(whole[1].losses) == {(0, "drop_rate")}
    assert all(torch.equal(loss.value, cut[1].losses[key].value) for key, loss in whole[1].losses.items())


@pytest.mark.parametrize("pad", [False, True])
def test_the_bias_moves_by_the_loads_before_the_drop(pad: bool) -> None:
    """With the even share as capacity every expert keeps, or is filled up to, equally many rows; the bias sees what was chosen."""
    many: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.125,
        "moe_router_load_balancing_type": "none",
    }
    whole = build(ProcessGroups.single(), MoEConfig(num_moe_experts=E, moe_router_topk=K, **many))
    even = dataclasses.replace(MIXTURE, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=pad, **many)
    cut = build(ProcessGroups.single(), even)
    generator, no = torch.Generator().manual_seed(1), torch.tensor(False)
    for _ in range(3):
        x = torch.randn(12, D, dtype=F64, generator=generator) + 0.5
        counts, before = [], cut.router.expert_bias.clone()
        for layer in (whole, cut):
            _, aux = layer(x, Step.causal(2, 6))
            layer.end_of_batch(aux.counts[0], no)
            counts.append(aux.counts[0])
        assert counts[0].unique().numel() > 1 and counts[0].sum() == 12 * K and torch.equal(*counts)
        assert torch.equal(whole.router.expert_bias, cut.router.expert_bias) and not torch.equal(cut.router.expert_bias, before)


@pytest.mark.parametrize("pad", [False, True])
def test_the_share_of_dropped_picks_is_reported_and_costs_nothing(pad: bool) -> None:
    mixture = dataclasses.replace(MIXTURE, moe_expert_capacity_factor=0.3, moe_pad_expert_input_to_capacity=pad)
    x, valid = torch.randn(12, D, dtype=F64, generator=torch.Generator().manual_seed(5)), torch.arange(12) % 3 != 0
    _, aux = build(ProcessGroups.single(), mixture)(x, dataclasses.replace(Step.causal(2, 6), valid=valid))
    # Padding counts for the capacity, which is one of the tokens' number, and not for the rate.
    kept = aux.counts[0].clamp(max=get_capacity(12 * K, E, 0.3)).sum().item()
    rate = aux.losses[0, "drop_rate"]
    assert rate.value.item() == pytest.approx(1 - kept / (8 * K)) and 0 < rate.value < 1
    assert aux.total() is None and not rate.value.requires_grad
    assert list(build(ProcessGroups.single(), mixture).eval()(x, Step.causal(2, 6))[1:]) == [None]


def train_dropping(plan: ParallelPlan) -> list[float]:
    groups = ProcessGroups.build(plan) if plan.world_size > 1 else ProcessGroups.single()
    model = dataclasses.replace(MODEL, num_layers=2, init_method_std=0.5)
    mixture = dataclasses.replace(MIXTURE, moe_expert_capacity_factor=0.5)
    layout = PipelineConfig().place(2, num_stages=groups.pp.size, num_chunks=1)
    parts = layout.of_rank(groups.pp.rank)
    chunks = ModelChunks([GPTModel(model, groups, layers=part, feed_forward=moe_feed_forward(mixture), dtype=F64) for part in parts])
    sync = DistributedDataParallel(DistributedDataParallelConfig(), chunks, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01), sync, groups)
    tokens = torch.randint(0, 16, (2, 2, 7), generator=torch.Generator().manual_seed(0))
    batches = [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 6)) for row in tokens]
    pipeline: dict[str, Any] = {"pipeline": one_f_one_b} if groups.pp.size > 1 else {}
    report = train_step(chunks, batches, CrossEntropyObjective(), sync, optimizer, lr=0.01, **pipeline)
    values = report.layers.values()
    return [report.loss, report.aux, report.grad_norm, values["aux/drop_rate"], values["aux/drop_rate/layer_1"]]


@pytest.mark.world(2, shared=True)
def test_pipeline_stages_report_it_without_a_loss(world) -> None:
    alone, (one, other) = train_dropping(ParallelPlan()), world(train_dropping, plan=ParallelPlan(pp=2))
    assert one == other == pytest.approx(alone) and alone[1] == 0 and 0 < alone[3] < 1


def test_padded_rows_have_the_same_shape_whatever_the_routing_and_read_nothing_back() -> None:
    dispatcher = LocalTokenDispatcher(E)
    for device in ("cpu", "meta"):
        # On the meta device there is nothing to read.
        experts = torch.zeros(5, K, dtype=torch.int64, device=device)
        routing = Routing(experts, torch.ones(5, K, device=device), kept_TK=torch.zeros(5, K, dtype=torch.bool, device=device), capacity=3)
        picks = dispatcher.dispatch(torch.ones(5, D, device=device), routing)
        assert picks.rows_RD.shape == (E * 3, D) and picks.ends_N.shape == (E,)
        assert dispatcher.combine(picks.rows_RD, picks, routing).shape == (5, D)
        if device == "cpu":
            assert not picks.rows_RD.any() and not picks.weights_R.any() and picks.ends_N.tolist() == [3, 6, 9, 12]


def check_ranks(plan: ParallelPlan, variant: dict[str, Any], tokens: int) -> None:
    """Each rank's tokens fill the experts as a loop over them says; ranks of one tp group without sequence parallelism share theirs."""
    mixture = dataclasses.replace(MIXTURE, **variant)
    groups = ProcessGroups.build(plan)
    layer = build(groups, mixture)
    source = groups.world if groups.sequence_parallel else groups.dp_cp
    x = torch.randn(source.size, tokens, D, generator=torch.Generator().manual_seed(1), dtype=F64)
    mine, whole = x[source.rank].clone().requires_grad_(), x.clone().requires_grad_()
    alone = dict(build(ProcessGroups.single(), mixture).named_parameters())
    y, _ = layer(mine, Step.causal(1, tokens))
    expected = torch.stack([loop(part, alone, mixture) for part in whole])
    torch.testing.assert_close(y, expected[source.rank], rtol=1e-10, atol=1e-12)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(mine.grad, whole.grad[source.rank], rtol=1e-10, atol=1e-12)
    for shard in named_shards(layer):
        grad = all_reduce(shard.parameter.grad, groups.data(shard.spec.view))
        for axis in shard.spec.partial:
            grad = all_reduce(grad, groups.axis(shard.spec.view, axis))
        # Without tokens the loop touches no weight.
        wanted = torch.zeros_like(alone[shard.name]) if alone[shard.name].grad is None else alone[shard.name].grad
        torch.testing.assert_close(grad, wanted[shard.spec.slices(groups)], rtol=1e-10, atol=1e-12, msg=shard.name)


def check_variants(plan: ParallelPlan) -> None:
    # Every pair of variant, number of tokens and exchange.
    for number, (variant, tokens) in enumerate(itertools.product(VARIANTS, (7, 1, 0))):
        check_ranks(plan, {**variant, "moe_token_dispatcher_type": ("alltoall", "allgather")[number % 2]}, tokens)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=2, ep=2),
        ParallelPlan(dp=2, etp=2),
        ParallelPlan(tp=2, ep=2, etp=1, sequence_parallel=False),
        ParallelPlan(tp=2, ep=1, etp=1, sequence_parallel=False),
    ],
    ids=["ep", "etp", "replicated-ep", "replicated"],
)
def test_two_ranks_equal_the_loop(world, plan: ParallelPlan) -> None:
    world(check_variants, plan=plan)


@pytest.mark.world(4)
def test_four_ranks_equal_the_loop(world) -> None:
    world(check_variants, plan=ParallelPlan(tp=2, dp=2, ep=2, etp=2))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_expert_capacity_factor": 0.0}, "moe_expert_capacity_factor=0.0 must be above 0 and finite"),
        ({"moe_expert_capacity_factor": float("inf")}, "moe_expert_capacity_factor=inf must be above 0 and finite"),
        ({"moe_token_drop_policy": "last"}, "moe_token_drop_policy='last' must be probs or position"),
        ({"moe_pad_expert_input_to_capacity": True}, "moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor"),
        (
            {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": -1.0},
            "moe_pad_expert_input_to_capacity=True needs moe_expert_capacity_factor",
        ),
        (
            {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "sinkhorn"},
            "moe_expert_capacity_factor=1.0 does not go with moe_router_load_balancing_type='sinkhorn'",
        ),
    ],
)
def test_rules_name_both_fields(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(num_moe_experts=8, **values)


def test_a_negative_factor_is_no_bound() -> None:
    assert MoEConfig(num_moe_experts=8, moe_expert_capacity_factor=-1.0) == MoEConfig(num_moe_experts=8)


def check_unequal_tokens(exchange: str) -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=64)
    mixture = MoEConfig(
        num_moe_experts=4, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True, moe_token_dispatcher_type=exchange
    )
    layer = MoELayer(mixture, Site(layer=0, local_layer=0, config=config, groups=groups))
    torch.nn.init.normal_(layer.router.weight)
    tokens = 8 if groups.dp.rank == 0 else 12
    with pytest.raises(ValueError, match=r"rank 1 has (capacity=6|tokens=12), rank 0 has (4|8):.*make their batches equal"):
        layer(torch.randn(tokens, 8), Step.causal(1, tokens))


@pytest.mark.world(2)
@pytest.mark.parametrize("exchange", ["alltoall", "allgather"])
def test_ranks_that_pad_unequal_numbers_of_tokens_are_named(world, exchange) -> None:
    world(check_unequal_tokens, exchange=exchange)
