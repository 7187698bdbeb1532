# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Kernels of the adapters of few tokens, against two products in float64."""

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import run_interpreted

# Tokens, inputs, outputs, slots, rank: one token; more tokens than a tile has by default; several parts of the sum; an odd rank and widths.
SIZES = ((1, 64, 64, 1, 16), (20, 200, 72, 3, 8), (64, 2048, 128, 4, 16), (5, 1100, 100, 3, 33))


def check(sizes: tuple[int, ...], device: str, dtype: torch.dtype, tolerance: float) -> None:
    from mcore_inference.adapters._triton import add_few

    tokens, inputs, outputs, slots, rank = sizes
    generator = torch.Generator().manual_seed(sum(sizes))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    x, y, A, B = draw(tokens, inputs), draw(tokens, 2 * outputs)[:, :outputs], draw(slots * rank, inputs), draw(outputs, slots * rank)
    # One slot is nobody's, and what it holds is not even read.
    A[-rank:], B[:, -rank:] = torch.nan, torch.nan
    chosen = torch.randint(-1, max(slots - 1, 1), (tokens,), generator=generator, dtype=torch.int32).to(device)
    if slots == 1:
        chosen.fill_(-1)
    before, behind = y.clone(), y._base[:, outputs:].clone() if y._base is not None else None
    add_few(y, x, A, B, chosen, rank)
    if behind is not None:
        assert y._base is not None and torch.equal(y._base[:, outputs:], behind)
    for token, slot in enumerate(chosen.tolist()):
        if slot < 0:
            assert torch.equal(y[token], before[token])
            continue
        own = slice(slot * rank, (slot + 1) * rank)
        wanted = before[token].double() + B[:, own].double() @ (A[own].double() @ x[token].double())
        error = float((y[token].double() - wanted).norm() / (wanted - before[token].double()).norm())
        assert error < tolerance, (sizes, token, error)


def test_kernels_equal_the_products_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [*SIZES, (32, 14336, 4096, 8, 16), (64, 4096, 24576, 2, 128), (64, 2048, 3072, 1, 200)])
def test_kernels_equal_the_products_on_a_gpu(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    check(sizes, "cuda", dtype, 0.01)


def test_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mcore_inference.adapters import _triton
    from tests.support.hopper import CompiledLaunches

    launches = {}
    for name in ("_shrink_kernel", "_expand_kernel"):
        launches[name] = CompiledLaunches(getattr(_triton, name))
        monkeypatch.setattr(_triton, name, launches[name])
    place = {"dtype": torch.bfloat16}
    for tokens, slots, rank in ((1, 4, 16), (64, 2, 128), (64, 1, 200)):
        y, x = torch.zeros(tokens, 4096, **place), torch.zeros(tokens, 2048, **place)
        A, B = torch.zeros(slots * rank, 2048, **place), torch.zeros(4096, slots * rank, **place)
        _triton.add_few(y, x, A, B, torch.zeros(tokens, dtype=torch.int32), rank)
    assert all(len(launch.ptx) == 3 for launch in launches.values())


if __name__ == "__main__":
    for each in SIZES:
        check(each, "cpu", torch.float32, 1e-5)
    print("same")
