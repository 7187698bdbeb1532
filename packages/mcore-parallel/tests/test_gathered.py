# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The first GEMM of experts with gather and activation, against one matmul and one activation an expert."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.backends import gathered_swiglu, grouped_matmul, has_gathered_kernel
from mcore_parallel.backends._grouped import is_kernel_faster
from mcore_parallel.nn import Activation
from mcore_parallel.tensor_parallel import MainGradient
from tests.support.expert_rows import ends_of

COUNTS = [[5, 0, 33, 1], [0, 0, 0, 20], [0, 0, 0, 0]]
ON_HOPPER = [[900, 0, 1, 128], [0, 0, 0, 1100], [127, 129, 256, 512]]


class Rows:
    """Rows of random tokens, some of which have several and some none; those behind ``num_used`` belong to no expert."""

    def __init__(self, num_tokens: int, num_rows: int, device: torch.device, num_used: int | None = None) -> None:
        generator = torch.Generator().manual_seed(num_rows)
        self.tokens_R = torch.randint(num_tokens, (num_rows,), generator=generator, dtype=torch.int32).to(device)
        self.num_tokens, self.num_used = num_tokens, num_used

    def gather(self, x_TD: Tensor) -> Tensor:
        return x_TD[self.tokens_R.long()]

    def sum(self, rows_RD: Tensor) -> Tensor:
        wide = torch.promote_types(rows_RD.dtype, torch.float32)
        sums_TD = torch.zeros(self.num_tokens, rows_RD.shape[1], dtype=wide, device=rows_RD.device)
        return sums_TD.index_add_(0, self.tokens_R[: self.num_used].long(), rows_RD[: self.num_used].to(wide)).to(rows_RD.dtype)


def results(
    counts: list[int], dtype: torch.dtype, device: torch.device, *, width: int, depth: int, main: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Result and gradients of tokens, weights of rows and stack: ours, and those of float64."""
    generator = torch.Generator().manual_seed(0)
    rows, spare = sum(counts), 3
    x = torch.randn(40, depth, generator=generator).to(dtype)
    weight = (torch.randn(len(counts), 2, width, depth, generator=generator) / depth**0.5).to(dtype)
    row_weights = torch.rand(rows + spare, generator=generator).to(torch.promote_types(dtype, torch.float32))
    grad = torch.randn(rows + spare, width, generator=generator).to(dtype)
    # Rows behind the last expert have no gradient.
    grad[rows:] = 0
    leaves = [tensor.to(device).detach().clone().requires_grad_() for tensor in (x, row_weights, weight)]
    order = Rows(40, rows + spare, device, rows)
    total = torch.zeros(weight.shape, device=device) if main else None
    y = gathered_swiglu(leaves[0], leaves[2], ends_of(counts, device), leaves[1], order, None if total is None else MainGradient(total))
    y.backward(grad.to(device))
    assert (leaves[2].grad is None) == main
    ours = [y[:rows].detach(), *(leaf.grad if leaf.grad is not None else total for leaf in leaves)]
    wide = [tensor.double().detach().clone().requires_grad_() for tensor in (x, row_weights, weight)]
    parts = wide[0][order.tokens_R.cpu().long()][:rows].split(counts)
    products = [part @ stack.flatten(0, 1).T for part, stack in zip(parts, wide[2], strict=True)]
    gates, values = torch.cat(products).chunk(2, -1)
    expected = F.silu(gates) * values * wide[1][:rows, None]
    expected.backward(grad[:rows].double())
    found = [tensor.cpu().double() for tensor in ours if tensor is not None]
    return found, [expected.detach(), *(leaf.grad for leaf in wide if leaf.grad is not None)]


@pytest.mark.parametrize("main", [False, True], ids=["autograd", "main gradient"])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_results_and_gradients_are_those_of_one_matmul_an_expert(counts: list[int], main: bool) -> None:
    found, expected = results(counts, torch.float64, torch.device("cpu"), width=6, depth=10, main=main)
    for ours, reference in zip(found, expected, strict=True):
        # The main gradient is in float32.
        torch.testing.assert_close(ours, reference, rtol=1e-5 if main else 1e-10, atol=1e-5 if main else 1e-12)


def test_no_kernel_on_a_processor() -> None:
    assert not has_gathered_kernel(torch.zeros(2, 64).bfloat16(), torch.zeros(2, 2, 8, 64).bfloat16(), 10**6)


def test_the_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.backends import _gluon_grouped
    from tests.support.hopper import CompiledLaunches

    table, product = (CompiledLaunches(getattr(_gluon_grouped, f"_{name}_kernel")) for name in ("tile_table", "grouped"))
    monkeypatch.setattr(_gluon_grouped, "_tile_table_kernel", table)
    monkeypatch.setattr(_gluon_grouped, "_grouped_kernel", product)
    x, weight, ends = torch.zeros(8, 512).bfloat16(), torch.zeros(4, 2, 256, 512).bfloat16(), ends_of([4, 4, 0, 1])
    _gluon_grouped.gathered_swiglu(x, torch.zeros(9).int(), weight, ends, torch.zeros(9), keep=True)
    for turned in (False, True):
        _gluon_grouped.grouped_product(x, weight.flatten(1, 2), ends, turned=turned)
    # Two warpgroups with the widest instruction, and registers that move from the warps that copy to them.
    assert len(product.ptx) == 3 and len(table.ptx) == 3
    assert all(ptx.count("wgmma.mma_async.sync.aligned.m64n256k16") == 8 and "setmaxnreg.inc" in ptx for ptx in product.ptx)


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"),
]


def on_hopper(test: Any) -> Any:
    for mark in ON_GPU:
        test = mark(test)
    return test


@on_hopper
@pytest.mark.parametrize("counts", ON_HOPPER, ids=str)
@pytest.mark.parametrize(("width", "depth"), [(256, 256), (328, 512), (768, 320)])
def test_the_gathering_kernel_gives_results_and_gradients_of_float64(counts: list[int], width: int, depth: int) -> None:
    device = torch.device("cuda")
    x, weight = torch.zeros(1, depth, device=device).bfloat16(), torch.zeros(4, 2, width, depth, device=device).bfloat16()
    assert has_gathered_kernel(x, weight, sum(counts))
    for main in (False, True):
        for ours, reference in zip(*results(counts, torch.bfloat16, device, width=width, depth=depth, main=main), strict=True):
            assert relative(ours, reference) < 1e-2


@on_hopper
@pytest.mark.parametrize("counts", ON_HOPPER, ids=str)
@pytest.mark.parametrize(("depth", "out"), [(256, 264), (328, 512), (768, 256)])
def test_products_by_the_kernel_are_those_of_float64_each_way(counts: list[int], depth: int, out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((sum(counts), depth), (len(counts), out, depth), (sum(counts), out))
    x, weight, grad = (torch.randn(*size, generator=generator).bfloat16() for size in sizes)
    assert is_kernel_faster(x.cuda(), len(x), weight.cuda())
    leaves = [tensor.cuda().requires_grad_() for tensor in (x, weight)]
    y = grouped_matmul(*leaves, ends_of(counts, torch.device("cuda")))
    y.backward(grad.cuda())
    wide = [tensor.double().requires_grad_() for tensor in (x, weight)]
    expected = torch.cat([part @ stack.T for part, stack in zip(wide[0].split(counts), wide[1], strict=True)])
    expected.backward(grad.double())
    for ours, reference in ((y, expected), *((leaf.grad, leaf_64.grad) for leaf, leaf_64 in zip(leaves, wide, strict=True))):
        assert relative(ours.detach().cpu().double(), reference.detach()) < 1e-2


@on_hopper
def test_the_kernels_have_the_same_bits_twice_and_the_activation_that_of_the_results_kept() -> None:
    from mcore_parallel.backends import _gluon_grouped

    device, num_rows = torch.device("cuda"), 1630
    order, ends = Rows(500, 2000, device), ends_of([700, 0, 30, 900], device)
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(*size, device=device, generator=generator).bfloat16() for size in ((500, 256), (4, 2, 384, 256)))
    row_weights = torch.rand(2000, device=device, generator=generator)
    runs = [_gluon_grouped.gathered_swiglu(x, order.tokens_R, weight, ends, row_weights, keep=keep) for keep in (True, True, False)]
    pre, again, none = (pre if pre is None else pre[:num_rows] for _, pre in runs)
    assert none is None and pre is not None and again is not None and torch.equal(pre, again)
    assert all(torch.equal(runs[0][0][:num_rows], y[:num_rows]) for y, _ in runs[1:])
    # Gates and values are the GEMM of the rows in order, and the result is what the activation makes of them.
    ordered = _gluon_grouped.grouped_product(order.gather(x), weight.flatten(1, 2), ends, turned=False)
    assert torch.equal(ordered[:num_rows], pre)
    expected = Activation(name="swiglu")(pre, weights=row_weights[:num_rows])
    torch.testing.assert_close(runs[0][0][:num_rows], expected, rtol=2**-7, atol=1e-6)


def relative(ours: Tensor, reference: Tensor) -> float:
    return ((ours - reference).norm() / reference.norm().clamp(min=1e-30)).item()
