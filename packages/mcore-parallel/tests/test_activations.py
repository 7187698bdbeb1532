# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Activations by name: values, gradients, biases, weights, inputs stored in fp8."""

import pytest
import torch
from torch import Tensor

from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import (
    ACTIVATIONS,
    Activation,
    geglu,
    quick_geglu,
    quick_gelu,
    squared_relu,
    swiglu,
    weighted_quick_geglu,
    weighted_swiglu,
)

# What each is by its definition, in numbers that torch computes another way.
FORMULAS = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * torch.distributions.Normal(0.0, 1.0).cdf(x),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "relu": lambda x: torch.where(x > 0, x, 0),
    "squared_relu": lambda x: torch.where(x > 0, x * x, 0),
}
CURVES = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "quick_geglu": "quick_gelu"}
CHOICES = [Activation(name=name) for name in ACTIVATIONS]
CHOICES += [Activation(name=name, offset=1.0, clamp=0.8) for name in CURVES]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs(activation: Activation, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """Input, bias, weights; no element lies where a cut or a kink has no derivative."""
    x = normal(rows, 6 * (1 + activation.gated))
    return x.requires_grad_(), normal(x.shape[1], seed=1).requires_grad_(), normal(rows, 1, seed=2).requires_grad_()


def test_the_names_are_those_of_the_config() -> None:
    for name in ACTIVATIONS:
        TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, vocab_size=4, activation=name)
    assert len(set(ACTIVATIONS)) == 10


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_equals_its_formula(name: str) -> None:
    activation = Activation(name=name)
    x, bias, weights = inputs(activation)
    pre = x + bias
    if name in CURVES:
        gate, value = pre.chunk(2, -1)
        wanted = FORMULAS[CURVES[name]](gate) * value
    else:
        wanted = FORMULAS[name](pre)
    torch.testing.assert_close(activation(x, bias, weights), wanted * weights, rtol=1e-12, atol=1e-14)
    assert torch.equal(activation(x.view(5, 1, -1), bias, weights.view(5, 1)), activation(x, bias, weights[:, 0]).view(5, 1, -1))


@pytest.mark.parametrize("activation", CHOICES, ids=str)
def test_gradients_of_input_bias_and_weights_are_right(activation: Activation) -> None:
    assert torch.autograd.gradcheck(activation, inputs(activation))
    assert torch.autograd.gradcheck(lambda x: activation(x), inputs(activation)[:1])


@pytest.mark.parametrize("shape", [(12,), (1, 12), (5, 12), (5, 1), (1,)])
def test_a_bias_gets_a_gradient_of_its_own_shape(shape: tuple[int, ...]) -> None:
    x, _, weights = inputs(Activation(name="quick_geglu"))
    bias = normal(*shape, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(Activation(name="quick_geglu"), (x, bias, weights))
    assert bias.grad is None or bias.grad.shape == shape


def test_offset_and_clamp_are_those_of_gpt_oss() -> None:
    x = torch.tensor([[9.0, -9.0, 2.0, 8.0, -8.0, 0.5]], dtype=torch.float64, requires_grad=True)
    y = Activation(name="quick_geglu", offset=1.0, clamp=7.0)(x)
    gate, value = torch.tensor([[7.0, -9.0, 2.0]]).double(), torch.tensor([[7.0, -7.0, 0.5]]).double()
    torch.testing.assert_close(y, gate * torch.sigmoid(1.702 * gate) * (value + 1))
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad != 0).tolist() == [[False, True, True, False, False, True]]
    torch.testing.assert_close(y, quick_geglu(*x.chunk(2, -1), offset=1.0, clamp=7.0))


@pytest.mark.parametrize("activation", CHOICES, ids=str)
def test_no_rows_are_fine(activation: Activation) -> None:
    x, bias, weights = inputs(activation, rows=0)
    y = activation(x, bias, weights)
    y.sum().backward()
    assert y.shape == (0, 6)
    assert x.grad is not None and bias.grad is not None and weights.grad is not None
    assert x.grad.shape == x.shape and not bias.grad.any() and weights.grad.shape == (0, 1)


def test_half_precision_is_computed_in_float32_and_only_the_input_is_kept() -> None:
    x = normal(7, 16).bfloat16().requires_grad_()
    weights = normal(7, 1, seed=1).float().requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = Activation(name="swiglu")(x, weights=weights)
    assert {tuple(t.shape) for t in kept} == {(7, 16), (7,)}
    wide = x.detach().float().requires_grad_()
    wanted = Activation(name="swiglu")(wide, weights=weights.detach())
    assert torch.equal(y, wanted.bfloat16())
    y.sum().backward()
    wanted.sum().backward()
    assert x.grad is not None and wide.grad is not None and weights.grad is not None
    assert torch.equal(x.grad, wide.grad.bfloat16())
    assert weights.grad.dtype == torch.float32


def test_weighted_functions_equal_their_products() -> None:
    gate, value, weights = normal(6, 4), normal(6, 4, seed=1), normal(6, 1, seed=2)
    torch.testing.assert_close(weighted_swiglu(gate, value, weights), swiglu(gate, value) * weights)
    torch.testing.assert_close(
        weighted_quick_geglu(gate, value, weights, offset=1.0, clamp=0.5), quick_geglu(gate, value, offset=1.0, clamp=0.5) * weights
    )
    torch.testing.assert_close(Activation(name="geglu")(torch.cat((gate, value), -1)), geglu(gate, value))
    torch.testing.assert_close(Activation(name="squared_relu")(gate), squared_relu(gate))
    torch.testing.assert_close(Activation(name="quick_gelu")(gate), quick_gelu(gate))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_inputs_stored_in_eight_bits_cost_their_rounding_only(name: str) -> None:
    exact, narrow = Activation(name=name), Activation(name=name, fp8_input_store=True)
    x = normal(64, 16).float() * torch.tensor([1e-3, 1.0, 1e3, 1e5]).repeat(16)[:, None]
    grads = []
    for activation in (exact, narrow):
        leaf, weights = x.clone().requires_grad_(), torch.ones(64, requires_grad=True)
        y = activation(leaf, weights=weights)
        y.sum().backward()
        assert leaf.grad is not None and weights.grad is not None
        grads.append((y, leaf.grad, weights.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    # Half a step of e4m3 is a sixteenth; a row above 448 that saturated would be off by orders of magnitude.
    for wanted, found in zip(grads[0][1:], grads[1][1:], strict=True):
        for rows in (slice(2, None, 4), slice(3, None, 4)):
            assert (found[rows] - wanted[rows]).norm() < 0.2 * wanted[rows].norm()


def test_eight_bits_are_what_is_kept() -> None:
    kept: list[Tensor] = []
    x = normal(7, 16).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        weighted_quick_geglu(*x.chunk(2, -1), torch.ones(7, 1), fp8_input_store=True)
    assert sorted((t.dtype, tuple(t.shape)) for t in kept if t.numel() > 7) == [(torch.float8_e4m3fn, (7, 16))]


@pytest.mark.parametrize("activation", [*CHOICES, Activation(name="swiglu", fp8_input_store=True)], ids=str)
def test_activations_compile_as_a_whole(activation: Activation) -> None:
    torch.compiler.reset()
    x, bias, weights = (tensor.detach().float().requires_grad_() for tensor in inputs(activation))
    compiled = torch.compile(lambda *arguments: activation(*arguments), fullgraph=True, backend="aot_eager")
    for function in (compiled, activation):
        function(x, bias, weights).square().sum().backward()
        if function is compiled:
            found = [tensor.grad for tensor in (x, bias, weights)]
            x.grad = bias.grad = weights.grad = None
    # A compiled function keeps what it likes, so fp8 shows in the other one only.
    bounds = {"rtol": 0.1, "atol": 0.1} if activation.fp8_input_store else {}
    for a, b in zip(found, (x.grad, bias.grad, weights.grad), strict=True):
        torch.testing.assert_close(a, b, **bounds)


def test_bad_choices_are_named() -> None:
    with pytest.raises(ValueError, match=r"activation='swish' must be one of swiglu, geglu"):
        Activation(name="swish")
    with pytest.raises(ValueError, match=r"activation='relu' has no gate, but glu_linear_offset=1.0"):
        Activation(name="relu", offset=1.0)
    with pytest.raises(ValueError, match=r"activation_func_clamp_value=0.0 must be positive"):
        Activation(name="quick_geglu", clamp=0.0)
    with pytest.raises(ValueError, match=r"last dim of x \(2, 3\) must be even"):
        Activation(name="swiglu")(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"weights \(3,\) must have one number a row of x \(2, 4\)"):
        Activation(name="swiglu")(torch.zeros(2, 4), weights=torch.ones(3))
