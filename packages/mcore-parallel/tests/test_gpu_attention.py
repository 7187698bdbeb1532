# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every attention core of the registry on a GPU against the definition in float64, and what windows cost there."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import AttentionSpec, Step, attention_capabilities, choose_attention, reference_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Of Transformer Engine and of torch's compiler, about themselves.
    pytest.mark.filterwarnings("default"),
]
ONE = ProcessGroups.single()
HEADS, EQUAL, PACKED = 8, (512, 512), (200, 1, 611, 212)
ROWS = {row.backend: row for row in attention_capabilities()}


def spec(head_dim: int, kv_heads: int, window: tuple[int, int] | None = None, **options: object) -> AttentionSpec:
    return AttentionSpec(num_heads=HEADS, num_kv_heads=kv_heads, head_dim=head_dim, window=window, **options)


CASES = [
    spec(64, 8),
    spec(128, 2),
    spec(64, 2, packed=True),
    spec(128, 8, dtype=torch.float32),
    spec(128, 2, (100, 0)),
    spec(64, 8, (70, 0), packed=True),
    spec(128, 2, (0, 0), softmax_type="off-by-one"),
    spec(128, 2, (100, 0), softmax_type="learnable"),
    spec(64, 2, (300, 0), softmax_type="learnable", packed=True),
    spec(64, 8, softmax_type="learnable", softmax_scale=0.3),
    spec(64, 2, (100, 0), softmax_type="learnable", dtype=torch.float32),
    spec(128, 2, (40, 20), causal=False),
    spec(64, 8, causal=False, packed=True),
    spec(64, 8, value_dim=32),
]
# Those that need code of their own: each is compiled for seconds.
COMPILED = [1, 5, 8, 10, 11]


def name(case: AttentionSpec) -> str:
    dtype = str(case.dtype).removeprefix("torch.")
    words = [dtype, f"d{case.head_dim}-{case.width}", f"kv{case.num_kv_heads}", str(case.window), case.softmax_type]
    return "-".join([*words, *(["packed"] if case.packed else []), *([] if case.causal else ["both-ways"])])


def draw(case: AttentionSpec, lengths: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Step]:
    """q, k, v, perhaps a sink; the gradient of the output; the step."""
    generator = torch.Generator("cuda").manual_seed(0)
    T = sum(lengths)
    shapes = [(T, HEADS, case.head_dim), (T, case.num_kv_heads, case.head_dim), (T, case.num_kv_heads, case.width), (HEADS,)]
    *leaves, sink, grad = (
        torch.randn(shape, generator=generator, device="cuda").to(case.dtype) for shape in (*shapes, (T, HEADS, case.width))
    )
    leaves += [sink] if case.softmax_type == "learnable" else []
    if not case.packed:
        return leaves, grad, Step.causal(len(lengths), lengths[0], device="cuda")
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return leaves, grad, dataclasses.replace(Step.causal(1, T, device="cuda"), cu_seqlens=bounds)


def results(run: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = run(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def check(backend: str, case: AttentionSpec) -> None:
    if not ROWS[backend].is_installed:
        pytest.skip(f"{backend} needs {ROWS[backend].needs}")
    leaves, grad, step = draw(case, PACKED if case.packed else EQUAL)
    core = choose_attention(case, ONE, backend)

    def ours(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        return core(q, k, v, 0, step, **({"sink": sinks[0]} if sinks else {}))

    def exact(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        sink = sinks[0] if sinks else q.new_zeros(HEADS) if case.softmax_type == "off-by-one" else None
        bounds = {"cu_seqlens": step.cu_seqlens} if case.packed else {"batch_size": len(EQUAL)}
        return reference_attention(q, k, v, causal=case.causal, window=case.window, sink=sink, scale=case.softmax_scale, **bounds)

    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-4}[case.dtype]
    found, wanted = results(ours, leaves, grad), results(exact, [leaf.double() for leaf in leaves], grad)
    assert found[0].dtype == case.dtype
    for part, one, other in zip(("output", "q", "k", "v", "sink"), found, wanted, strict=False):
        error = float((one.double() - other).norm() / other.norm().clamp(min=1e-3 * one.numel() ** 0.5))
        assert error <= tolerance * (2 if part == "sink" else 1), f"{part}: {error:.1e} above {tolerance:.0e}"


@pytest.mark.parametrize(
    ("backend", "case"),
    [(backend, case) for backend, row in ROWS.items() if backend != "flex" for case in CASES if not row.missing(case, ONE)],
    ids=lambda value: name(value) if isinstance(value, AttentionSpec) else value,
)
def test_a_core_is_as_close_to_float64_as_its_dtype_allows(backend: str, case: AttentionSpec) -> None:
    check(backend, case)


@pytest.mark.parametrize("case", [CASES[number] for number in COMPILED], ids=name)
def test_a_compiled_core_is_as_close_to_float64_as_its_dtype_allows(case: AttentionSpec) -> None:
    torch.compiler.reset()
    check("flex", case)


def test_another_window_and_other_bounds_of_packed_sequences_compile_nothing() -> None:
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before, compiled = counters["unique_graphs"], []
    for window, lengths in (((100, 0), PACKED), ((70, 0), PACKED), ((70, 0), (300, 500, 224)), ((900, 0), (1000, 24))):
        case = spec(64, 2, window, packed=True, training=False)
        (q, k, v), _, step = draw(case, lengths)
        with torch.no_grad():
            found = choose_attention(case, ONE, "flex")(q, k, v, 0, step)
            wanted = reference_attention(q.double(), k.double(), v.double(), window=window, cu_seqlens=step.cu_seqlens)
        assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()
        compiled.append(counters["unique_graphs"] - before)
    assert compiled == [1, 1, 1, 1]


def milliseconds(case: AttentionSpec, tokens: int) -> float:
    """Of the fastest of some forward and backward passes."""
    leaves, grad, step = draw(case, (tokens,))
    core = choose_attention(case, ONE)
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        results(lambda q, k, v: core(q, k, v, 0, step), leaves, grad)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


@pytest.mark.parametrize("packed", [False, True])
def test_a_window_costs_what_it_leaves(packed: bool) -> None:
    tokens = 65536
    whole, part = (milliseconds(spec(128, 2, window, packed=packed), tokens) for window in (None, (1023, 0)))
    # A thirtieth of the scores.
    assert part < whole / 6


def test_a_window_holds_no_scores() -> None:
    tokens = 65536
    leaves, grad, step = draw(spec(64, 2, (1023, 0)), (tokens,))
    core = choose_attention(spec(64, 2, (1023, 0)), ONE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results(lambda q, k, v: core(q, k, v, 0, step), leaves, grad)
    torch.cuda.synchronize()
    # The scores would be a thousand times as large as q.
    assert torch.cuda.max_memory_allocated() - before < 32 * leaves[0].nbytes
