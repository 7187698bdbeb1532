# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Grouped products against one product an expert."""

import pytest
import torch

from mcore_moe import GroupedMLP, SequentialMLP
from mcore_parallel import ProcessGroups

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("counts", [[64, 0, 17, 175], [0, 0, 0, 256], [1, 2, 3, 250]])
def test_grouped_products_equal_sequential_ones(counts: list[int]) -> None:
    torch.manual_seed(0)
    groups = ProcessGroups.single()
    grouped = GroupedMLP(4, 128, 64, groups, dtype=torch.bfloat16, device="cuda")
    exact = SequentialMLP(4, 128, 64, groups, dtype=torch.float64, device="cuda")
    with torch.no_grad():
        for ours, reference in zip(grouped.parameters(), exact.parameters(), strict=True):
            ours.normal_(std=0.1)
            reference.copy_(ours)
    x = torch.randn(sum(counts), 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(sum(counts), 128, device="cuda", dtype=torch.bfloat16)
    leaves = x.clone().requires_grad_(), x.double().requires_grad_()
    outputs = grouped(leaves[0], counts), exact(leaves[1], counts)
    for output in outputs:
        (output * weight.to(output.dtype)).sum().backward()

    def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
        return ((ours.double() - reference).norm() / reference.norm()).item()

    assert error(*outputs) < 1e-2
    assert error(leaves[0].grad, leaves[1].grad) < 1e-2
    for ours, reference in zip(grouped.parameters(), exact.parameters(), strict=True):
        assert error(ours.grad, reference.grad) < 1e-2


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden_size", "ffn_size"), [(16, 12), (12, 16)])
def test_the_widths_that_are_refused_cannot(hidden_size: int, ffn_size: int) -> None:
    experts = GroupedMLP(2, hidden_size, ffn_size, ProcessGroups.single(), dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(6, hidden_size, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="16"):
        experts(rows, [4, 2])
