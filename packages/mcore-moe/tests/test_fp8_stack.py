# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts' weights in fp8: what is stored, what is computed, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_moe import GroupedMLP
from mcore_moe._fp8_stack import FEW_ROWS, Fp8Stack
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import Fp8Config, Scaled, choose_backend, quantize_rows
from mcore_parallel.tensor_parallel import LoraConfig

E4M3 = torch.float8_e4m3fn


def make_stack(multiply: bool, out: int = 32, width: int = 16, experts: int = 3) -> tuple[nn.Parameter, Tensor, Fp8Stack]:
    """The parameter, what it was, and how it is kept."""
    weight = nn.Parameter(torch.randn(experts, 2, out // 2, width, dtype=torch.float64) * torch.logspace(-2, 1, out // 2)[:, None])
    wide = weight.detach().clone()
    return weight, wide, Fp8Stack(weight, multiply=multiply)


def rounded(wide: Tensor) -> Tensor:
    rows = quantize_rows(wide.flatten(0, -2), E4M3, powers_of_two=True)
    return rows.value(wide.dtype).view(wide.shape)


def test_a_stack_is_rounded_in_place_with_a_scale_for_each_expert_and_output() -> None:
    weight, wide, stack = make_stack(multiply=False)
    assert weight.dtype == E4M3 and weight.shape == wide.shape and not weight.requires_grad and stack.dtype == torch.float64
    assert stack.inverse_NO1.shape == (3, 32, 1) and torch.equal(stack.inverse_NO1.log2() % 1, torch.zeros(3, 32, 1))
    assert torch.equal(stack.widened(weight, torch.float64), rounded(wide))
    addresses = weight.data_ptr(), stack.inverse_NO1.data_ptr()
    other = torch.randn_like(wide) * 5
    stack.store(weight, other)
    assert torch.equal(stack.widened(weight, torch.float64), rounded(other))
    assert (weight.data_ptr(), stack.inverse_NO1.data_ptr()) == addresses


@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize("width", [16, 24])
def test_many_rows_an_expert_are_rounded_too_if_asked_for(multiply: bool, width: int) -> None:
    weight, wide, stack = make_stack(multiply, width=width)
    for rows, sizes in ((FEW_ROWS * 3, [FEW_ROWS * 3, 0, 0]), (FEW_ROWS * 3 + 4, [1, 0, FEW_ROWS * 3]), (0, [0, 0, 0])):
        x, ends = torch.randn(rows, width, dtype=torch.float64), torch.tensor(sizes, dtype=torch.int32).cumsum(0).to(torch.int32)
        y = stack.matmul(x, weight.flatten(1, -2), ends)
        narrow = multiply and rows > FEW_ROWS * 3 and width == 16
        seen = quantize_rows(x, E4M3).value(torch.float64) if narrow else x
        of_rows = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
        wanted = torch.einsum("ri,roi->ro", seen[: len(of_rows)], rounded(wide).flatten(1, -2)[of_rows])
        torch.testing.assert_close(y[: len(of_rows)], wanted, rtol=1e-10, atol=1e-10)
        assert y.shape == (rows, 32)
        # By the features of a GEMM, in whatever shape the parameter has them.
        for shaped in (weight, weight.flatten(1, -2)):
            assert isinstance(stack.multiplied(x, shaped, rows), Scaled) == narrow


@pytest.mark.gpu
@pytest.mark.parametrize("multiply", [False, True])
@pytest.mark.parametrize("sizes", [[3, 0, 5], [100, 40, 0], [100, 0, 300]], ids=str)
def test_products_on_a_gpu_are_those_of_the_processor(multiply: bool, sizes: list[int]) -> None:
    torch.manual_seed(0)
    wide = torch.randn(3, 2, 64, 128).bfloat16() * torch.logspace(-2, 1, 64)[:, None].bfloat16()
    x, ends, total = torch.randn(sum(sizes) + 2, 128).bfloat16(), torch.tensor(sizes).cumsum(0).to(torch.int32), sum(sizes)
    # Nobody's rows are not looked at.
    x[total:] = float("nan")
    results = []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(wide.to(device))
        stack = Fp8Stack(weight, multiply=multiply)
        y = stack.matmul(x.to(device), weight.flatten(1, -2), ends.to(device))[:total]
        results += [y.double().cpu(), stack.inverse_NO1.cpu(), weight.detach().view(torch.uint8).cpu()]
    (y, *stored), (y_gpu, *stored_gpu) = results[:3], results[3:]
    assert all(torch.equal(one, other) for one, other in zip(stored, stored_gpu, strict=True))
    # The same values are multiplied, and sums rounded to bfloat16 once (8 bits).
    assert (y_gpu - y).norm() < 1e-2 * y.norm()


def make_experts(**fields: Any) -> GroupedMLP:
    experts = GroupedMLP(3, 16, 32, ProcessGroups.single(), dtype=torch.float64, **fields)
    for name, parameter in experts.named_parameters():
        nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return experts


@pytest.mark.parametrize("fields", [{}, {"activation": "gelu", "bias": True}], ids=str)
@torch.no_grad()
def test_experts_compute_with_what_their_weights_stand_for(fields: dict[str, Any]) -> None:
    plain, narrow = make_experts(**fields), make_experts(**fields)
    for weight in (plain.up, plain.down):
        weight.copy_(rounded(weight))
    narrow.store_in_fp8(multiply=False)
    assert set(narrow.fp8) == {"up", "down"} and not plain.fp8 and narrow.dtype == plain.dtype == torch.float64
    x, ends, weights = torch.randn(11, 16, dtype=torch.float64), torch.tensor([4, 4, 9], dtype=torch.int32), torch.rand(11)
    assert torch.equal(narrow(x, ends, weights)[:9], plain(x, ends, weights)[:9])
    for experts in (plain, narrow):
        experts.add_lora(LoraConfig(rank=2), 3)
        assert experts.up_lora is not None
        experts.up_lora.B.copy_(torch.ones_like(experts.up_lora.B))
    assert torch.equal(narrow(x, ends, weights)[:9], plain(x, ends, weights)[:9])
    with pytest.raises(ValueError, match="up and down are in fp8"):
        narrow.merge_lora()


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    experts = make_experts()
    experts.store_in_fp8(multiply=True)
    experts.store_in_fp8(multiply=True)
    with pytest.raises(ValueError, match="multiply=False and the experts are in fp8 with multiply=True"):
        experts.store_in_fp8(multiply=False)
    experts = make_experts()
    experts.up.grad = torch.zeros_like(experts.up)
    with pytest.raises(ValueError, match="GroupedMLP, whose experts are being trained"):
        experts.store_in_fp8(multiply=True)
    experts = make_experts(layers=choose_backend("torch", fp8=Fp8Config(recipe="rowwise")).layers(0, 1))
    with pytest.raises(ValueError, match="whose experts are multiplied by products of the backend; build the model with backend=None"):
        experts.store_in_fp8(multiply=True)
    experts = make_experts()
    experts.add_lora(LoraConfig(rank=2, base_dtype="fp8_weight_only"), 3)
    experts.quantize_base()
    with pytest.raises(ValueError, match="frozen in fp8 beside adapters"):
        experts.store_in_fp8(multiply=False)
