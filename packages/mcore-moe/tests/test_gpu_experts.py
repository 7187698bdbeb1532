# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Grouped GEMMs against one matmul per expert."""

from typing import Any

import pytest
import torch

from mcore_moe import GroupedMLP, SequentialMLP
from mcore_parallel import ProcessGroups
from mcore_parallel.nn import ACTIVATIONS, Activation

pytestmark = pytest.mark.gpu


COUNTS = [[64, 0, 17, 175], [0, 0, 0, 256], [1, 2, 3, 250]]


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_products_equal_sequential_ones(counts: list[int]) -> None:
    compare(counts)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "activation",
    [*(Activation(name=name) for name in ACTIVATIONS), Activation(name="quick_geglu", offset=1.0, clamp=0.5)],
    ids=lambda activation: f"{activation.name}-{activation.offset}",
)
def test_grouped_products_take_every_activation(activation: Activation, bias: bool) -> None:
    compare(COUNTS[0], activation=activation, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_a_row_have_zero_gradients(dtype: torch.dtype) -> None:
    experts = GroupedMLP(4, 128, 64, ProcessGroups.single(), bias=True, dtype=dtype, device="cuda")
    y = experts(torch.empty(0, 128, device="cuda", dtype=dtype, requires_grad=True), [0, 0, 0, 0])
    assert y.shape == (0, 128)
    y.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


def compare(counts: list[int], **options: Any) -> None:
    """Outputs and gradients in bfloat16 against one matmul per expert in float64, or gradients where the activation has a kink in bfloat16.

    An input that rounds across a kink has another gradient, in bfloat16 either way.
    """
    torch.manual_seed(0)
    groups = ProcessGroups.single()
    grouped = GroupedMLP(4, 128, 64, groups, dtype=torch.bfloat16, device="cuda", **options)
    exact, rounded = (SequentialMLP(4, 128, 64, groups, dtype=kind, device="cuda", **options) for kind in (torch.float64, torch.bfloat16))
    with torch.no_grad():
        for ours, *references in zip(grouped.parameters(), exact.parameters(), rounded.parameters(), strict=True):
            ours.normal_(std=0.1)
            for reference in references:
                reference.copy_(ours)
    activation = options.get("activation")
    has_kink = activation is not None and (activation.clamp is not None or activation.name == "relu")
    x = torch.randn(sum(counts), 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(sum(counts), 128, device="cuda", dtype=torch.bfloat16)
    leaves = x.clone().requires_grad_(), x.double().requires_grad_(), x.clone().requires_grad_()
    outputs = grouped(leaves[0], counts), exact(leaves[1], counts), rounded(leaves[2], counts)
    for output in outputs:
        (output * weight.to(output.dtype)).sum().backward()

    def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
        return ((ours.double() - reference).norm() / reference.norm()).item()

    assert error(outputs[0], outputs[1]) < 1e-2
    leaf, reference_experts = (leaves[2], rounded) if has_kink else (leaves[1], exact)
    assert error(leaves[0].grad, leaf.grad.double()) < 1e-2
    for ours, reference in zip(grouped.parameters(), reference_experts.parameters(), strict=True):
        assert error(ours.grad, reference.grad.double()) < 1e-2


@pytest.mark.parametrize(("hidden_size", "ffn_size"), [(16, 8), (8, 24), (24, 40)])
def test_the_widths_that_pass_the_check_can_be_multiplied(hidden_size: int, ffn_size: int) -> None:
    from mcore_parallel.backends import check_grouped_width

    for name, width in (("hidden_size", hidden_size), ("ffn_size", ffn_size)):
        check_grouped_width(name, width, torch.bfloat16, "cuda")
    experts = GroupedMLP(2, hidden_size, ffn_size, ProcessGroups.single(), dtype=torch.bfloat16, device="cuda")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    rows = torch.randn(6, hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    experts(rows, [4, 2]).sum().backward()
    assert rows.grad is not None and rows.grad.isfinite().all()


@pytest.mark.parametrize(("hidden_size", "ffn_size"), [(16, 12), (12, 16)])
def test_the_widths_that_are_refused_cannot(hidden_size: int, ffn_size: int) -> None:
    experts = GroupedMLP(2, hidden_size, ffn_size, ProcessGroups.single(), dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(6, hidden_size, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="16"):
        experts(rows, [4, 2])
