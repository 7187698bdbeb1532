# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Dispatch by stores in the memory of other ranks: its arithmetic, the exchange over gloo ranks that share memory, and its kernels."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_moe import GroupedMLP, MoEAlltoAllTokenDispatcher, MoEConfig, MoEFlexTokenDispatcher, MoELayer, Routing, SequentialMLP
from mcore_moe.dispatch import SymmetricExchange, _peer_slots, _places, _symmetric, choose_exchange
from mcore_moe.dispatch._peer_slots import Slot, SlotLayout
from mcore_moe.dispatch._places import place_rows
from mcore_parallel import Group, ParallelPlan, ProcessGroups, graphs
from mcore_parallel.comm import SymmetricBuffer
from mcore_parallel.models import Site, TransformerConfig
from mcore_parallel.nn import Step
from tests.support.interpreter import run_interpreted
from tests.support.mixtures import pass_through, random_picks, random_routing
from tests.support.peer_memory import MappedMemory

D, E, K = 8, 8, 3
F64 = torch.float64


class Ranks:
    """All ranks of an exchange in one process; ``kernels`` moves by kernels."""

    def __init__(
        self, sizes: list[int], width: int, topk: int, local: int, *, kernels: bool, device: str = "cpu", dtype: Any = None
    ) -> None:
        dtype = dtype or (torch.float32 if kernels else F64)
        wide = torch.promote_types(dtype, torch.float32)
        self.sizes, self.local, self.kernels = sizes, local, kernels
        self.layout = SlotLayout(len(sizes), max(1, *sizes), width, topk, local, dtype, wide)
        self.begin = self.layout.num_bytes
        self.memory = [torch.full((2 * self.layout.num_bytes,), 255, dtype=torch.uint8, device=device) for _ in sizes]
        self.addresses = torch.tensor([memory.data_ptr() for memory in self.memory], device=device)

    @property
    def slots(self) -> list[Slot]:
        return [self.layout.slot(memory, self.begin) for memory in self.memory]

    def push(self, name: str, rank: int, *values: Any) -> None:
        if self.kernels:
            from mcore_moe.dispatch import _triton_symmetric

            getattr(_triton_symmetric, name)(self.layout, self.addresses, self.begin, rank, *values)
        else:
            getattr(_peer_slots, name)(self.layout, self.slots, rank, *values)

    def moves(self) -> Any:
        if not self.kernels:
            return _peer_slots
        from mcore_moe.dispatch import _triton_symmetric

        return _triton_symmetric

    def places(self) -> Any:
        if not self.kernels:
            return _places
        from mcore_moe.dispatch import _triton

        return _triton

    def round_trip(
        self, x: list[Tensor], experts: list[Tensor], weights: list[Tensor], scale: Callable[[Tensor, int], Tensor]
    ) -> list[Any]:
        """Sums of ``scale(row, expert) * weight``, and what came back of the weights, of each rank; every part of both directions."""
        for rank, values in enumerate(zip(x, experts, weights, strict=True)):
            self.push("push_tokens", rank, *values)
        plans, computed = [], []
        for rank, slot in enumerate(self.slots):
            places, ends = self.places().place_rows(slot.experts_AK, rank * self.local, self.local)
            assert all(map(torch.equal, (places.cpu(), ends.cpu()), place_rows(slot.experts_AK.cpu(), rank * self.local, self.local)))
            rows, row_weights = self.places().spread_rows(slot.x_AD, slot.weights_AK, places, self.layout.most_rows, padded=False)
            begins = [0, *ends.tolist()]
            parts = [
                scale(rows[first:last], rank * self.local + number) * row_weights[first:last, None].to(rows.dtype)
                for number, (first, last) in enumerate(itertools.pairwise(begins))
            ]
            plans.append((places, row_weights))
            computed.append(torch.cat([*parts, rows[begins[-1] :]]))
        for memory in self.memory:
            memory.fill_(255)
        for rank, (rows, (places, row_weights)) in enumerate(zip(computed, plans, strict=True)):
            self.push("push_sums", rank, rows, places, row_weights)
        back = [self.moves().add_sums(self.layout, slot, mine, weighted=True) for slot, mine in zip(self.slots, experts, strict=True)]
        for memory in self.memory:
            memory.fill_(255)
        # The way of gradients: the routing is not sent again.
        for rank, (values, mine) in enumerate(zip(x, experts, strict=True)):
            self.push("push_tokens", rank, values, mine, None)
        again = [
            self.places().spread_rows(slot.x_AD, None, places, self.layout.most_rows, padded=False)[0]
            for slot, (places, _) in zip(self.slots, plans, strict=True)
        ]
        return [(*pair, places, rows) for pair, (places, _), rows in zip(back, plans, again, strict=True)]


def check_round_trip(
    sizes: list[int], width: int, topk: int, local: int, seed: int, *, kernels: bool, device: str = "cpu", dtype: Any = None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks = Ranks(sizes, width, topk, local, kernels=kernels, device=device, dtype=dtype)
    layout = ranks.layout
    tolerance = {F64: 1e-12, torch.float32: 1e-5}.get(layout.dtype, 3e-2)
    x = [torch.randn(size, width, generator=generator).to(device, layout.dtype) for size in sizes]
    experts = [random_picks(size, local * len(sizes), topk, generator, skewed=seed % 2 == 1).to(device) for size in sizes]
    weights = [torch.rand(size, topk, generator=generator).to(device, layout.weights_dtype) for size in sizes]
    for rank, (y, back, _, _) in enumerate(ranks.round_trip(x, experts, weights, lambda rows, expert: rows * (expert + 1))):
        factors = torch.where(experts[rank] >= 0, (experts[rank] + 1) * weights[rank], 0).sum(1, keepdim=True)
        expected = x[rank].double() * factors.double()
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * 10)
        torch.testing.assert_close(back, torch.where(experts[rank] >= 0, weights[rank], 0))
    for _, _, places, rows in ranks.round_trip(x, experts, weights, lambda rows, expert: rows):
        everything = torch.zeros(layout.places, width, dtype=layout.dtype, device=device)
        for rank, size in enumerate(sizes):
            everything[rank * layout.room : rank * layout.room + size] = x[rank]
        place, pick = (places >= 0).nonzero(as_tuple=True)
        assert torch.equal(rows[places[place, pick].long()], everything[place])


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4), width=st.integers(1, 9), topk=st.integers(1, 4), local=st.integers(1, 4),
    seed=st.integers(0, 999),
)  # fmt: skip
def test_every_token_comes_to_its_experts_and_back(sizes: list[int], width: int, topk: int, local: int, seed: int) -> None:
    check_round_trip(sizes, width, min(topk, local * len(sizes)), local, seed, kernels=False)


SHAPES = (([2, 0], 24, 3, 2, 0), ([1, 3], 40, 2, 1, 1), ([0, 1, 2], 8, 4, 2, 2), ([1, 1], 2056, 2, 2, 3), ([0, 0], 16, 1, 1, 4))


@pytest.mark.journey
def test_kernels_move_as_the_reference_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_move_as_the_reference_on_a_gpu(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        check_round_trip(*shape, kernels=True, device="cuda", dtype=dtype)


@pytest.mark.parametrize("rank", [0, 1])
def test_kernels_compile_for_hopper_and_store_16_bytes_a_thread(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mcore_moe.dispatch import _triton, _triton_symmetric
    from tests.support.hopper import CompiledLaunches

    launches = {}
    for module, names in ((_triton_symmetric, ("push_tokens", "push_sums", "add_sums")), (_triton, ("spread_rows",))):
        for name in names:
            launches[name] = CompiledLaunches(getattr(module, f"_{name}_kernel"))
            monkeypatch.setattr(module, f"_{name}_kernel", launches[name])
    layout = SlotLayout(2, 32, 4096, 8, 64, torch.bfloat16, torch.float32)
    slot, addresses = layout.slot(torch.zeros(layout.num_bytes, dtype=torch.uint8), 0), torch.zeros(2, dtype=torch.int64)
    x, picks = torch.zeros(20, 4096, dtype=torch.bfloat16), torch.zeros(20, 8, dtype=torch.int32)
    places = torch.zeros(layout.places, 8, dtype=torch.int32)
    for weighted in (True, False):
        weights = torch.zeros(20, 8) if weighted else None
        _triton_symmetric.push_tokens(layout, addresses, 0, rank, x, picks, weights)
        rows, row_weights = _triton.spread_rows(slot.x_AD, slot.weights_AK if weighted else None, places, 64, padded=False)
        _triton_symmetric.push_sums(layout, addresses, layout.num_bytes, rank, rows, places, row_weights)
        _triton_symmetric.add_sums(layout, slot, picks, weighted=weighted)
    for name, launch in launches.items():
        assert len(launch.ptx) == 2
        assert all("st.global.v4.b32" in ptx and "ld.global.v4.b32" in ptx and ".b16" not in stores(ptx) for ptx in launch.ptx), name


def stores(ptx: str) -> str:
    return "\n".join(line.split("[")[0] for line in ptx.splitlines() if "st.global" in line)


def make_exchange(groups: ProcessGroups, **options: Any) -> SymmetricExchange:
    group = groups.tp_ep
    options = {"timeout_s": 20.0, **options}
    return SymmetricExchange(group, E // groups.ep.size, D, connect=lambda size: MappedMemory(group, size), **options)


def check_exchange(plan: ParallelPlan, exact_rows: bool) -> None:
    # What nobody has written is NaN.
    torch.use_deterministic_algorithms(True)
    groups = ProcessGroups.build(plan)
    rank = groups.world.rank
    torch.manual_seed(rank)
    experts, loop = (kind(E, D, 6, groups, bias=True, dtype=F64) for kind in (GroupedMLP, SequentialMLP))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    loop.load_state_dict(experts.state_dict())
    ours = MoEFlexTokenDispatcher(E, groups, make_exchange(groups, exact_rows=exact_rows))
    reference = MoEAlltoAllTokenDispatcher(E, groups.ep, groups.expt_tp)
    # Equally many tokens, other numbers, all tokens on one rank, one token, none at all, more than the first memory holds.
    for case, tokens in enumerate((12, 3 * rank, 4 * (rank == 0), int(rank == 1), 0, 40 + rank)):
        x = torch.randn(tokens, D, dtype=F64)
        for skewed in (False, True) if case == 0 else (case % 2 == 1,):
            routing = random_routing(tokens, E, K, 10 * case + rank, skewed=skewed)
            expected = pass_through(reference, loop, x, routing)
            once, again = (pass_through(ours, experts, x, routing) for _ in range(2))
            torch.testing.assert_close(once, expected, rtol=1e-10, atol=1e-10)
            assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("exact_rows", [False, True])
def test_two_ranks_exchange_as_the_all_to_all_over_a_loop_of_experts(world, exact_rows: bool) -> None:
    world(check_exchange, plan=ParallelPlan(dp=2, ep=2), exact_rows=exact_rows)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp=4, ep=4),
        ParallelPlan(dp=4, ep=2),
        ParallelPlan(dp=4, ep=2, etp=2),
        ParallelPlan(dp=4, ep=2, etp=2, order="ep-tp-cp-dp-pp"),
    ],
    ids=["ep4", "dp4-ep2", "ep2-etp2", "ep-before-etp"],
)
def test_four_ranks_exchange_as_the_all_to_all(world, plan: ParallelPlan) -> None:
    world(check_exchange, plan=plan, exact_rows=False)


def check_order() -> None:
    """Exchanges under way at once, as of micro-batches in a pipeline, and dispatches that follow each other, as in recomputation."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    ours = MoEFlexTokenDispatcher(E, groups, make_exchange(groups, max_tokens=30))
    reference = MoEAlltoAllTokenDispatcher(E, groups.ep)
    results = []
    for dispatcher in (ours, reference):
        leaves, sums, sent = [], [], []
        for number in range(5):
            # Tokens that are more and more, within the room that there is.
            x = torch.randn(6 * number, D, dtype=F64, generator=torch.Generator().manual_seed(number)).requires_grad_()
            routing = random_routing(len(x), E, K, number + 5 * groups.world.rank)
            leaves.append(x)
            sent.append((dispatcher.dispatch(x, routing), routing))
        for there, routing in sent:
            sums.append(dispatcher.combine(there.rows_RD * there.weights_R[:, None], there, routing))
        results.append([*sums, *torch.autograd.grad([y.square().sum() for y in sums], leaves)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)


@pytest.mark.world(2)
def test_exchanges_may_follow_each_other_in_any_order(world) -> None:
    world(check_order)


def check_late_reader() -> None:
    """Exchanges of a kind behind each other, with a rank that reads what it was sent long after the others."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    ours, reference = MoEFlexTokenDispatcher(E, groups, make_exchange(groups, max_tokens=16)), MoEAlltoAllTokenDispatcher(E, groups.ep)
    place, add = _symmetric.place_rows, _peer_slots.add_sums

    def late(read: Any, *values: Any, **options: Any) -> Any:
        time.sleep(0.05 * groups.world.rank)
        return read(*values, **options)

    def twice(dispatcher: Any) -> list[Tensor]:
        parts = [torch.randn(9, D, dtype=F64, generator=torch.Generator().manual_seed(number)).requires_grad_() for number in range(2)]
        routings = [random_routing(9, E, K, number + 5 * groups.world.rank) for number in range(2)]
        sent = [dispatcher.dispatch(*pair) for pair in zip(parts, routings, strict=True)]
        sums = [
            dispatcher.combine(there.rows_RD * there.weights_R[:, None], there, routing)
            for there, routing in zip(sent, routings, strict=True)
        ]
        return [*sums, *torch.autograd.grad([y.square().sum() for y in sums], parts)]

    expected = twice(reference)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_symmetric, "place_rows", functools.partial(late, place))
        patched.setattr(_peer_slots, "add_sums", functools.partial(late, add))
        torch.testing.assert_close(twice(ours), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.world(2)
def test_nothing_is_stored_over_what_a_late_rank_has_not_read(world) -> None:
    world(check_late_reader)


def check_recorded() -> None:
    """A rank that replays a graph does what it did when it recorded: its host knows nothing of what came between. The other has none."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    experts = GroupedMLP(E, D, 6, groups, dtype=F64)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(groups.world.rank))
    exchange = make_exchange(groups)
    ours, reference = MoEFlexTokenDispatcher(E, groups, exchange), MoEAlltoAllTokenDispatcher(E, groups.ep)
    x, routing = torch.randn(9, D, dtype=F64), random_routing(9, E, K, groups.world.rank)
    expected = pass_through(reference, experts, x, routing)
    torch.testing.assert_close(pass_through(ours, experts, x, routing), expected, rtol=1e-10, atol=1e-10)
    recorded = dict(vars(exchange))
    frozen = dataclasses.replace(routing, probs_TK=routing.probs_TK.detach())
    for lone in (True, False):
        if lone:
            # As the recomputation of a layer leaves it that needs no sums.
            ours.dispatch(x, routing)
            torch.testing.assert_close(pass_through(ours, experts, x, routing), expected, rtol=1e-10, atol=1e-10)
        else:
            # A backward of the experts alone, as of adapters in the first layer.
            sent = ours.dispatch(x, frozen)
            y = ours.combine(experts(sent.rows_RD, sent.ends_N, sent.weights_R), sent, frozen)
            torch.autograd.grad(y.square().sum(), list(experts.parameters()))
        if groups.world.rank == 0:
            vars(exchange).update(recorded)
        torch.testing.assert_close(pass_through(ours, experts, x, routing), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.world(2)
def test_ranks_with_and_without_graphs_meet(world) -> None:
    world(check_recorded)


class Graph:
    """Stands for a ``Recording``."""


def check_memory_of_graphs() -> None:
    """Graphs hold the memory, recordings that failed do not."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    ours, reference = MoEFlexTokenDispatcher(E, groups, make_exchange(groups)), MoEAlltoAllTokenDispatcher(E, groups.ep)
    experts = GroupedMLP(E, D, 6, groups, dtype=F64)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(groups.world.rank))
    x, routing = torch.randn(9, D, dtype=F64), random_routing(9, E, K, groups.world.rank)
    longer, its_routing = torch.randn(17, D, dtype=F64), random_routing(17, E, K, 2 + groups.world.rank)

    def record(*, fails: bool = False, by_us: bool = True) -> "Graph":
        """Nothing of a recording runs: no stores of this rank, no barrier."""
        graph = Graph()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(_symmetric, "_is_recording", lambda values: True)
            patched.setattr(graphs, "recordings_under_way", lambda: {graph} if by_us else set())
            patched.setattr(MappedMemory, "barrier", lambda memory: None)
            patched.setattr(_peer_slots, "push_tokens", lambda *values: None)
            patched.setattr(_peer_slots, "push_sums", lambda *values: None)
            sent = ours.dispatch(x, routing)
            if fails:
                raise RuntimeError("the work behind the dispatch cannot be recorded")
            ours.combine(sent.rows_RD * sent.weights_R[:, None], sent, routing)
        return graph

    def exchanges(x: Tensor, routing: Routing) -> None:
        expected = pass_through(reference, experts, x, routing)
        torch.testing.assert_close(pass_through(ours, experts, x, routing), expected, rtol=1e-10, atol=1e-10)

    with pytest.raises(ValueError, match="this rank has 9 tokens, there is room for 0, and graphs hold that memory"):
        record()
    # It is made by the first exchange all the same, and a rank alone that fails to record its half is where it was.
    exchanges(x, routing)
    if groups.world.rank == 0:
        with suppress(RuntimeError):
            record(fails=True)
    exchanges(x, routing)
    graph = record()
    refusal = "this rank has 17 tokens, there is room for 16, and graphs hold that memory; set moe_symmetric_max_"
    with pytest.raises(ValueError, match=refusal):
        ours.dispatch(longer, its_routing)
    exchanges(x, routing)
    del graph
    exchanges(longer, its_routing)
    # Nobody sees a graph go that another library made.
    record(by_us=False)
    with pytest.raises(ValueError, match="and graphs hold that memory"):
        ours.dispatch(longer.repeat(2, 1), random_routing(34, E, K, 0))


@pytest.mark.world(2)
def test_a_recording_that_fails_leaves_the_memory_free_to_grow(world) -> None:
    world(check_memory_of_graphs)


MODEL = TransformerConfig(num_layers=1, hidden_size=D, num_attention_heads=2, vocab_size=16, ffn_hidden_size=6)
MIXTURE = MoEConfig(num_moe_experts=E, moe_router_topk=K, moe_aux_loss_coeff=0.1, moe_expert_capacity_factor=0.7)
SYMMETRIC = dataclasses.replace(
    MIXTURE, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="symmetric", moe_flex_timeout_s=20.0
)  # fmt: skip


def check_layer() -> None:
    """A whole layer with dropped picks, recomputed."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    site = Site(layer=0, local_layer=0, config=MODEL, groups=groups)
    reference = MoELayer(MIXTURE, site, dtype=F64)
    ours = MoELayer(SYMMETRIC, site, dtype=F64, exchange=make_exchange(groups))
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(reference.state_dict())
    results = []
    for layer in (reference, ours):
        assert layer.reads_device
        x = torch.randn(9, D, dtype=F64, generator=torch.Generator().manual_seed(groups.world.rank)).requires_grad_()
        for checkpoint in (False, True):
            step = Step.causal(1, 9)

            def run(x: Tensor, layer: MoELayer = layer, step: Step = step) -> Tensor:
                return layer(x, step)[0]

            y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False) if checkpoint else run(x)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-9, atol=1e-9)


@pytest.mark.world(2)
def test_a_layer_with_dropped_picks_is_the_same(world) -> None:
    world(check_layer)


def check_more_tokens_than_fit() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    dispatcher = MoEFlexTokenDispatcher(E, groups, make_exchange(groups, timeout_s=2.0))
    dispatcher.dispatch(torch.ones(3, D, dtype=F64), random_routing(3, E, K, 0))
    if groups.world.rank == 0:
        with pytest.raises(TimeoutError, match=r"ranks \[1\] in a larger exchange of tokens \(this rank has 17, there is room for 16; "):
            dispatcher.dispatch(torch.ones(17, D, dtype=F64), random_routing(17, E, K, 0))


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_with_more_tokens_than_fit_is_told_what_to_set(world) -> None:
    world(check_more_tokens_than_fit)


def check_choice() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    place: dict[str, Any] = {"layer": 0, "local_layer": 0, "config": MODEL, "groups": groups}
    with pytest.raises(ValueError, match="='symmetric': a symmetric buffer needs CUDA, found device='cpu'; use a GPU; or set moe_flex_"):
        MoELayer(SYMMETRIC, Site(**place))
    with pytest.raises(ValueError, match="needs ranks connected by NCCL, found a group of 2"):
        choose_exchange(SYMMETRIC, groups, width=D, dtype=torch.bfloat16, device="cuda")
    mixture = dataclasses.replace(SYMMETRIC, moe_flex_dispatcher_fallback="alltoall")
    with pytest.warns(UserWarning, match="tokens travel by all-to-all"):
        assert type(MoELayer(mixture, Site(**place)).dispatcher) is MoEAlltoAllTokenDispatcher


@pytest.mark.world(2)
def test_ranks_without_gpus_refuse_or_fall_back(world) -> None:
    world(check_choice)


def test_what_cannot_be_is_named() -> None:
    with pytest.raises(ValueError, match="moe_symmetric_max_tokens=0 must be at least 1; leave it out for the first batch's"):
        dataclasses.replace(SYMMETRIC, moe_symmetric_max_tokens=0)
    with pytest.raises(ValueError, match="a symmetric buffer needs CUDA, found device='cpu'"):
        SymmetricBuffer(Group.single(), 64, torch.device("cpu"), timeout_s=1.0)


if __name__ == "__main__":
    for each in SHAPES:
        check_round_trip(*each, kernels=True)
    print("same")
