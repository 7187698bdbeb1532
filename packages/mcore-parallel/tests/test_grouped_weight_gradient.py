# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hopper's kernel of the experts' weight gradients against one matmul an expert."""

import pytest
import torch

from mcore_parallel.backends import grouped_matmul
from mcore_parallel.tensor_parallel import MainGradient
from tests.support.expert_rows import ends_of

COUNTS = [[900, 0, 1, 128], [0, 0, 0, 1100], [127, 129, 256, 512], [63, 64, 65, 300], [0, 0, 0, 0]]


def test_the_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.backends import _gluon_weight_gradient
    from tests.support.hopper import SHARED_BYTES, CompiledLaunches

    kernel = CompiledLaunches(_gluon_weight_gradient._weight_gradient_kernel)
    monkeypatch.setattr(_gluon_weight_gradient, "_weight_gradient_kernel", kernel)
    x, ends = torch.zeros(9, 512).bfloat16(), ends_of([4, 4, 0, 1])
    for out, dtype, add in ((768, torch.float32, True), (776, torch.float32, False), (768, torch.bfloat16, False)):
        grad, total = torch.zeros(9, out).bfloat16(), torch.zeros(4, out, 512, dtype=dtype)
        _gluon_weight_gradient.grouped_weight_gradient(grad, x, ends, total, add=add)
    assert max(kernel.shared_bytes) <= SHARED_BYTES
    # Two warpgroups with the widest instruction; sums are read 16 bytes a thread.
    assert all(ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 8 for ptx in kernel.ptx)
    assert ["ld.global.v4.b32" in ptx for ptx in kernel.ptx] == [True, False, False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize(("out", "width"), [(256, 264), (328, 512), (768, 256), (1536, 2048)])
def test_sums_are_those_of_float64_and_nothing_comes_from_rows_of_none(counts: list[int], out: int, width: int) -> None:
    from mcore_parallel.backends._gluon_weight_gradient import grouped_weight_gradient

    device, rows = torch.device("cuda"), sum(counts)
    generator = torch.Generator(device).manual_seed(0)
    grad, x = (torch.randn(rows + 70, size, device=device, generator=generator).bfloat16() for size in (out, width))
    for tensor in (grad, x):
        tensor[rows:] = torch.nan
    parts = zip(grad[:rows].double().split(counts), x[:rows].double().split(counts), strict=True)
    expected = torch.stack([grad_part.T @ x_part for grad_part, x_part in parts])
    for dtype in (torch.float32, torch.bfloat16):
        before = torch.randn(expected.shape, device=device, generator=generator).to(dtype)
        for add in (True, False):
            totals = [before.clone() if add else torch.full_like(before, torch.nan) for _ in range(2)]
            for total in totals:
                grouped_weight_gradient(grad, x, ends_of(counts, device), total, add=add)
            assert torch.equal(*totals)
            torch.testing.assert_close(totals[0].double(), expected + before.double() * add, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("rows", "taken"), [(600, True), (400, False)])
def test_many_rows_an_expert_have_that_kernel_into_float32_sums_too(rows: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_parallel.backends import _gluon_weight_gradient

    sums: list[torch.dtype] = []
    kernel = _gluon_weight_gradient.grouped_weight_gradient

    def counted(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, total: torch.Tensor, *, add: bool) -> None:
        sums.append(total.dtype)
        kernel(grad, x, ends, total, add=add)

    monkeypatch.setattr(_gluon_weight_gradient, "grouped_weight_gradient", counted)
    device = torch.device("cuda")
    x, weight = (torch.randn(*size, device=device).bfloat16().requires_grad_() for size in ((rows, 256), (4, 512, 256)))
    ends = ends_of([rows // 4] * 4, device)
    for main_grad in (None, MainGradient(torch.zeros(4, 512, 256, device=device))):
        grouped_matmul(x, weight, ends, main_grad).sum().backward()
    assert sums == ([torch.bfloat16, torch.float32] if taken else [])
