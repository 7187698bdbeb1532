# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Any number of tokens, experts and picks: the layer and every exchange against loops over the experts."""

import dataclasses
import unittest.mock
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_moe import (
    GroupedMLP,
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEConfig,
    MoELayer,
    Routing,
    SequentialMLP,
    moe_feed_forward,
    topk_routing_with_score_function,
)
from mcore_moe._capacity import expert_capacity, limit_to_capacity
from mcore_moe.dispatch import LocalTokenDispatcher
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.backends import AlignedRows
from mcore_parallel.comm import all_gather
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.training import Batch, CrossEntropyObjective

F64 = torch.float64
ALONE = ProcessGroups.single()


def loop(x: Tensor, routing: Routing, up: Tensor, down: Tensor) -> Tensor:
    """Every pick that goes somewhere, expert by expert."""
    goes = routing.destinations(len(up))
    y = torch.zeros_like(x)
    for expert in range(len(up)):
        token, slot = (goes == expert).nonzero().unbind(1)
        gate, value = (x[token] @ half.t() for half in up[expert])
        rows = (torch.nn.functional.silu(gate) * value) @ down[expert].t()
        y = y.index_add(0, token, rows * routing.probs_TK[token, slot, None])
    return y


def draw_routing(tokens: int, experts: int, topk: int, seed: int, *, masked: bool, dropped: bool, busy: int | None = None) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(tokens, experts, generator=generator)
    if busy is not None:
        keys[:, busy] += 2
    chosen, probs = keys.argsort(-1, descending=True)[:, :topk], torch.rand(tokens, topk, generator=generator, dtype=F64)
    valid = torch.rand(tokens, generator=generator) < 0.7 if masked else None
    kept = torch.rand(tokens, topk, generator=generator) < 0.7 if dropped else None
    return Routing(chosen, probs.requires_grad_(), valid, kept)


def compare(dispatcher: Any, experts: GroupedMLP | SequentialMLP, x: Tensor, routing: Routing, multiple: int = 1) -> None:
    """``multiple`` of rows of each expert, with zeros, as GEMMs in few bits have them."""
    leaves = [x.requires_grad_(), routing.probs_TK, experts.up, experts.down]
    sent = dispatcher.dispatch(x, routing)
    aligned = AlignedRows.of(sent.rows_RD, sent.ends_N, sent.weights_R, multiple)
    assert not (aligned.ends_N % multiple).any()
    rows = aligned.take(experts(aligned.rows_SD, aligned.ends_N, aligned.weights_S))
    ours = dispatcher.combine(rows, sent, routing)
    theirs = loop(x, routing, experts.up, experts.down)
    weigh = torch.arange(ours.numel(), dtype=F64).view_as(ours) / 5
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    # A loop without a pick touches no weight.
    grads = torch.autograd.grad((ours * weigh).sum(), leaves), torch.autograd.grad((theirs * weigh).sum(), leaves)
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-11)


def draw_sizes(data: st.DataObject) -> tuple[int, int, int]:
    """Experts, those of a token, and tokens."""
    experts = data.draw(st.integers(1, 9), label="experts")
    return experts, data.draw(st.integers(1, experts), label="topk"), data.draw(st.integers(0, 12), label="tokens")


@pytest.mark.journey
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_sizes_with_empty_experts_equal_the_loop(data: st.DataObject) -> None:
    experts, topk, tokens = draw_sizes(data)
    masked, dropped, grouped = (data.draw(st.booleans(), label=name) for name in ("masked", "dropped", "grouped"))
    torch.manual_seed(data.draw(st.integers(0, 99), label="seed"))
    stack = (GroupedMLP if grouped else SequentialMLP)(experts, 5, 3, ALONE, dtype=F64)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter)
    routing = draw_routing(tokens, experts, topk, experts, masked=masked, dropped=dropped)
    for dispatcher in dispatchers_of(experts):
        compare(dispatcher, stack, torch.randn(tokens, 5, dtype=F64), routing)


def dispatchers_of(experts: int) -> tuple[Any, ...]:
    """Of one rank."""
    return LocalTokenDispatcher(experts), MoEAlltoAllTokenDispatcher(experts, ALONE.ep), MoEAllGatherTokenDispatcher(experts, ALONE)


@pytest.mark.journey
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_capacity_and_rows_of_zeros_equal_the_loop(data: st.DataObject) -> None:
    experts, topk, tokens = draw_sizes(data)
    factor = data.draw(st.sampled_from([0.05, 0.5, 1.0, 20.0]), label="factor")
    policy = data.draw(st.sampled_from(["probs", "position"]), label="policy")
    busy = data.draw(st.none() | st.integers(0, experts - 1), label="busy")
    masked, pad = (data.draw(st.booleans(), label=name) for name in ("masked", "pad"))
    multiple = data.draw(st.sampled_from([1, 4, 16]), label="multiple")
    stack = GroupedMLP(experts, 5, 3, ALONE, dtype=F64)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(tokens))
    routing = draw_routing(tokens, experts, topk, experts, masked=masked, dropped=False, busy=busy)
    capacity = expert_capacity(tokens, topk, experts, factor)
    capped = limit_to_capacity(routing, experts, capacity, policy, pad=pad)
    counts = torch.bincount(capped.destinations(experts).flatten(), minlength=experts + 1)[:experts]
    # As many as there is room for.
    assert counts.tolist() == routing.counts(experts).clamp(max=capacity).tolist()
    for dispatcher in dispatchers_of(experts):
        compare(dispatcher, stack, torch.randn(tokens, 5, dtype=F64), capped, multiple)


@settings(max_examples=80, deadline=None)
@given(
    experts=st.sampled_from([2, 4, 6, 12]),
    tokens=st.integers(0, 20),
    score_function=st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
    scale=st.sampled_from([0.0, 1.0, 100.0]),
    data=st.data(),
)
def test_each_token_has_distinct_experts_in_its_groups(
    experts: int, tokens: int, score_function: str, scale: float, data: st.DataObject
) -> None:
    groups = data.draw(st.sampled_from([number for number in (1, 2, 3) if experts % number == 0]))
    group_topk = data.draw(st.integers(1, groups))
    topk = group_topk * data.draw(st.integers(1, experts // groups))
    logits = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(tokens), dtype=F64) * scale
    probs, chosen = topk_routing_with_score_function(logits, topk, False, groups, group_topk, 2.0, score_function)
    assert chosen.sum(-1).tolist() == [topk] * tokens and not probs[~chosen].any()
    assert probs.isfinite().all() and bool((probs >= 0).all())
    touched = chosen.unflatten(-1, (groups, -1)).any(-1).sum(-1)
    assert bool((touched <= group_topk).all())
    # Scores that underflow are no longer divided by their sum alone.
    if score_function == "softmax" or (topk > 1 and scale < 100):
        torch.testing.assert_close(probs.sum(-1), torch.full((tokens,), 2.0, dtype=F64))


def check_random_loads(plan: ParallelPlan, kind: str, seeds: int) -> None:
    """Random numbers of tokens a rank, loads from even to one expert for all: results of a loop, and the same bits twice."""
    groups, experts = ProcessGroups.build(plan), 6
    dispatcher: Any = (
        MoEAllGatherTokenDispatcher(experts, groups)
        if kind == "allgather"
        else MoEAlltoAllTokenDispatcher(experts, groups.ep, groups.expt_tp)
    )
    stack, whole = (GroupedMLP(experts, 4, 4, those, dtype=F64) for those in (groups, ALONE))
    with torch.no_grad():
        for mine, every in zip(named_shards(stack), named_shards(whole), strict=True):
            every.parameter.copy_(torch.randn(every.spec.shape, generator=torch.Generator().manual_seed(7), dtype=F64))
            mine.parameter.copy_(every.parameter[mine.spec.slices(groups)])
    for seed in range(seeds):
        draw = torch.Generator().manual_seed(seed)
        tokens = int(torch.randint(0, 9, (groups.world.size,), generator=draw)[groups.world.rank])
        busy = seed % experts if seed % 3 == 0 else None
        routing = draw_routing(
            tokens, experts, 1 + seed % 3, 100 * seed + groups.world.rank, masked=bool(seed % 2), dropped=seed % 4 == 0, busy=busy
        )
        x = torch.randn(tokens, 4, dtype=F64, generator=draw).requires_grad_()
        results = []
        for _ in range(2):
            sent = dispatcher.dispatch(x, routing)
            y = dispatcher.combine(stack(sent.rows_RD, sent.ends_N, sent.weights_R), sent, routing)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, routing.probs_TK, *stack.parameters()])])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        expected = loop(x, routing, whole.up, whole.down)
        torch.testing.assert_close(results[0][0], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            results[0][1:3], list(torch.autograd.grad(expected.square().sum(), [x, routing.probs_TK])), rtol=1e-9, atol=1e-11
        )


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
@pytest.mark.parametrize("plan", [ParallelPlan(dp=2, ep=2), ParallelPlan(dp=2, etp=2)], ids=["ep2", "etp2"])
@pytest.mark.parametrize("seeds", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_random_loads_over_two_ranks(world, plan: ParallelPlan, kind: str, seeds: int) -> None:
    world(check_random_loads, plan=plan, kind=kind, seeds=seeds)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_random_loads_over_four_ranks(world, kind: str) -> None:
    world(check_random_loads, plan=ParallelPlan(dp=4, ep=2, etp=2), kind=kind, seeds=12)


_WAITS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select", "unique", "is_nonzero", "item")


class Waits(TorchDispatchMode):
    """Operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(f"aten.{wait}" in name for wait in _WAITS) or (
            name.startswith("aten.repeat_interleave") and "output_size" not in (kwargs or {})
        ):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def check_waits(padded: bool) -> None:
    """An exchange reads its sizes once, and with padding to capacity nothing at all behind the first call; its backward reads nothing."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    dispatcher = MoEAlltoAllTokenDispatcher(6, groups.ep)
    routing = draw_routing(5, 6, 2, groups.world.rank, masked=True, dropped=True)
    routing = dataclasses.replace(routing, capacity=5) if padded else routing
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)
    for first in (True, False):
        reads, read = [], Tensor.tolist

        def counted(values: Tensor, reads: list[int] = reads, read: Any = read) -> Any:
            reads.append(values.numel())
            return read(values)

        with unittest.mock.patch.object(Tensor, "tolist", counted), Waits() as waits:
            sent = dispatcher.dispatch(x, routing)
            dispatcher.combine(sent.rows_RD * sent.weights_R.unsqueeze(-1), sent, routing).sum().backward()
        # The first padded call compares the sizes of the ranks.
        assert len(reads) == (1 if not padded or first else 0) and waits.names == []


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("padded", [False, True])
def test_an_exchange_reads_its_sizes_once(world, padded: bool) -> None:
    world(check_waits, padded=padded)


# Experts, picks and choices of published families, with tiny widths.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixtral": ({"num_moe_experts": 8, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2}, {}),
    "qwen3": ({"num_moe_experts": 128, "moe_router_topk": 8,
              "moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1e-3}, {}),
    "deepseek-v2": (
        {
            "num_moe_experts": 160, "moe_router_topk": 6, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 16.0,
            "moe_router_num_groups": 8, "moe_router_group_topk": 3, "moe_shared_expert_intermediate_size": 8,
            "moe_router_load_balancing_type": ("seq_aux_loss", "device_aux_loss", "comm_aux_loss"),
            "moe_aux_loss_coeff": (3e-3, 0.05, 0.02),
        },
        {},
    ),
    "deepseek-v3": (
        {
            "num_moe_experts": 256, "moe_router_topk": 8, "moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5,
            "moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4, "moe_shared_expert_intermediate_size": 4,
            "moe_layer_freq": (0, 1),
        },
        {"mtp_num_layers": 1},
    ),
    "gpt-oss": (
        {"num_moe_experts": 32, "moe_router_topk": 4, "moe_router_bias": True},
        {"activation": "quick_geglu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0, "add_bias_linear": True},
    ),
    "nemotron-h": (
        {
            "num_moe_experts": 16, "moe_router_topk": 4, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "none", "moe_shared_expert_intermediate_size": 8, "moe_latent_size": 4,
        },
        {"activation": "squared_relu"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_learn_and_recompute_the_same_bits(family: str) -> None:
    choices, model_choices = FAMILIES[family]
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=4, init_method_std=0.3, **model_choices
    )
    tokens = torch.randint(16, (2, 7), generator=torch.Generator().manual_seed(0))
    batch, results = Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(2, 6)), []
    for recompute in (None, RecomputeConfig(granularity="full")):
        torch.manual_seed(0)
        experts = moe_feed_forward(MoEConfig(moe_input_jitter_eps=0.01, **choices))
        model = GPTModel(config, ALONE, feed_forward=experts, dtype=F64, recompute=recompute)
        torch.manual_seed(1)
        output, aux = model(batch.tokens.flatten(), batch.step())
        assert aux is not None
        # Each loss and load is that of the layer it came from, the depth of multi-token prediction being the one behind the last.
        layers = [1, 2] if config.mtp_num_layers else [0, 1]
        assert sorted(aux.counts) == layers and {int(counts.sum()) for counts in aux.counts.values()} == {12 * choices["moe_router_topk"]}
        assert sorted({layer for layer, _ in aux.losses}) == (layers if aux.losses else [])
        loss = CrossEntropyObjective(mtp_loss_scaling_factor=0.1)(output, batch).sum
        loss = loss if aux.total() is None else loss + aux.total()
        results.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        routers = [grad for (name, _), grad in zip(model.named_parameters(), results[-1], strict=True) if name.endswith("router.weight")]
        assert routers and all(grad is not None and bool(grad.any()) for grad in routers)
    for one, two in zip(*results, strict=True):
        assert (one is None) == (two is None) and (one is None or torch.equal(one, two))


def check_replay(plan: ParallelPlan) -> None:
    """What one rank recorded is replayed by ranks that hold half of the experts, with the tokens in another order."""
    groups = ProcessGroups.build(plan)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=6)
    layers = [
        MoELayer(MoEConfig(num_moe_experts=6), Site(layer=0, local_layer=0, config=config, groups=those), dtype=F64)
        for those in (ALONE, groups)
    ]
    with torch.no_grad():
        for every, mine in zip(*(named_shards(layer) for layer in layers), strict=True):
            every.parameter.copy_(torch.randn(every.spec.shape, generator=torch.Generator().manual_seed(3), dtype=F64))
            mine.parameter.copy_(every.parameter[mine.spec.slices(groups)])
        # The choice itself would now be another one.
        layers[1].router.weight.neg_()
    x, record = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), dtype=F64), dict[int, tuple[Tensor, Tensor]]()
    recorder = dataclasses.replace(Step.causal(1, 8), routing_recorder=lambda layer, *tensors: record.update({layer: tensors}))
    expected, _ = layers[0](x, recorder)
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    mine = order.chunk(groups.world.size)[groups.world.rank]
    experts, weights = (part[mine].unsqueeze(1) for part in record[0])
    y, _ = layers[1](x[mine], dataclasses.replace(Step.causal(1, 4), routed_experts=experts.to(torch.int16), routed_weights=weights))
    torch.testing.assert_close(all_gather(y.detach(), groups.world), expected.detach()[order], rtol=1e-11, atol=1e-12)


@pytest.mark.world(2, shared=True)
def test_recorded_routing_is_replayed_by_other_layouts_and_orders(world) -> None:
    world(check_replay, plan=ParallelPlan(dp=2, ep=2))
