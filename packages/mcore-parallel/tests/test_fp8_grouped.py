# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Grouped GEMMs in fp8 on the CPU: the values that the units get, multiplied in float32 or float64."""

import dataclasses
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.backends import (
    Fp8Config,
    Fp8GroupedProducts,
    choose_backend,
    grouped_matmul,
    grouped_widened_product,
    row_ranges,
)
from mcore_parallel.backends._quantize import LEAST_AMAX, Scaled, quantize, quantize_rows
from mcore_parallel.backends._quantize_groups import (
    TILE,
    ScaledColumns,
    grouped_scaled_product,
    grouped_scaled_weight_gradient,
    quantize_groups,
    quantize_weights,
    tiled_ends,
)
from mcore_parallel.nn import TorchLayers
from mcore_parallel.tensor_parallel import MainGradient
from tests.support.expert_rows import ends_of
from tests.support.interpreter import run_interpreted

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
ROWS = [[5, 0, 20, 1], [0, 0, 0, 0], [0, 40, 0, 0]]


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("rows", ROWS)
def test_each_expert_has_its_own_scale_and_foreign_rows_are_not_looked_at(rows: list[int]) -> None:
    ends, total = ends_of(rows, CPU), sum(rows)
    x = torch.randn(total + 3, 32) * torch.logspace(-2, 2, total + 3)[:, None]
    x[total:] = float("nan")
    found, columns = quantize_groups(x, ends, E4M3, columns=True)
    assert columns is not None
    sizes = [-(-count // TILE) * TILE for count in rows]
    assert columns.ends_N.tolist() == list(accumulate(sizes)) and columns.data_KC.shape[1] >= sum(sizes)
    for expert, ((begin, end), (place, behind)) in enumerate(
        zip(row_ranges(ends, len(x)), row_ranges(columns.ends_N, columns.data_KC.shape[1]), strict=True)
    ):
        wanted, _ = quantize(x[begin:end], E4M3)
        assert wanted is not None
        assert torch.equal(found.data[begin:end].float(), wanted.data.float())
        if begin < end:
            assert columns.inverse_N[expert] == wanted.inverse and bool((found.inverse[begin:end] == wanted.inverse).all())
        padded = columns.data_KC[:, place:behind].float()
        assert torch.equal(padded[:, : end - begin], wanted.data.float().t()) and not padded[:, end - begin :].any()


def test_weights_have_one_scale_an_expert_and_a_transpose() -> None:
    weight = torch.randn(3, 16, 32) * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    forth, back = quantize_weights(weight, E4M3)
    for expert in range(3):
        wanted, _ = quantize(weight[expert], E4M3)
        assert wanted is not None and torch.equal(forth.data[expert].float(), wanted.data.float())
        assert bool((forth.inverse[expert] == wanted.inverse).all()) and bool((back.inverse[expert] == wanted.inverse).all())
    assert torch.equal(back.data.float(), forth.data.float().transpose(1, 2)) and back.data.is_contiguous()
    assert forth.inverse.shape == (3, 16, 1) and back.inverse.shape == (3, 32, 1)


def results(products: Fp8GroupedProducts | None, x: Tensor, weight: Tensor, ends: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of rows and weights; of rows that are somebody's."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    y = grouped_matmul(x, weight, ends) if products is None else products.matmul(x, weight, ends)
    total = int(ends[-1])
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
    return [y[:total].detach(), grad_x[:total], grad_weight]


@pytest.mark.parametrize(
    "config", [Fp8Config(), Fp8Config(recipe="rowwise"), Fp8Config(gradient_format="e4m3"), Fp8Config(weight_gradients=False)]
)
@pytest.mark.parametrize("rows", ROWS)
def test_matmul_is_the_product_of_quantised_factors_an_expert(rows: list[int], config: Fp8Config) -> None:
    torch.manual_seed(0)
    x, grad = (torch.randn(sum(rows) + 2, width, dtype=torch.float64) for width in (32, 48))
    weight, ends = torch.randn(4, 48, 32, dtype=torch.float64), ends_of(rows, CPU)
    products = Fp8GroupedProducts(config)
    found, plain = results(products, x, weight, ends, grad), results(None, x, weight, ends, grad)
    for expert, (begin, end) in enumerate(row_ranges(ends, len(x))):
        part, grads, matrix = x[begin:end], grad[begin:end], weight[expert]
        if config.recipe == "rowwise":
            qx, qw, qg, qb = (quantize_rows(t, E4M3).value(torch.float64) for t in (part, matrix, grads, matrix.t().contiguous()))
        else:
            formats = (E4M3, E4M3, products.gradient_dtype)
            qx, qw, qg = (quantize(t, kind)[0].value(torch.float64) for t, kind in zip((part, matrix, grads), formats, strict=True))
            qb = qw.t()
        torch.testing.assert_close(found[0][begin:end], qx @ qw.t(), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found[1][begin:end], qg @ qb.t(), rtol=1e-10, atol=1e-10)
        wanted = qg.t() @ qx if products.narrow_weight_gradients else grads.t() @ part
        torch.testing.assert_close(found[2][expert], wanted, rtol=1e-10, atol=1e-10)
    if sum(rows):
        assert all(1e-3 < relative(a, b) < 0.1 for a, b in zip(found[:2], plain[:2], strict=True)) and relative(found[2], plain[2]) < 0.1


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_weight_gradients_are_added_to_the_main_gradient(recipe: str) -> None:
    products, ends = Fp8GroupedProducts(Fp8Config(recipe=recipe)), ends_of([5, 0, 20, 1], CPU)
    x, weight, grad = torch.randn(26, 32), torch.randn(4, 48, 32), torch.randn(26, 48)
    wanted, total = results(products, x, weight, ends, grad)[2], torch.ones(4, 48, 32)
    leaf = weight.requires_grad_()
    products.matmul(x, leaf, ends, MainGradient(total)).backward(grad)
    assert leaf.grad is None
    torch.testing.assert_close(total - 1, wanted, rtol=1e-4, atol=1e-4)


def test_casts_of_weights_are_kept_from_when_somebody_says_that_they_change() -> None:
    products, weight = Fp8GroupedProducts(Fp8Config()), torch.randn(2, 16, 16)
    assert products.weights(weight)[0] is not products.weights(weight)[0]
    products.weight_changed()
    kept = products.weights(weight)[0]
    assert products.weights(weight)[0] is kept
    weight.mul_(2)
    assert products.weights(weight)[0] is not kept
    products.weight_changed()
    assert torch.equal(products.weights(weight)[1].inverse[:, 0, 0], weight.abs().amax((1, 2)) / torch.finfo(E4M3).max)


def test_layers_choose_by_their_features_and_the_layers_that_the_recipe_covers() -> None:
    backend, single = choose_backend("torch", fp8=Fp8Config(num_layers_at_start_in_bf16=1)), ProcessGroups.single()
    assert backend.layers(0, 2).grouped_products(32, 32, single) is None and TorchLayers().grouped_products(32, 32, single) is None
    assert isinstance(backend.layers(1, 2).grouped_products(32, 32, single), Fp8GroupedProducts)
    assert backend.layers(1, 2).grouped_products(32, 24, single) is None


def check_kernels(device: str) -> None:
    """The kernels give what the torch code does; inputs are values of the format, for the interpreter rounds others differently."""
    from mcore_parallel.backends import _triton_fp8_grouped as kernels
    from mcore_parallel.backends._triton_grouped import Tiles

    generator = torch.Generator().manual_seed(0)
    # Which holds all values of both formats.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # The interpreter runs programs one after the other.
    tiles = Tiles(rows=64, cols=64, depth=TILE, warps=4, stages=2)
    for rows, width, out in (([5, 0, 150, 1], 80, 48), ([0, 0], 32, 16), ([0, 128, 3], 160, 144)):
        ends, total = ends_of(rows, CPU), sum(rows)
        x, grad = (torch.randn(total + 2, size, generator=generator).mul(20).to(E4M3).float() for size in (width, out))
        weight = torch.randn(len(rows), out, width, generator=generator).mul(20).to(E4M3).float()
        for given in (x, grad, weight.flatten(0, 1)):
            given[:, 0] = 448.0
        x[total:] = float("inf")
        there = ends.to(device)
        factors = []
        for given, kind in ((x, E4M3), (grad, E5M2)):
            given = given if kind == E4M3 else given.to(E5M2).float().clamp(-57344, 57344) * 128
            plain, columns = quantize_groups(given, ends, kind, columns=True)
            assert columns is not None
            amax = kernels.amax_of_experts(given.to(device, dtype), there)
            inverse = amax.clamp(min=LEAST_AMAX) / torch.finfo(kind).max
            assert torch.equal(inverse.cpu(), columns.inverse_N)
            data, scales, turned = kernels.cast_experts(
                given.to(device, dtype), there, tiled_ends(there), inverse, kind, tile=TILE, columns=columns.data_KC.shape[1], size=None
            )
            used = int(columns.ends_N[-1])
            assert torch.equal(data[:total].cpu().view(torch.uint8), plain.data[:total].view(torch.uint8))
            assert torch.equal(scales[:total].cpu(), plain.inverse[:total, 0])
            assert turned is not None
            assert torch.equal(turned[:, :used].cpu().view(torch.uint8), columns.data_KC[:, :used].view(torch.uint8))
            factors.append((plain, columns))
        forth, back = quantize_weights(weight, E4M3)
        flat, each = weight.flatten(0, 1).to(device, dtype), ends_of([out] * len(rows), CPU).to(device)
        data, _, turned = kernels.cast_experts(
            flat, each, tiled_ends(each), forth.inverse[:, 0, 0].to(device), E4M3, tile=TILE, columns=None, size=out
        )
        assert turned is not None and torch.equal(turned.cpu().view(torch.uint8), back.data.view(torch.uint8))
        assert torch.equal(data.view_as(forth.data).cpu().view(torch.uint8), forth.data.view(torch.uint8))
        for fast in (False, True):
            for (left, _), right in zip(factors, (forth, back), strict=True):
                check_product(kernels, left, right, ends, fast, tiles, device)
                check_product(kernels, left, right, ends, fast, dataclasses.replace(tiles, turned=True), device)
        check_widened(kernels, x.to(dtype), forth, ends, tiles, device)
        check_weight_gradient(kernels, factors[1][1], factors[0][1], torch.randn(len(rows), out, width, generator=generator), tiles, device)


def check_product(kernels, left: Scaled, right: Scaled, ends: Tensor, fast: bool, tiles, device: str) -> None:
    inverse = right.inverse.squeeze(2).contiguous()
    found = kernels.grouped_scaled_product(
        left.data.to(device), left.inverse.squeeze(1).to(device), right.data.to(device), inverse.to(device), ends.to(device),
        torch.float32, fast=fast, tiles=tiles,
    )  # fmt: skip
    wanted = grouped_scaled_product(left, right, ends, torch.float64)
    total = int(ends[-1])
    assert found.shape == wanted.shape
    assert not total or relative(found[:total].cpu(), wanted[:total]) < (1e-2 if fast and device == "cuda" else 1e-3)


def check_widened(kernels, x: Tensor, weight: Scaled, ends: Tensor, tiles, device: str) -> None:
    """Rows in their own dtype by weights in fp8, by tiles of rows of every size."""
    (num_experts, out, _), total = weight.data.shape, int(ends[-1])
    inverse = torch.logspace(-3, 0, out).expand(num_experts, out)
    wanted = grouped_widened_product(x.double(), Scaled(weight.data, inverse.unsqueeze(2)), ends)
    for rows, turned in ((16, False), (tiles.rows, False), (tiles.rows, True)):
        product = kernels.grouped_widened_product(
            x.to(device),
            weight.data.to(device),
            inverse.contiguous().to(device),
            ends.to(device),
            tiles=dataclasses.replace(tiles, rows=rows, turned=turned),
        )
        assert product.shape == wanted.shape and product.dtype == x.dtype
        assert not total or relative(product[:total].cpu(), wanted[:total]) < (1e-2 if device == "cuda" else 1e-6)


def check_weight_gradient(kernels, grad: ScaledColumns, x: ScaledColumns, start: Tensor, tiles, device: str) -> None:
    for add in (False, True):
        found, wanted = start.to(device, copy=True), start.double()
        inverse = (grad.inverse_N * x.inverse_N).to(device)
        kernels.grouped_scaled_weight_gradient(
            grad.data_KC.to(device), x.data_KC.to(device), grad.ends_N.to(device), inverse, found, add=add, tiles=tiles
        )
        grouped_scaled_weight_gradient(grad, x, wanted, add=add)
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-3, atol=1e-3 * (1 + wanted.abs().max().item()))


@pytest.mark.journey
def test_kernels_equal_the_torch_code_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "depth", "out"),
    [(8, 768, 2048), pytest.param(2048, 136, 40, marks=pytest.mark.journey), pytest.param(8192, 2048, 1536, marks=pytest.mark.journey)],
)
def test_products_of_rows_by_fp8_weights_compile_for_hopper(
    dtype: torch.dtype, rows: int, depth: int, out: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.backends import _triton_fp8_grouped as kernels
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = CompiledLaunches(kernels._product_kernel)
    monkeypatch.setattr(kernels, "_product_kernel", launches)
    weight, ends = torch.zeros((), dtype=E4M3).expand(64, out, depth), torch.zeros(64, dtype=torch.int32)
    y = kernels.grouped_widened_product(torch.zeros((), dtype=dtype).expand(rows, depth), weight, torch.ones(()).expand(64, out), ends)
    assert y.shape == (rows, out) and len(launches.shared_bytes) == 1


def test_rows_by_fp8_weights_are_the_product_of_what_these_stand_for() -> None:
    weight = quantize_rows(torch.randn(3 * 8, 24, dtype=torch.float64), E4M3, powers_of_two=True)
    stacked, ends = Scaled(weight.data.view(3, 8, 24), weight.inverse.view(3, 8, 1)), ends_of([2, 0, 3], CPU)
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(7, 24, dtype=dtype)
        found, wide = grouped_widened_product(x, stacked, ends), weight.value(dtype).view(3, 8, 24)
        assert torch.equal(found[:5], torch.cat([x[:2] @ wide[0].t(), x[2:5] @ wide[2].t()]))
    assert grouped_widened_product(x[:0], stacked, ends_of([0, 0, 0], CPU)).shape == (0, 8)
    # Scales that float16 does not hold.
    small = Scaled(stacked.data, torch.full_like(stacked.inverse, 2.0**-20))
    assert grouped_widened_product(torch.ones(5, 24, dtype=torch.float16), small, ends)[:5].float().abs().sum() > 0


if __name__ == "__main__":
    check_kernels("cpu")
    print("same")
