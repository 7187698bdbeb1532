# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention over context-parallel ranks equals attention on one."""

import dataclasses
import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.comm import Arrival, P2PCommunicator
from mcore_parallel.context_parallel import (
    CP_COMM_TYPES,
    ContextParallelAttention,
    HeadSplitError,
    LayeredAttention,
    SequenceSplitError,
    _core,
    _ring,
    context_parallel_attention,
    zigzag_indices,
)
from mcore_parallel.context_parallel._partial import TorchAttention
from mcore_parallel.nn import Step, causal_attention, default_attention


# T tokens, A heads, K key-value heads, d width of a head, N sequences.
@dataclasses.dataclass(frozen=True)
class Case:
    """One attention; ``lengths`` are those of packed sequences, else there are two sequences of 16 tokens."""

    name: str
    kv_heads: int = 4
    window: tuple[int, int] | None = None
    causal: bool = True
    sink: str | None = None
    lengths: tuple[int, ...] | None = None
    scale: float | None = None
    value_width: int = 6

    @property
    def all_lengths(self) -> tuple[int, ...]:
        return (16, 16) if self.lengths is None else self.lengths


PACKED = (8, 24, 16, 0, 8, 40)
CASES = [
    Case("dense"),
    Case("grouped", kv_heads=2),
    Case("multi-query", kv_heads=1, value_width=4),
    Case("narrow window", window=(2, 0)),
    Case("window of a token", window=(0, 0)),
    Case("wide window", window=(9, 0), kv_heads=2),
    Case("both sides", causal=False, scale=0.5),
    Case("window on both sides", window=(3, 2), causal=False),
    Case("window ahead", window=(-1, 3), causal=False),
    Case("sink of one", sink="one"),
    Case("learnt sink", sink="learnt", kv_heads=2),
    Case("packed", lengths=PACKED),
    Case("packed alike", lengths=(16,) * 3, kv_heads=2),
    Case("packed with everything", lengths=PACKED, kv_heads=2, window=(5, 0), sink="learnt", value_width=4),
]
HEADS = 4


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, sink and the gradient of the output, all tokens of them."""
    generator = torch.Generator().manual_seed(3)
    T, K = sum(case.all_lengths), case.kv_heads
    shapes = ((T, HEADS, 6), (T, K, 6), (T, K, case.value_width), (HEADS,), (T, HEADS, case.value_width))
    q, k, v, sink, grad = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    return q * 2, k, v, sink if case.sink == "learnt" else torch.zeros_like(sink), grad


def whole_attention(case: Case, q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """With the matrix of all scores, a column for the sink and a mask of pairs."""
    lengths = torch.tensor(case.all_lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.cat([torch.arange(length) for length in case.all_lengths])
    left, right = (-1, -1) if case.window is None else case.window
    right = 0 if case.causal else right
    ahead, T = place - place[:, None], len(place)
    mask = (owner == owner[:, None]) & ((left < 0) | (ahead >= -left)) & ((right < 0) | (ahead <= right))
    k, v = (x.repeat_interleave(HEADS // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("iad,jad->aij", q, k) * (q.shape[-1] ** -0.5 if case.scale is None else case.scale)
    scores = scores.masked_fill(~mask, float("-inf"))
    if case.sink is not None:
        scores = torch.cat((scores, sink[:, None, None].expand(-1, T, 1)), dim=-1)
    return torch.einsum("aij,jad->iad", scores.softmax(-1)[..., :T], v)


def step_of(case: Case, size: int) -> Step:
    """Of a rank's share."""
    T = sum(case.all_lengths) // size
    B = len(case.all_lengths) if case.lengths is None else 1
    bounds = None if case.lengths is None else torch.tensor([0, *case.lengths]).cumsum(0)
    # The cores read no positions.
    return Step(batch_size=B, seq_len=T // B, positions=torch.zeros(T, dtype=torch.int64), cu_seqlens=bounds)


def core_of(case: Case, groups: ProcessGroups, cp_comm_type: str) -> ContextParallelAttention:
    core = context_parallel_attention(
        groups,
        cp_comm_type,
        window_size=case.window,
        causal=case.causal,
        softmax_type="off-by-one" if case.sink == "one" else "vanilla",
        softmax_scale=case.scale,
    )
    assert isinstance(core, ContextParallelAttention)
    return core


@functools.cache
def expectation(case: Case) -> tuple[Tensor, ...]:
    """Output, gradients of q, k, v and the sink."""
    *leaves, grad = inputs(case)
    leaves = [x.requires_grad_() for x in leaves]
    out = whole_attention(case, *leaves)
    found = torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)
    return (out.detach(), *found)


def check_case(case: Case, groups: ProcessGroups, cp_comm_type: str, expected: tuple[Tensor, ...]) -> None:
    cp = groups.cp
    index = zigzag_indices(case.all_lengths, cp.size, cp.rank)
    q, k, v, sink, grad = inputs(case)
    q, k, v = (x[index].requires_grad_() for x in (q, k, v))
    sink.requires_grad_()
    learnt = sink if case.sink == "learnt" else None
    out = core_of(case, groups, cp_comm_type)(q, k, v, 0, step_of(case, cp.size), sink=learnt)
    grads = torch.autograd.grad(out, (q, k, v) if learnt is None else (q, k, v, sink), grad[index])
    for name, ours, theirs in zip("oqkv", (out, *grads[:3]), expected, strict=False):
        torch.testing.assert_close(
            ours, theirs[index], rtol=1e-10, atol=1e-10, msg=lambda text, name=name: f"{case.name}, {cp_comm_type}, {name}: {text}"
        )
    if learnt is not None:
        total = grads[3].clone()
        if cp.pg is not None:
            torch.distributed.all_reduce(total, group=cp.pg)
        torch.testing.assert_close(total, expected[4], rtol=1e-10, atol=1e-10)


def layouts(cp: int) -> Iterator[tuple[ProcessGroups, str]]:
    groups = ProcessGroups.build(ParallelPlan(cp=cp, hierarchical_cp=(2, cp // 2)))
    for name in CP_COMM_TYPES:
        yield groups, name
    if cp == 4:
        yield ProcessGroups.build(ParallelPlan(cp=4, hierarchical_cp=(1, 4))), "a2a+p2p"


def check_all(cp: int, expected: list[tuple[Tensor, ...]]) -> None:
    for groups, name in layouts(cp):
        for case, wanted in zip(CASES, expected, strict=True):
            check_case(case, groups, name, wanted)


def test_one_rank_equals_the_whole_matrix() -> None:
    for case in CASES:
        for name in ("p2p", "all_gather", "a2a"):
            check_case(case, ProcessGroups.single(), name, expectation(case))


@pytest.mark.world(2)
def test_two_ranks_equal_one(world) -> None:
    world(check_all, cp=2, expected=[expectation(case) for case in CASES])


@pytest.mark.world(4)
def test_four_ranks_equal_one(world) -> None:
    world(check_all, cp=4, expected=[expectation(case) for case in CASES])


def test_causal_attention_of_packed_sequences_is_that_of_each() -> None:
    case = Case("packed", lengths=PACKED, kv_heads=2)
    q, k, v, _, _ = inputs(case)
    found = causal_attention(q, k, v, 0, step_of(case, 1))
    torch.testing.assert_close(found, expectation(case)[0], rtol=1e-10, atol=1e-10)


def test_float32_and_half_precision_scores_are_computed_in_float32() -> None:
    case = Case("grouped", kv_heads=2)
    q, k, v, _, _ = (x.bfloat16() for x in inputs(case))
    core = core_of(case, ProcessGroups.single(), "p2p")
    found = core(q, k, v, 0, step_of(case, 1))
    wide = core(q.float(), k.float(), v.float(), 0, step_of(case, 1))
    assert found.dtype == torch.bfloat16 and wide.dtype == torch.float32
    assert torch.equal(found, wide.bfloat16())


def test_off_by_one_is_a_learnt_sink_of_zero_and_a_far_sink_is_none() -> None:
    plain, one = Case("dense"), Case("sink of one", sink="one")
    q, k, v, _, _ = inputs(plain)
    groups, step = ProcessGroups.single(), step_of(plain, 1)
    zeros = torch.zeros(HEADS, dtype=torch.float64)
    vanilla = core_of(plain, groups, "p2p")
    assert torch.equal(core_of(one, groups, "p2p")(q, k, v, 0, step), vanilla(q, k, v, 0, step, sink=zeros))
    assert torch.equal(vanilla(q, k, v, 0, step), vanilla(q, k, v, 0, step, sink=zeros - 1000))


def check_layers(expected: list[Tensor]) -> None:
    """Layers 1 and 2 of a model of three, each with a way to communicate and a window of its own."""
    groups = ProcessGroups.build(ParallelPlan(cp=2))
    core = context_parallel_attention(groups, ["p2p", "a2a", "all_gather"], window_size=[(0, 0), None, (2, 0)], layers=range(1, 3))
    assert isinstance(core, LayeredAttention)
    case = Case("dense")
    index = zigzag_indices(case.all_lengths, 2, groups.cp.rank)
    q, k, v, _, _ = inputs(case)
    for layer, wanted in enumerate(expected):
        found = core(q[index], k[index], v[index], layer, step_of(case, 2))
        torch.testing.assert_close(found, wanted[index], rtol=1e-10, atol=1e-10)


@pytest.mark.world(2)
def test_each_layer_may_have_its_own_way_and_window(world) -> None:
    world(check_layers, expected=[expectation(Case("dense"))[0], expectation(Case("narrow window", window=(2, 0)))[0]])


def check_default() -> None:
    core = default_attention(ProcessGroups.build(ParallelPlan(cp=2)))
    assert isinstance(core, ContextParallelAttention) and core.ring.size == 2


@pytest.mark.world(2)
def test_models_split_over_cp_attend_around_a_ring_by_default(world) -> None:
    assert default_attention(ProcessGroups.single()) is causal_attention
    world(check_default)


def check_order_of_a_ring() -> tuple[list[str], list[str]]:
    """What a rank does in the forward and in the backward."""
    said: list[str] = []

    class Transfers(P2PCommunicator):
        def transfer(self, sends, receives):
            said.append(f"send {tuple(sends[0][0].shape)[-1]}")
            (arrival,) = super().transfer(sends, receives)
            return [Said(arrival.tensor, arrival.works)]

    class Said(Arrival):
        def wait(self) -> Tensor:
            said.append("wait")
            return super().wait()

    class Kernel(TorchAttention):
        def forward(self, *inputs):
            said.append("compute")
            return super().forward(*inputs)

        def backward(self, *inputs):
            said.append("compute")
            return super().backward(*inputs)

    _ring.P2PCommunicator = Transfers  # type: ignore[misc]
    group = ProcessGroups.build(ParallelPlan(cp=2)).cp
    q = torch.randn(8, 2, 4, requires_grad=True)
    out = _ring.ring_attention(q, q, q, None, _ring.plan_ring([16], 2, group.rank, (-1, 0)), group, Kernel(), 0.5)
    forward, said[:] = list(said), []
    out.sum().backward()
    return forward, said


@pytest.mark.world(2)
def test_a_ring_sends_what_comes_next_before_it_computes(world) -> None:
    for forward, backward in world(check_order_of_a_ring):
        assert forward == ["send 8", "compute", "wait", "compute"]
        # Gradients of the first round travel while the second one is computed.
        assert backward == ["send 8", "compute", "send 8", "wait", "compute", "wait", "send 8", "wait"]


def groups_of(cp: int, hierarchical_cp: tuple[int, ...] = ()) -> ProcessGroups:
    """Without communicators: for what is refused before anything is sent."""
    plan = ParallelPlan(cp=cp, hierarchical_cp=hierarchical_cp)
    return dataclasses.replace(ProcessGroups.single(), plan=plan, cp=Group(tuple(range(cp)), 0))


def test_what_cannot_be_split_is_refused() -> None:
    q, k = torch.zeros(6, 4, 2), torch.zeros(6, 2, 2)
    step = Step(batch_size=1, seq_len=6, positions=torch.arange(6))
    core = context_parallel_attention(groups_of(3), "a2a")
    with pytest.raises(HeadSplitError, match=r"4 query heads of a tp rank must be a multiple of the all-to-all degree 3.*p2p"):
        core(q, k, k, 0, step)
    uneven = dataclasses.replace(step, cu_seqlens=torch.tensor([0, 4, 4, 7, 12]))
    packed = dataclasses.replace(step, cu_seqlens=torch.tensor([0, 6, 18]))
    for name in ("p2p", "a2a", "all_gather"):
        with pytest.raises(SequenceSplitError, match=r"sequence 1 of length 3 must be a multiple of 2 \* cp = 4.*pad it"):
            context_parallel_attention(groups_of(2), name)(q, k, k, 0, uneven)
        with pytest.raises(SequenceSplitError, match=r"cu_seqlens end at 18, but 2 ranks with 6 tokens each hold 12"):
            context_parallel_attention(groups_of(2), name)(q, k, k, 0, packed)
    odd = Step(batch_size=2, seq_len=3, positions=torch.arange(6))
    with pytest.raises(SequenceSplitError, match=r"sequence 0 of length 6 must be a multiple of 2 \* cp = 4"):
        context_parallel_attention(groups_of(2))(q, k, k, 0, odd)
    with pytest.raises(HeadSplitError, match=r"sink of shape \(3,\) must have one logit for each of the 4 heads"):
        context_parallel_attention(ProcessGroups.single())(q, k, k, 0, step, sink=torch.zeros(3))


def test_choices_that_do_not_exist_are_refused() -> None:
    one = ProcessGroups.single()
    with pytest.raises(ValueError, match=r"cp_comm_type='ring' must be one of p2p, all_gather, a2a, a2a\+p2p"):
        context_parallel_attention(one, "ring")
    with pytest.raises(ValueError, match=r"cp_comm_type='x'"):
        context_parallel_attention(one, ["p2p", "x"])
    with pytest.raises(ValueError, match=r"hierarchical_cp=\(2, 3\) must hold sizes that multiply to cp=4"):
        groups_of(4, (2, 3))
    with pytest.raises(ValueError, match=r"hierarchical_cp=\(\) must hold two sizes, \(a2a, p2p\).*ParallelPlan"):
        context_parallel_attention(groups_of(4), "a2a+p2p")
    with pytest.raises(ValueError, match=r"window_size=\(-2, 0\)"):
        context_parallel_attention(one, window_size=(-2, 0))
    with pytest.raises(ValueError, match=r"window_size=\(2, 1\) sees 1 tokens ahead in causal attention; give \(2, 0\)"):
        context_parallel_attention(one, window_size=[(2, 1), None])
    with pytest.raises(ValueError, match=r"softmax_type='learnable'.*SelfAttention"):
        context_parallel_attention(one, softmax_type="learnable")
    with pytest.raises(ValueError, match=r"window_size has 2 entries, but layers=range\(1, 3\)"):
        context_parallel_attention(one, window_size=[None, (1, 0)], layers=range(1, 3))
    with pytest.raises(ValueError, match=r"cp_comm_type has 3 entries and window_size 2; give one a layer"):
        context_parallel_attention(one, ["p2p"] * 3, window_size=[None, (1, 0)])


def test_all_layers_of_a_packed_batch_share_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[object] = []
    plan = _core.plan_ring
    monkeypatch.setattr(_core, "plan_ring", lambda *given: plans.append(given) or plan(*given))
    step = Step(batch_size=1, seq_len=29, positions=torch.zeros(29, dtype=torch.int64), cu_seqlens=torch.tensor([0, 11, 29]))
    q, k, v = torch.randn(3, 29, 2, 4).unbind()
    for layer in range(3):
        causal_attention(q, k, v, layer, step)
    assert len(plans) == 1
