# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Packed sequences behind a prefix on a GPU: the flash kernels give what the formula gives, and hold no scores."""

import dataclasses
import itertools

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import AttentionSpec, Step, choose_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS, WIDTH = 8, 64
# Lengths, and which sequence stands in front of each.
PACKINGS = [
    ((1000, 130, 64, 257), (-1, 0, 0, 0)),
    ((512, 128, 128, 512, 128, 128), (-1, 0, 0, -1, 3, 3)),
    ((300, 1, 77, 200, 150, 5, 40), (-1, 0, 0, -1, 3, 0, -1)),
]


def step_of(lengths: tuple[int, ...], prefixes: tuple[int, ...]) -> Step:
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    return dataclasses.replace(Step.causal(1, sum(lengths), "cuda"), cu_seqlens=bounds, prefixes=torch.tensor(prefixes))


@pytest.mark.parametrize(("lengths", "prefixes"), PACKINGS, ids=["unequal", "equal", "mixed"])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize(("window", "softmax_type"), [(None, "vanilla"), ((70, 0), "vanilla"), ((70, 0), "learnable")])
def test_the_flash_kernels_give_what_the_formula_gives(lengths, prefixes, kv_heads, window, softmax_type) -> None:
    spec = AttentionSpec(num_heads=HEADS, num_kv_heads=kv_heads, head_dim=WIDTH, window=window, softmax_type=softmax_type)
    backend = "sdpa" if window is None and softmax_type == "vanilla" else "context_parallel"
    core = choose_attention(spec, ProcessGroups.single(), backend)
    exact = choose_attention(dataclasses.replace(spec, dtype=torch.float64), ProcessGroups.single(), "reference")
    generator, T = torch.Generator("cuda").manual_seed(0), sum(lengths)
    shapes = ((T, HEADS, WIDTH), (T, kv_heads, WIDTH), (T, kv_heads, WIDTH), (HEADS,))
    leaves = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator, device="cuda", dtype=torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    results = []
    for attend, (q, k, v, sink), wanted in ((core, leaves, grad), (exact, wide, grad.double())):
        learnt = {"sink": sink} if softmax_type == "learnable" else {}
        out = attend(q, k, v, 0, step_of(lengths, prefixes), **learnt)
        results.append([out, *torch.autograd.grad(out, [q, k, v, *learnt.values()], wanted)])
    for found, wanted in zip(*results, strict=True):
        assert (found.double() - wanted).norm() <= 1e-2 * wanted.norm()


def test_a_long_prompt_behind_its_answers_holds_no_scores() -> None:
    """All scores of one head are 128 MiB here, in bfloat16."""
    lengths, prefixes = (4096, *(512,) * 8), (-1, *(0,) * 8)
    spec = AttentionSpec(num_heads=HEADS, num_kv_heads=HEADS, head_dim=WIDTH)
    core = choose_attention(spec, ProcessGroups.single())
    leaves = [torch.randn(sum(lengths), HEADS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    step = step_of(lengths, prefixes)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    core(*leaves, 0, step).sum().backward()
    # 8 MiB an operand, 16 in float32.
    assert torch.cuda.max_memory_allocated() - before < 256 * 2**20
