# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The first GEMM of experts with gather and activation, against one matmul and one activation an expert."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.backends import gathered_swiglu, has_gathered_kernel
from mcore_parallel.tensor_parallel import MainGradient
from tests.support.expert_rows import ends_of

COUNTS = [[5, 0, 33, 1], [0, 0, 0, 20], [0, 0, 0, 0]]
ON_HOPPER = [[300, 0, 1, 128], [0, 0, 0, 700], [127, 129, 256, 255]]


class Rows:
    """Rows of random tokens, some of which have several and some none."""

    def __init__(self, num_tokens: int, num_rows: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(num_rows)
        self.tokens_R = torch.randint(num_tokens, (num_rows,), generator=generator, dtype=torch.int32).to(device)
        self.num_tokens = num_tokens

    def gather(self, x_TD: Tensor) -> Tensor:
        return x_TD[self.tokens_R.long()]

    def sum(self, rows_RD: Tensor) -> Tensor:
        return rows_RD.new_zeros(self.num_tokens, rows_RD.shape[1]).index_add_(0, self.tokens_R.long(), rows_RD)


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
    order = Rows(40, rows + spare, device)
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
    from mcore_parallel.backends import _gluon_gathered
    from tests.support.hopper import CompiledLaunches

    table, product = (CompiledLaunches(getattr(_gluon_gathered, f"_{name}_kernel")) for name in ("tile_table", "gathered_swiglu"))
    monkeypatch.setattr(_gluon_gathered, "_tile_table_kernel", table)
    monkeypatch.setattr(_gluon_gathered, "_gathered_swiglu_kernel", product)
    x, weight = torch.zeros(8, 2048).bfloat16(), torch.zeros(1, 2, 8, 2048).bfloat16().expand(128, 2, 8, 2048).contiguous()
    _gluon_gathered.gathered_swiglu(x, torch.zeros(9).int(), weight, torch.full((128,), 9).int(), torch.zeros(9), keep=True)
    assert len(table.ptx) == 1
    # Two warpgroups with the widest instruction, and registers that move from the warps that copy to them.
    assert product.ptx[0].count("wgmma.mma_async.sync.aligned.m64n256k16") == 8 and "setmaxnreg.inc" in product.ptx[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
@pytest.mark.parametrize("counts", ON_HOPPER, ids=str)
@pytest.mark.parametrize(("width", "depth"), [(128, 64), (200, 512), (768, 192)])
def test_the_kernel_gives_results_and_gradients_of_float64(counts: list[int], width: int, depth: int) -> None:
    device = torch.device("cuda")
    assert has_gathered_kernel(torch.zeros(1, depth, device=device).bfloat16(), torch.zeros(4, 2, width, depth).bfloat16(), sum(counts))
    runs = [results(counts, torch.bfloat16, device, width=width, depth=depth, main=main) for main in (False, True)]
    for found, expected in runs:
        for ours, reference in zip(found, expected, strict=True):
            assert ((ours - reference).norm() / reference.norm().clamp(min=1e-30)).item() < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
def test_the_kernel_leaves_rows_of_no_expert_and_has_the_same_bits_twice() -> None:
    from mcore_parallel.backends import _gluon_gathered

    device = torch.device("cuda")
    order, ends = Rows(500, 2000, device), ends_of([700, 0, 30, 900], device)
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(*size, device=device, generator=generator).bfloat16() for size in ((500, 256), (4, 2, 384, 256)))
    row_weights = torch.rand(2000, device=device, generator=generator)
    runs = [
        _gluon_gathered.gathered_swiglu(x, order.tokens_R, weight, ends, row_weights, keep=keep) for keep in (True, True, False)
    ]
    assert runs[2][1] is None and all(torch.equal(runs[0][0][:1630], y[:1630]) for y, _ in runs[1:])
    pre = runs[0][1]
    assert pre is not None and runs[1][1] is not None and torch.equal(pre[:1630], runs[1][1][:1630])
    gate, value = pre[:1630].float().chunk(2, -1)
    expected = (F.silu(gate) * value * row_weights[:1630, None]).bfloat16()
    # The same formula with other roundings of its exponential.
    torch.testing.assert_close(runs[0][0][:1630], expected, rtol=2**-7, atol=1e-6)
