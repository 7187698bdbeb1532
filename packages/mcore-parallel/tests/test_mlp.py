# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The dense feed-forward layer and its activations."""

import dataclasses

import pytest
import torch

from mcore_parallel import Group, ProcessGroups
from mcore_parallel.nn import GatedMLP, Step, geglu, quick_geglu, quick_gelu, squared_relu, swiglu, weighted_quick_geglu


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_gated_mlp_equals_its_formula() -> None:
    mlp = GatedMLP(4, 6, ProcessGroups.single(), dtype=torch.float64)
    x = normal(5, 4)
    gate, value = (x @ weight.T for weight in mlp.up.weight)
    y, aux = mlp(x, Step.causal(1, 5))
    torch.testing.assert_close(y, (gate * gate.sigmoid() * value) @ mlp.down.weight.T)
    assert aux is None
    assert mlp.up.weight.shape == (2, 6, 4)


def test_gated_activations_equal_their_formulas() -> None:
    gate, value = normal(7, 3), normal(7, 3, seed=1)
    torch.testing.assert_close(swiglu(gate, value), gate / (1 + (-gate).exp()) * value)
    torch.testing.assert_close(geglu(gate, value), gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * value)
    torch.testing.assert_close(quick_gelu(gate), gate / (1 + (-1.702 * gate).exp()))
    torch.testing.assert_close(quick_geglu(gate, value, offset=1.0), quick_gelu(gate) * (value + 1))
    torch.testing.assert_close(squared_relu(gate), torch.where(gate > 0, gate * gate, 0))
    weights = normal(7, 1, seed=2)
    torch.testing.assert_close(weighted_quick_geglu(gate, value, weights), quick_geglu(gate, value) * weights)


@pytest.mark.parametrize("activation", [swiglu, geglu, quick_geglu])
def test_gated_activations_have_the_right_gradient(activation) -> None:
    inputs = [normal(4, 3, seed=seed).requires_grad_() for seed in range(2)]
    assert torch.autograd.gradcheck(activation, inputs)
    assert activation(torch.empty(0, 3), torch.empty(0, 3)).shape == (0, 3)


def test_clamped_activation_passes_no_gradient_where_it_cuts() -> None:
    gate = torch.tensor([8.0, -8.0, 1.0], requires_grad=True)
    value = torch.tensor([1.0, 9.0, -9.0], requires_grad=True)
    y = quick_geglu(gate, value, offset=1.0, clamp=7.0)
    torch.testing.assert_close(y, quick_gelu(torch.tensor([7.0, -8.0, 1.0])) * torch.tensor([2.0, 8.0, -6.0]))
    gate_grad, value_grad = torch.autograd.grad(y.sum(), [gate, value])
    assert gate_grad[0] == 0 and gate_grad[1:].ne(0).all()
    assert value_grad[0] != 0 and value_grad[1:].eq(0).all()


def test_weighted_activation_keeps_the_dtype() -> None:
    gate = normal(2, 4).bfloat16()
    assert weighted_quick_geglu(gate, gate, torch.ones(2, 1)).dtype == torch.bfloat16


def test_a_tp_that_does_not_divide_the_width_is_an_error() -> None:
    groups = dataclasses.replace(ProcessGroups.single(), tp=Group((0, 1), 0))
    with pytest.raises(ValueError, match="tp=2 must divide ffn_hidden_size=5"):
        GatedMLP(4, 5, groups)
