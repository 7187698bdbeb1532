# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The layer against a loop over tokens, alone and over ranks."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_moe import MoEConfig, MoELayer, SequentialMLP, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.comm import all_gather, all_reduce
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import RecomputeConfig, Step

MODEL = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=2, vocab_size=16, ffn_hidden_size=10)
BIASED = dataclasses.replace(MODEL, activation="gelu", add_bias_linear=True)
MIXTURE = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.1)


def weights(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(len(name))
    return torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5


def build(groups: ProcessGroups, model: TransformerConfig = MODEL, mixture: MoEConfig = MIXTURE) -> MoELayer:
    layer = MoELayer(mixture, Site(layer=0, local_layer=0, config=model, groups=groups), dtype=torch.float64)
    with torch.no_grad():
        for shard in named_shards(layer):
            shard.parameter.copy_(weights(shard.name, shard.spec.shape)[shard.spec.slices(groups)])
    return layer


def reference(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    logits = x @ router.t()
    rows = []
    for token, scores in zip(x, logits, strict=True):
        chosen = scores.topk(MIXTURE.moe_router_topk).indices
        probs = scores[chosen].softmax(0)
        row = torch.zeros_like(token)
        for expert, prob in zip(chosen.tolist(), probs, strict=True):
            row = row + prob * (down[expert] @ (F.silu(up[expert, 0] @ token) * (up[expert, 1] @ token)))
        rows.append(row)
    return torch.stack(rows)


def test_the_scaling_factor_multiplies_what_the_experts_add() -> None:
    x = torch.randn(9, 12, dtype=torch.float64)
    scaled = build(ProcessGroups.single(), mixture=dataclasses.replace(MIXTURE, moe_router_topk_scaling_factor=2.5))
    plain = build(ProcessGroups.single())
    torch.testing.assert_close(scaled(x, Step.causal(1, 9))[0], 2.5 * plain(x, Step.causal(1, 9))[0], rtol=1e-10, atol=1e-12)


def test_layer_equals_a_loop_over_tokens() -> None:
    layer = build(ProcessGroups.single())
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    y, aux = layer(x, Step.causal(1, 9))
    expected = reference(x, layer.router.weight, layer.experts.up, layer.experts.down)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    assert aux is not None and aux.total().item() > 0 and list(aux.losses) == [(0, "load_balancing_loss")]
    parameters = [x, *layer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(y.square().sum(), parameters), torch.autograd.grad(expected.square().sum(), parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "again",
    [
        None,
        RecomputeConfig(granularity="full"),
        RecomputeConfig(granularity="full", method="block", num_layers=1),
        RecomputeConfig(modules=("mlp",)),
        RecomputeConfig(modules=("norm", "attention")),
    ],
    ids=["none", "full", "block", "mlp", "norm"],
)
def test_every_pick_counts_once_however_often_its_forward_runs(again: RecomputeConfig | None) -> None:
    config = dataclasses.replace(MODEL, num_layers=3, init_method_std=0.5)
    model = GPTModel(config, ProcessGroups.single(), feed_forward=moe_feed_forward(MIXTURE), recompute=again, dtype=torch.float64)
    routed: list[Tensor] = []
    for layer in model.layers.values():
        layer.mlp.router.register_forward_hook(lambda module, inputs, result: routed.append(result[0].counts(4)))
    # Two micro-batches, whose backwards come after both forwards.
    losses, parts, expected = [], [], []
    for tokens in (torch.arange(9), torch.arange(7)):
        routed.clear()
        output, aux = model(tokens, Step.causal(1, len(tokens)))
        expected.append({layer: counts.tolist() for layer, counts in enumerate(routed)})
        parts.append(aux)
        losses.append(output.token_losses(tokens).sum() + aux.total())
    torch.stack(losses).sum().backward()
    assert [{layer: counts.tolist() for layer, counts in aux.counts.items()} for aux in parts] == expected
    assert [[sum(counts) for counts in rows.values()] for rows in expected] == [[9 * 2] * 3, [7 * 2] * 3]
    assert model.eval()(torch.arange(9), Step.causal(1, 9))[1] is None


def test_no_balance_loss_without_gradients_and_the_same_output() -> None:
    layer = build(ProcessGroups.single())
    x = torch.randn(5, 12, dtype=torch.float64)
    with_loss, _ = layer(x, Step.causal(1, 5))
    with torch.no_grad():
        without, aux = layer(x, Step.causal(1, 5))
    assert aux is None
    assert torch.equal(with_loss, without)


def test_an_expert_without_tokens_gets_zero_gradients() -> None:
    experts = SequentialMLP(3, 4, 6, ProcessGroups.single())
    for parameter in experts.parameters():
        torch.nn.init.ones_(parameter)
    experts(torch.randn(5, 4), torch.tensor([2, 2, 5], dtype=torch.int32)).sum().backward()
    assert experts.up.grad is not None and not experts.up.grad[1].any() and experts.up.grad[2].any()


def check_ranks(plan: ParallelPlan, tokens: int, model: TransformerConfig = MODEL) -> None:
    """Ranks with a share of the tokens each give what one rank gives on all of them."""
    groups = ProcessGroups.build(plan)
    layer, alone = build(groups, model), build(ProcessGroups.single(), model)
    # Tokens are distinct on every rank of the expert grid: tp shares them (sequence parallel), dp has its own.
    x = torch.randn(tokens * groups.world.size, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = x[groups.world.rank * tokens : (groups.world.rank + 1) * tokens].clone().requires_grad_()
    y, aux = layer(mine, Step.causal(1, tokens))
    whole, whole_aux = alone(x, Step.causal(1, len(x)))
    torch.testing.assert_close(all_gather(y.detach(), groups.world), whole.detach(), rtol=1e-10, atol=1e-12)
    if groups.tp_cp.size == groups.world.size:
        torch.testing.assert_close(all_reduce(aux.total().detach(), groups.world), whole_aux.total().detach(), rtol=1e-10, atol=1e-12)
        y, whole = y.square().sum() + aux.total(), whole.square().sum() + whole_aux.total()
    else:
        y, whole = y.square().sum(), whole.square().sum()
    y.backward()
    whole.backward()
    compare_gradients(layer, alone, groups)


def compare_gradients(layer: MoELayer, alone: MoELayer, groups: ProcessGroups) -> None:
    serial = {shard.name: shard.parameter.grad for shard in named_shards(alone)}
    for shard in named_shards(layer):
        grad = all_reduce(shard.parameter.grad, groups.data(shard.spec.view))
        for axis in shard.spec.partial:
            grad = all_reduce(grad, groups.axis(shard.spec.view, axis))
        torch.testing.assert_close(grad, serial[shard.name][shard.spec.slices(groups)], rtol=1e-10, atol=1e-12)


@pytest.mark.world(2, shared=True)
def test_two_ranks_equal_one_for_experts_over_tensor_ranks(world) -> None:
    world(check_ranks, plan=ParallelPlan(tp=2, ep=2), tokens=7)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp=4, ep=2),
        ParallelPlan(dp=4, ep=4),
        ParallelPlan(tp=2, dp=2, ep=4),
        ParallelPlan(cp=2, dp=2, ep=2),
        ParallelPlan(dp=4, ep=2, etp=2),
        ParallelPlan(tp=2, dp=2, ep=2, etp=2),
        ParallelPlan(tp=4, ep=2, etp=2),
        ParallelPlan(tp=2, dp=2, etp=2),
    ],
    ids=str,
)
def test_four_ranks_equal_one(world, plan: ParallelPlan) -> None:
    world(check_ranks, plan=plan, tokens=3)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, dp=2, ep=2, etp=2), ParallelPlan(dp=4, etp=2)], ids=str)
def test_biases_are_added_once_however_the_experts_are_cut(world, plan: ParallelPlan) -> None:
    world(check_ranks, plan=plan, tokens=3, model=BIASED)


def check_replicas(plan: ParallelPlan, tokens: int, model: TransformerConfig, exchange: str = "alltoall") -> None:
    """Tensor ranks that all hold the same tokens each give what one rank gives on them, and on one token, and on none."""
    groups = ProcessGroups.build(plan)
    mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type=exchange)
    layer, alone = build(groups, model, mixture), build(ProcessGroups.single(), model)
    x = torch.randn(tokens * groups.dp_cp.size, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mine = x[groups.dp_cp.rank * tokens : (groups.dp_cp.rank + 1) * tokens].clone().requires_grad_()
    y, aux = layer(mine, Step.causal(1, tokens))
    whole_x = x.clone().requires_grad_()
    whole, whole_aux = alone(whole_x, Step.causal(1, len(x)))
    torch.testing.assert_close(all_gather(y.detach(), groups.dp_cp), whole.detach(), rtol=1e-10, atol=1e-12)
    loss, whole_loss = y.square().sum(), whole.square().sum()
    if groups.dp_cp.size == 1:
        torch.testing.assert_close(all_reduce(aux.total().detach(), groups.tp), whole_aux.total().detach(), rtol=1e-10, atol=1e-12)
        # Each rank differentiates its part of the balance loss.
        loss, whole_loss = loss + aux.total(), whole_loss + whole_aux.total()
    loss.backward()
    whole_loss.backward()
    torch.testing.assert_close(all_gather(mine.grad, groups.dp_cp), whole_x.grad, rtol=1e-10, atol=1e-12)
    compare_gradients(layer, alone, groups)
    assert all_reduce(aux.counts[0], groups.world).tolist() == whole_aux.counts[0].tolist()
    with torch.no_grad():
        for count in (1, 0):
            torch.testing.assert_close(layer(x[:count], Step.causal(1, count))[0], whole.detach()[:count], rtol=1e-10, atol=1e-12)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    "plan",
    [ParallelPlan(tp=2, sequence_parallel=False, **cut) for cut in ({"ep": 2, "etp": 1}, {"ep": 1, "etp": 2}, {"ep": 1, "etp": 1})],
    ids=str,
)
def test_two_ranks_with_the_same_tokens_equal_one(world, plan: ParallelPlan) -> None:
    world(check_replicas, plan=plan, tokens=7, model=BIASED)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(tp=4, ep=2, etp=2, sequence_parallel=False),
        ParallelPlan(tp=4, ep=2, etp=1, sequence_parallel=False),
        ParallelPlan(tp=2, dp=2, ep=2, etp=1, sequence_parallel=False),
        ParallelPlan(tp=2, cp=2, ep=1, etp=1, sequence_parallel=False),
    ],
    ids=str,
)
def test_four_ranks_with_the_same_tokens_equal_one(world, plan: ParallelPlan) -> None:
    world(check_replicas, plan=plan, tokens=5, model=BIASED)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    ("plan", "exchange"),
    [
        (ParallelPlan(tp=2, dp=2, ep=4, etp=1, sequence_parallel=False), "alltoall"),
        (ParallelPlan(tp=2, dp=2, ep=2, etp=2, sequence_parallel=False), "alltoall"),
        (ParallelPlan(tp=2, cp=2, ep=4, etp=1, sequence_parallel=False), "allgather"),
    ],
    ids=str,
)
def test_ranks_with_the_same_tokens_share_them_where_experts_are_further_away(world, plan: ParallelPlan, exchange: str) -> None:
    world(check_replicas, plan=plan, tokens=5, model=BIASED, exchange=exchange)


def check_empty_rank(plan: ParallelPlan) -> None:
    """A rank without a single token still takes part."""
    groups = ProcessGroups.build(plan)
    layer = build(groups)
    x = torch.randn(4 if groups.dp.rank else 0, 12, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x, Step.causal(1, len(x)))
    assert y.shape == x.shape
    y.sum().backward()


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(dp=2, ep=2), ParallelPlan(dp=2, etp=2)], ids=["ep", "etp"])
def test_a_rank_without_tokens_takes_part(world, plan: ParallelPlan) -> None:
    world(check_empty_rank, plan=plan)


def check_slices(plan: ParallelPlan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    experts = build(ProcessGroups.build(plan)).experts
    return tuple(experts.up.shape), tuple(experts.down.shape)


@pytest.mark.world(2, shared=True)
def test_expert_tensor_ranks_hold_slices_of_every_expert(world) -> None:
    assert world(check_slices, plan=ParallelPlan(tp=2, etp=2)) == [((4, 2, 5, 12), (4, 12, 5))] * 2


def test_bad_layouts_are_named() -> None:
    from dataclasses import replace

    groups = ProcessGroups.single()
    from mcore_parallel import Group

    with pytest.raises(ValueError, match="ep=3 must divide num_moe_experts=4"):
        build(replace(groups, ep=Group((0, 1, 2), 0)))
    with pytest.raises(ValueError, match="etp=3 must divide the expert width 10"):
        build(replace(groups, expt_tp=Group((0, 1, 2), 0)))
