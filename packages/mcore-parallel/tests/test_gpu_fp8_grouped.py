# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Grouped GEMMs in fp8 on a GPU against those of the same values on the CPU."""

import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_parallel.backends import Fp8Config, Fp8GroupedProducts, grouped_matmul
from mcore_parallel.tensor_parallel import MainGradient
from tests.support.expert_rows import ends_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"),
]
CONFIGS = [
    Fp8Config(),
    Fp8Config(recipe="rowwise"),
    Fp8Config(gradient_format="e4m3"),
    Fp8Config(recipe="rowwise", gradient_format="e5m2"),
]
ROWS = [[64, 0, 17, 175], [0, 0, 0, 256], [1, 2, 3, 250], [0, 0, 0, 0]]


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double().cpu() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)).item()


def results(config: Fp8Config | None, x: Tensor, weight: Tensor, rows: list[int], grad: Tensor) -> list[Tensor]:
    x, weight, ends = x.detach().requires_grad_(), weight.detach().requires_grad_(), ends_of(rows, x.device)
    y = grouped_matmul(x, weight, ends) if config is None else Fp8GroupedProducts(config).matmul(x, weight, ends)
    grad_x, grad_weight = torch.autograd.grad(y, (x, weight), grad)
    return [y[: sum(rows)].detach(), grad_x[: sum(rows)], grad_weight]


def test_kernels_give_what_the_torch_code_does() -> None:
    runpy.run_path(str(Path(__file__).with_name("test_fp8_grouped.py")))["check_kernels"]("cuda")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.recipe}-{config.gradient_format}")
@pytest.mark.parametrize("rows", ROWS)
def test_units_give_what_the_emulation_does(rows: list[int], config: Fp8Config) -> None:
    torch.manual_seed(0)
    x, grad, weight = torch.randn(sum(rows) + 3, 256), torch.randn(sum(rows) + 3, 384), torch.randn(4, 384, 256)
    x, grad, weight = (t.bfloat16() for t in (x, grad, weight))
    found = results(config, x.cuda(), weight.cuda(), rows, grad.cuda())
    # float32 sums; the factors are those of bfloat16.
    wanted = results(config, x.float(), weight.float(), rows, grad.float())
    assert all(relative(a, b) < 1e-2 for a, b in zip(found, wanted, strict=True))
    exact = results(None, x.float(), weight.float(), rows, grad.float())
    assert all(relative(a, b) < 0.08 for a, b in zip(found, exact, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: config.recipe)
def test_nothing_waits_for_the_device_and_the_same_bits_come_twice(config: Fp8Config) -> None:
    rows = [700, 0, 30, 294]
    x, grad = torch.randn(1024, 512, device="cuda").bfloat16(), torch.randn(1024, 768, device="cuda").bfloat16()
    weight, ends = torch.randn(4, 768, 512, device="cuda").bfloat16().requires_grad_(), ends_of(rows, x.device)
    products, seen = Fp8GroupedProducts(config), []
    products.weight_changed()
    for turn in range(3):
        leaf, total = x.clone().requires_grad_(), torch.zeros(4, 768, 512, device="cuda")
        torch.cuda.synchronize()
        # The first turn compiles kernels.
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            y = products.matmul(leaf, weight, ends, MainGradient(total))
            y.backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert leaf.grad is not None and weight.grad is None
        seen.append([y.detach(), leaf.grad, total])
    assert all(torch.equal(a, b) for again in seen[1:] for a, b in zip(seen[0], again, strict=True))
