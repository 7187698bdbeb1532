# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The table of attention cores: each row does what it claims, and the choice says why."""

import dataclasses
import importlib.util
import itertools
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.context_parallel import ContextParallelAttention, zigzag_indices
from mcore_parallel.nn import (
    AttentionCapability,
    AttentionSpec,
    ContextParallelBuilder,
    Step,
    attention_capabilities,
    choose_attention,
    reference_attention,
)
from mcore_parallel.nn.attention import check_device_bounds
from mcore_parallel.nn.attention._cores import SDPAttention
from mcore_parallel.nn.attention._flex import BLOCK, FlexAttention, block_mask
from mcore_parallel.nn.attention._registry import select_attention

ROWS = {row.backend: row for row in attention_capabilities()}
ONE = ProcessGroups.single()
HEADS, WIDTH, LENGTHS = 4, 8, (5, 9, 0, 3)
HERE = [row for row in ROWS.values() if row.is_installed and "cpu" in row.devices]
SPECS = [
    AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=kv_heads,
        head_dim=WIDTH,
        value_dim=value_dim,
        causal=causal,
        window=window,
        softmax_type=softmax,
        softmax_scale=scale,
        packed=packed,
        dtype=torch.float32,
        device="cpu",
    )
    for (causal, window), softmax, packed, (kv_heads, value_dim, scale) in itertools.product(
        [(True, None), (True, (3, 0)), (True, (0, -1)), (False, None), (False, (3, 2)), (False, (-1, 1))],
        ["vanilla", "off-by-one", "learnable"],
        [False, True],
        [(HEADS, None, None), (2, 4, 0.3)],
    )
]
SPECS += [dataclasses.replace(spec, softcap=0.9) for spec in SPECS[::3]]


def inputs(spec: AttentionSpec) -> tuple[list[Tensor], Tensor, Step]:
    """q, k, v, perhaps a sink; the gradient of the output; the step."""
    generator = torch.Generator().manual_seed(5)
    T = sum(LENGTHS) if spec.packed else 2 * 11
    shapes = [(T, HEADS, WIDTH), (T, spec.num_kv_heads, WIDTH), (T, spec.num_kv_heads, spec.width), (T, HEADS, spec.width), (HEADS,)]
    q, k, v, grad, sink = (torch.randn(shape, generator=generator, dtype=torch.float64).to(spec.dtype) for shape in shapes)
    step = Step.causal(1 if spec.packed else 2, T if spec.packed else 11)
    if spec.packed:
        step = dataclasses.replace(step, cu_seqlens=torch.tensor([0, *LENGTHS]).cumsum(0))
    return [q, k, v, *([sink] if spec.softmax_type == "learnable" else [])], grad, step


def expected(spec: AttentionSpec, leaves: list[Tensor], step: Step) -> Tensor:
    """In float64, by the definition."""
    q, k, v, *sinks = (leaf.double() for leaf in leaves)
    sink = sinks[0] if sinks else torch.zeros(HEADS, dtype=torch.float64) if spec.softmax_type == "off-by-one" else None
    bounds = {"cu_seqlens": step.cu_seqlens} if spec.packed else {"batch_size": 2}
    return reference_attention(
        q, k, v, causal=spec.causal, window=spec.window, sink=sink, scale=spec.softmax_scale, softcap=spec.softcap, **bounds
    )


def possible(row: AttentionCapability) -> list[AttentionSpec]:
    """Of the combinations those that a row can do here, in float64 or float32, and a few in each other dtype."""
    trains = "cpu" in row.training
    widest, *others = sorted(row.dtypes, reverse=True, key=lambda name: getattr(torch, name).itemsize)
    wanted = [(spec, widest) for spec in SPECS] + [(spec, name) for name in others for spec in SPECS[::7]]
    specs = [dataclasses.replace(spec, dtype=getattr(torch, name), training=trains) for spec, name in wanted]
    specs = [spec for spec in specs if not row.missing(spec, ONE)]
    # Each call of FlexAttention on the CPU is traced for about a second.
    return [spec for spec in specs[::17] if spec.dtype == torch.float32] if row.backend == "flex" else specs


@pytest.mark.parametrize("row", HERE, ids=lambda row: row.backend)
def test_a_backend_equals_the_definition_in_all_that_its_row_claims(row: AttentionCapability) -> None:
    trains = "cpu" in row.training
    for spec in possible(row):
        dtype = str(spec.dtype).removeprefix("torch.")
        leaves, grad, step = inputs(spec)
        leaves = [leaf.requires_grad_(trains) for leaf in leaves]
        core = choose_attention(spec, ONE, row.backend)
        out = core(*leaves[:3], 0, step, **({"sink": leaves[3]} if len(leaves) > 3 else {}))
        truth_leaves = [leaf.detach().double().requires_grad_(trains) for leaf in leaves]
        truth = expected(spec, truth_leaves, step)
        assert out.dtype == spec.dtype, spec
        rtol = {"float64": 1e-9, "float32": 2e-5}.get(dtype, 4e-2)
        torch.testing.assert_close(out.double(), truth, rtol=rtol, atol=rtol, msg=lambda text, spec=spec: f"{spec}: {text}")
        if trains:
            out.backward(grad)
            truth.backward(grad.double())
            for found, right in zip(leaves, truth_leaves, strict=True):
                torch.testing.assert_close(
                    found.grad.double(), right.grad, rtol=rtol, atol=2 * rtol, msg=lambda text, spec=spec: f"{spec}: {text}"
                )


def test_every_claim_is_put_to_the_test() -> None:
    """The combinations above hold each thing a row can claim."""
    for row in HERE:
        able = possible(row)
        assert {spec.dtype for spec in able} == (
            {torch.float32} if row.backend == "flex" else {getattr(torch, name) for name in row.dtypes}
        )
        assert any(spec.window for spec in able) == row.window
        assert any(spec.softmax_type == "learnable" for spec in able) == row.sink
        assert any(spec.packed for spec in able) == row.packed
        assert row.packed or not row.device_bounds
        assert any(spec.num_kv_heads < HEADS for spec in able) == row.grouped
        assert any(spec.width != WIDTH for spec in able) == row.value_dim
        assert any(not spec.causal for spec in able) == row.bidirectional
        assert any(spec.softcap for spec in able) == row.softcap


@pytest.mark.parametrize("row", [row for row in HERE if row.device_bounds], ids=lambda row: row.backend)
def test_bounds_on_the_device_give_what_bounds_on_the_host_give(row: AttentionCapability, monkeypatch: pytest.MonkeyPatch) -> None:
    for spec in [spec for spec in possible(row) if spec.packed and spec.dtype == torch.float64]:
        leaves, grad, step = inputs(spec)
        core = choose_attention(dataclasses.replace(spec, device_bounds=True), ONE, row.backend)
        assert step.cu_seqlens is not None and step.max_seqlen is None
        padded = torch.cat((step.cu_seqlens, step.cu_seqlens[-1:].expand(3))).int()
        device = dataclasses.replace(step, cu_seqlens=padded, max_seqlen=max(LENGTHS))
        results = []
        for each in (step, device):
            own = [leaf.clone().requires_grad_() for leaf in leaves]
            with monkeypatch.context() as patch:
                if each is device:
                    for name in ("tolist", "item", "cpu", "__bool__", "__int__"):
                        patch.setattr(Tensor, name, lambda *_: pytest.fail("the host waits for the device"))
                out = core(*own[:3], 0, each, **({"sink": own[3]} if len(own) > 3 else {}))
                out.backward(grad)
            results.append([out.detach(), *(leaf.grad for leaf in own)])
        for found, wanted in zip(reversed(results[1]), reversed(results[0]), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=lambda text, spec=spec: f"{spec}: {text}")


@pytest.mark.parametrize("row", ROWS.values(), ids=lambda row: row.backend)
def test_cores_that_read_bounds_on_the_host_refuse_them_on_the_device(row: AttentionCapability) -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, packed=True, device_bounds=True, dtype=torch.bfloat16)
    assert ("device_bounds=True" in row.missing(spec, ONE)) == (not row.device_bounds)
    assert "device_bounds=True" in row.missing(spec, SimpleNamespace(cp=SimpleNamespace(size=2)))  # type: ignore[arg-type]
    here = dataclasses.replace(spec, device="cpu", training=False)
    if not row.device_bounds and row in HERE:
        with pytest.raises(ValueError, match="cannot do device_bounds=True.*; use sdpa or context_parallel"):
            choose_attention(here, ONE, row.backend)
        core = choose_attention(dataclasses.replace(here, device_bounds=False), ONE, row.backend)
        with pytest.raises(ValueError, match=f"{type(core).__name__} reads the bounds of packed sequences on the host"):
            check_device_bounds(core)


@pytest.mark.parametrize("lengths", [(300,), (128,), (384,), (100, 28, 300), (1, 127, 129, 3), (500, 12)])
@pytest.mark.parametrize("bounds", [(-1, 0), (-1, -1), (0, 0), (130, 0), (300, 2), (5, 260)])
def test_the_block_table_of_flex_covers_what_is_seen(lengths: tuple[int, ...], bounds: tuple[int, int]) -> None:
    mask = block_mask(bounds, lengths, torch.device("cpu"))
    T = sum(lengths)
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ahead = torch.arange(T) - torch.arange(T)[:, None]
    seen = owner == owner[:, None]
    seen = seen & (ahead >= -bounds[0]) if bounds[0] >= 0 else seen
    seen = seen & (ahead <= bounds[1]) if bounds[1] >= 0 else seen
    rows = -(-T // BLOCK)
    padded = torch.zeros(rows * BLOCK, rows * BLOCK, dtype=torch.bool)
    padded[:T, :T] = seen
    blocks = padded.view(rows, BLOCK, rows, BLOCK)
    needed, whole = blocks.any(3).any(1), blocks.all(3).all(1)
    partly, fully = (torch.zeros(rows, rows, dtype=torch.bool) for _ in range(2))
    for table, counts, numbers in (
        (partly, mask.kv_num_blocks, mask.kv_indices),
        (fully, mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for row in range(rows):
            table[row, numbers[0, 0, row, : counts[0, 0, row]].long()] = True
    assert not (partly & fully).any()
    assert not (fully & ~whole).any()
    # Blocks of several short sequences may be looked into for nothing; without them the table is exact.
    assert not (needed & ~(partly | fully)).any()
    if len(lengths) == 1:
        assert torch.equal(needed, partly | fully)


def test_the_cost_of_a_window_follows_the_window() -> None:
    table = block_mask((1023, 0), (16384,), torch.device("cpu"))
    per_row = table.kv_num_blocks + table.full_kv_num_blocks
    assert per_row.max() == 1024 // BLOCK + 1


def test_auto_prefers_torch_kernels_and_tiles_for_windows() -> None:
    plain = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu")
    assert isinstance(choose_attention(plain, ONE), SDPAttention)
    windowed = choose_attention(dataclasses.replace(plain, window=(3, 0)), ONE)
    assert isinstance(windowed, ContextParallelAttention) and windowed.window == (3, 0)
    assert choose_attention(dataclasses.replace(plain, softmax_type="off-by-one"), ONE).sink_is_one
    split = dataclasses.replace(ONE, cp=Group((0, 1), 0))
    assert isinstance(choose_attention(plain, split), ContextParallelAttention)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "sdpa"),
        ({"window": (127, 0)}, "context_parallel"),
        ({"window": (1023, 0)}, "flex"),
        ({"softmax_type": "learnable"}, "flex"),
        ({"window": (127, 0), "dtype": torch.float32}, "flex"),
        ({"window": (127, 0), "value_dim": 32}, "flex"),
        ({"window": (127, 0), "softcap": 50.0}, "flex"),
    ],
)
def test_auto_takes_what_is_fastest_on_a_gpu(change: dict[str, Any], chosen: str) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda")
    assert select_attention(dataclasses.replace(spec, **change), ONE)[0].backend == chosen


def test_the_choice_and_its_reason_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu")
    with caplog.at_level(logging.INFO, "mcore_parallel.nn"):
        choose_attention(spec, ONE)
        choose_attention(spec, ONE, "reference")
    first, second = caplog.messages
    assert "'sdpa'" in first and "neither window nor sink" in first and "head_dim=8" in first
    assert "'reference'" in second and "asked for" in second


@pytest.mark.parametrize(
    ("backend", "change", "message"),
    [
        ("sdpa", {"window": (3, 0)}, r"'sdpa' cannot do window_size=\(3, 0\); use context_parallel or reference"),
        ("sdpa", {"softmax_type": "learnable"}, r"cannot do softmax_type='learnable'; use context_parallel or reference"),
        ("flex", {}, r"'flex' cannot do training on device=cpu; use sdpa or context_parallel or reference"),
        ("flex", {"dtype": torch.float64, "training": False}, r"cannot do dtype=float64; use sdpa"),
        ("te", {"device": "cpu"}, r"'te' cannot do .*device=cpu"),
        ("sdpa", {"softcap": 50.0}, r"'sdpa' cannot do attn_logit_softcapping=50.0; use reference"),
        ("auto", {"softcap": 50.0, "batch_invariant": True}, r"batch_invariant lacks attn_logit_softcapping=50.0"),
        ("flash9", {}, r"attention_backend='flash9' must be 'auto' or one of 'sdpa', 'context_parallel', 'flex', 'te', 'reference'"),
        ("auto", {"dtype": torch.int32}, r"no backend can do it all: sdpa lacks dtype=int32; context_parallel lacks"),
    ],
)
def test_what_a_backend_cannot_do_is_named_with_those_that_can(backend: str, change: dict[str, object], message: str) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=message):
        choose_attention(dataclasses.replace(spec, **change), ONE, backend)


def test_context_parallelism_is_named_too() -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"'sdpa' cannot do cp=2; use context_parallel$"):
        choose_attention(spec, dataclasses.replace(ONE, cp=Group((0, 1), 0)), "sdpa")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": (3, 2)}, r"window_size=\(3, 2\) sees 2 tokens ahead, but attention is causal; give \(3, 0\), or causal=False"),
        ({"window": (-2, 0)}, r"window_size=\(-2, 0\) must be"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3 must divide num_heads=4"),
        ({"softmax_type": "sparse"}, r"softmax_type='sparse' must be one of 'vanilla', 'off-by-one', 'learnable'"),
        ({"head_dim": 0}, r"head_dim=0 must be at least 1"),
        ({"softmax_scale": 0.0}, r"softmax_scale=0.0 must be above 0"),
        ({"softcap": 0.0}, r"softcap=0.0 must be above 0, or None"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, **change})


def test_scores_are_capped_before_keys_are_hidden() -> None:
    q, k, v = (torch.randn(3, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3))
    out = reference_attention(q, k, v, softcap=0.5)
    scores = [[0.5 * math.tanh(float(q[i, 0] @ k[j, 0]) / 2 / 0.5) for j in range(i + 1)] for i in range(3)]
    for i, row in enumerate(scores):
        weights = torch.tensor(row, dtype=torch.float64).softmax(0)
        torch.testing.assert_close(out[i, 0], weights @ v[: i + 1, 0], rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(count, 2, 4, dtype=torch.float64, generator=generator, requires_grad=True) for count in (5, 3, 3))
    # The first two of five queries stand before the first of three keys.
    out = reference_attention(q, k, v, window=(1, 0))
    assert (out[:2] == 0).all() and (out[2:] != 0).all()
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert reference_attention(q, k[:0], v[:0], window=(1, 0)).eq(0).all()


def test_more_keys_than_queries_continue_a_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, 2, 4, dtype=torch.float64, generator=generator) for _ in range(3))
    for window in (None, (3, 0), (0, 0)):
        whole = reference_attention(q, k, v, window=window)
        torch.testing.assert_close(reference_attention(q[-2:], k, v, window=window), whole[-2:])
    packed = reference_attention(q[[2, 3, 8]], k, v, window=(2, 0), cu_seqlens=[0, 2, 3], cu_seqlens_k=[0, 4, 9])
    torch.testing.assert_close(packed, reference_attention(q, k, v, window=(2, 0), cu_seqlens=[0, 4, 9])[[2, 3, 8]])


def check_split(spec: AttentionSpec) -> None:
    groups = ProcessGroups.build(ParallelPlan(cp=2))
    torch.manual_seed(0)
    lengths = (8, 12) if spec.packed else (16, 16)
    q, k, v, grad = (torch.randn(sum(lengths), heads, WIDTH, dtype=torch.float64) for heads in (HEADS, 2, 2, HEADS))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    truth = reference_attention(*leaves, window=spec.window, cu_seqlens=bounds)
    truth.backward(grad)
    mine = zigzag_indices(lengths, 2, groups.cp.rank)
    step = Step.causal(2, 8) if not spec.packed else dataclasses.replace(Step.causal(1, 10), cu_seqlens=bounds)
    for core in (choose_attention(spec, groups), ContextParallelBuilder("a2a").build_core(spec, groups, 0)):
        parts = [x[mine].requires_grad_() for x in (q, k, v)]
        out = core(*parts, 0, step)
        out.backward(grad[mine])
        torch.testing.assert_close(out, truth[mine], rtol=1e-9, atol=1e-11)
        for part, leaf in zip(parts, leaves, strict=True):
            torch.testing.assert_close(part.grad, leaf.grad[mine], rtol=1e-9, atol=1e-11)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("window", [None, (0, 0), (3, 0), (-1, 0)])
@pytest.mark.parametrize("packed", [False, True])
def test_windows_over_split_sequences(world, window: tuple[int, int] | None, packed: bool) -> None:
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=2, head_dim=WIDTH, window=window, packed=packed, dtype=torch.float64, device="cpu"
    )  # fmt: skip
    world(check_split, spec=spec)


@pytest.mark.journey
def test_flex_makes_a_mask_once_for_equal_lengths_and_compiles_one_kernel_for_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.compile(flex_attention, fullgraph=True, backend="eager")
    monkeypatch.setattr("mcore_parallel.nn.attention._flex._unfused", kernel)
    counters = torch._dynamo.utils.counters["stats"]
    before, compiled, masks = counters["unique_graphs"], [], []
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=8, packed=True, training=False, dtype=torch.float32, device="cpu")
    for left, lengths in ((30, (100, 1, 99)), (30, (100, 1, 99)), (50, (100, 1, 99)), (50, (120, 80))):
        q, k, v = (torch.randn(200, heads, 8) for heads in (2, 1, 1))
        step = dataclasses.replace(Step.causal(1, 200), cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
        core = choose_attention(dataclasses.replace(spec, window=(left, 0)), ONE, "flex")
        assert isinstance(core, FlexAttention)
        with torch.no_grad():
            found = [core(q, k, v, layer, step) for layer in range(2)]
        wanted = reference_attention(q, k, v, window=(left, 0), cu_seqlens=step.cu_seqlens)
        torch.testing.assert_close(found, [wanted, wanted], rtol=2e-5, atol=2e-5)
        compiled.append(counters["unique_graphs"] - before)
        masks.append(core._mask.cache_info().misses)
    assert masks == [1, 1, 1, 1] and compiled == [1, 1, 1, 1]
