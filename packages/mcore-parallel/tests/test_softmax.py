# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Softmax with a part that attends to nothing."""

import pytest
import torch
from torch import Tensor

from mcore_parallel.nn import SoftmaxOne, reference_attention


def scores(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_one_is_added_to_the_denominator() -> None:
    x = scores(2, 3, 4, 5)
    torch.testing.assert_close(SoftmaxOne()(x), x.exp() / (1 + x.exp().sum(-1, keepdim=True)), rtol=1e-12, atol=0)
    torch.testing.assert_close(SoftmaxOne(3, dim=1)(x), x.exp() / (3 + x.exp().sum(1, keepdim=True)), rtol=1e-12, atol=0)


def test_off_by_one_is_a_learnt_offset_of_zero() -> None:
    x = scores(2, 3, 4, 5)
    torch.testing.assert_close(SoftmaxOne(torch.zeros(3))(x), SoftmaxOne()(x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("offset", [None, 0, torch.full((3,), float("-inf")), torch.full((3,), -800.0)])
def test_without_an_offset_it_is_the_usual_softmax(offset: Tensor | float | None) -> None:
    x = scores(2, 3, 4, 5)
    torch.testing.assert_close(SoftmaxOne(offset)(x), x.softmax(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("offset", [None, 1.0, torch.tensor([0.5, float("-inf")])])
def test_a_row_without_a_key_gives_zeros_and_gradients_of_zero(offset: Tensor | float | None) -> None:
    x = torch.full((2, 3, 4), float("-inf"), dtype=torch.float64)
    x[:, 0] = 1.0
    x.requires_grad_()
    y = SoftmaxOne(offset)(x)
    y.square().sum().backward()
    assert (y[:, 1:] == 0).all() and (y[:, 0] > 0).all()
    assert x.grad is not None and torch.isfinite(x.grad).all() and (x.grad[:, 1:] == 0).all()


def test_logits_of_any_size_keep_their_weights() -> None:
    x = torch.tensor([[[1e4, 1e4 - 1, -1e4]]])
    torch.testing.assert_close(SoftmaxOne()(x), x.softmax(-1))
    torch.testing.assert_close(SoftmaxOne(torch.tensor([1e4]))(x)[0, 0, :2].sum(), torch.tensor(1 - 1 / (2 + 0.36787944)))


def test_half_precision_is_computed_in_float32() -> None:
    x = scores(1, 2, 3, 64)
    y = SoftmaxOne()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, SoftmaxOne()(x.bfloat16().float()).bfloat16(), rtol=0, atol=0)


def test_bad_offsets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"denominator_offset=-1.0 must not be negative"):
        SoftmaxOne(-1.0)
    with pytest.raises(ValueError, match=r"dim=1 must be -1"):
        SoftmaxOne(torch.zeros(3), dim=1)


def test_the_gradient_of_the_offset_is_the_formula_and_the_difference() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v, grad = (torch.randn(6, 2, 4, dtype=torch.float64, generator=generator) for _ in range(4))
    offset = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    reference_attention(q, k, v, sink=offset).backward(grad)

    # - sum over queries of p_sink * sum_j p_j (g . v_j)
    raw = torch.einsum("iad,jad->aij", q, k) / 2
    raw = raw.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), float("-inf"))
    p = torch.cat((raw, offset.detach()[:, None, None].expand(-1, 6, 1)), dim=-1).softmax(-1)
    formula = -(p[..., -1] * torch.einsum("aij,iad,jad->ai", p[..., :-1], grad, v)).sum(-1)
    torch.testing.assert_close(offset.grad, formula, rtol=1e-10, atol=1e-12)

    def loss(sink: Tensor) -> Tensor:
        return (reference_attention(q, k, v, sink=sink) * grad).sum()

    step = 1e-5
    for head in range(2):
        delta = torch.zeros(2, dtype=torch.float64)
        delta[head] = step
        difference = (loss(offset.detach() + delta) - loss(offset.detach() - delta)) / (2 * step)
        torch.testing.assert_close(offset.grad[head], difference, rtol=1e-6, atol=1e-9)
