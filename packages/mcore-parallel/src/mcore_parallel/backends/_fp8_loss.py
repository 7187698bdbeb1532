# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Output projection and cross entropy from fp8 operands, a few tokens at a time."""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.backends._fp8_config import Fp8Config
from mcore_parallel.backends._fp8_products import Fp8Products, fits, gather_rows, narrow_weight_product
from mcore_parallel.backends._quantize import LEAST_AMAX, MULTIPLE, Scaled, quantize, scaled_product, turn
from mcore_parallel.comm import all_reduce, reduce_scatter
from mcore_parallel.tensor_parallel import (
    Labels,
    Route,
    RowMaths,
    combine,
    fused_linear_cross_entropy,
    join_rows,
    row_statistics,
    to_narrow_gradient,
    token_chunks,
)

# T tokens, D model, V vocabulary, v = V / tp columns of this rank, C tokens of a chunk


class Fp8LossProducts:
    """The loss of an output layer with its three fp8 GEMMs; conforms to ``LossProducts``.

    Hidden states and weight are e4m3 with one scale each. A gradient of a logit is at most as large as the largest weight of a token, so
    that its scale is known before it is computed: it is written in fp8 (``gradient_format``, e5m2 if None) at once, forth for the
    gradient of the hidden states and transposed for that of the weight. The statistics of the softmax are float32 of bfloat16 logits. The
    weight's gradient is one product over all tokens of a call, in the backward; until then v bytes a token are kept.

    Calls whose tokens, widths or vocabulary do not come in multiples of 16 keep the dtype of the model, and so do logits and
    log-probabilities that are asked for.

    Args:
        config: whatever the recipe of the layers, the loss has one scale a tensor.
    """

    def __init__(self, config: Fp8Config) -> None:
        self.products = Fp8Products(replace(config, recipe="tensorwise"))

    def losses(self, hidden: Tensor, weight_vD: Tensor, target_T: Tensor, weights_T: Tensor, route: Route, vocab_size: int) -> Tensor:
        if not fits(hidden, route, sharded=route.sequence_parallel) or any(size % MULTIPLE for size in weight_vD.shape):
            return fused_linear_cross_entropy(
                hidden, weight_vD, target_T, route.group, token_weights=weights_T, vocab_size=vocab_size,
                sequence_parallel=route.sequence_parallel, main_grad=route.main_grad,
            )  # fmt: skip
        wants = torch.is_grad_enabled() and (hidden.requires_grad or weight_vD.requires_grad)
        return _NarrowLoss.apply(hidden, weight_vD, target_T, weights_T, _Job(self.products, route, vocab_size, wants))

    def weight_changed(self) -> None:
        self.products.weight_changed()


@dataclass(frozen=True, eq=False)
class _Job:
    products: Fp8Products
    route: Route
    vocab_size: int
    wants_gradients: bool


@dataclass(frozen=True, eq=False)
class _Found:
    """Of all tokens of a call."""

    loss_T: Tensor
    grad_hidden: Tensor | None = None
    grad_vT: Scaled | None = None
    """Of the logits, transposed."""
    hidden_DT: Scaled | None = None


class _NarrowLoss(torch.autograd.Function):
    """Gradients in the forward; the backward scales them, and multiplies the two factors of the weight's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_vD: Tensor, target_T: Tensor, weights_T: Tensor, job: _Job) -> Tensor:
        losses = _losses(hidden, weight_vD, target_T, weights_T, job)
        parts = [
            x for scaled in (losses.grad_vT, losses.hidden_DT) for x in ((None, None) if scaled is None else (scaled.data, scaled.inverse))
        ]
        ctx.save_for_backward(hidden, weight_vD, target_T, weights_T, losses.loss_T, losses.grad_hidden, *parts)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return losses.loss_T * weights_T

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad_T: Tensor | None = grads[0]
        if grad_T is None:
            return None, None, None, None, None
        hidden, weight_vD, target_T, weights_T, loss_T, grad_hidden, grad_data, grad_inverse, hidden_data, hidden_inverse = (
            ctx.saved_tensors
        )
        job: _Job = ctx.job
        wants_hidden, wants_weight, _, wants_weights, _ = ctx.needs_input_grad
        if grad_T.numel() == 1 or grad_T.stride() == (0,):
            scale = grad_T[0]
        else:
            # Not one number for all tokens: as if the tokens were weighted by it.
            losses = _losses(hidden, weight_vD, target_T, grad_T * weights_T, job)
            scale, grad_hidden = grad_T.new_ones(()), losses.grad_hidden
            assert grad_hidden is not None and losses.grad_vT is not None and losses.hidden_DT is not None
            grad_data, grad_inverse = losses.grad_vT.data, losses.grad_vT.inverse
            hidden_data, hidden_inverse = losses.hidden_DT.data, losses.hidden_DT.inverse
        grad_weight = None
        if wants_weight:
            # The number that arrives is one more scale of the product.
            factors = Scaled(grad_data, grad_inverse * scale), Scaled(hidden_data, hidden_inverse)
            compute = functools.partial(narrow_weight_product, job.route, *factors, weight_vD.dtype)
            if job.route.queue is not None and job.route.main_grad is not None:
                job.route.queue.put(compute)
            else:
                grad_weight = compute()
        return (
            grad_hidden * scale.to(grad_hidden.dtype) if wants_hidden else None,
            grad_weight,
            None,
            grad_T * loss_T if wants_weights else None,
            None,
        )


def _losses(hidden: Tensor, weight_vD: Tensor, target_T: Tensor, weights_T: Tensor, job: _Job) -> _Found:
    """Losses [T] without their weights; the gradients are of their weighted sum."""
    products, group = job.products, job.route.group
    tokens, width = target_T.shape[0], weight_vD.shape[0]
    maths = RowMaths(vocab_size=job.vocab_size)
    labels, valid = Labels.of(target_T, width, job.vocab_size, group.rank), maths.columns(group.rank, width)
    gathers = job.route.sequence_parallel and group.size > 1
    rows, columns = quantize(
        hidden.detach(), torch.float8_e4m3fn, group=group if gathers else None, columns=job.wants_gradients and not gathers
    )
    assert rows is not None
    if gathers:
        rows = gather_rows(rows, group)
        columns = turn(rows) if job.wants_gradients else None
    forth, back = products.weights(weight_vD, group)
    weights_T = torch.where(labels.counted_T, weights_T, 0.0)
    grad_hidden, grad_vT = None, None
    if job.wants_gradients:
        weights_T = weights_T.to(torch.promote_types(hidden.dtype, torch.float32))
        turned_vT = torch.empty(width, tokens, dtype=products.gradient_dtype, device=hidden.device)
        grad_vT = Scaled(turned_vT, weights_T.abs().amax().float().clamp(min=LEAST_AMAX) / torch.finfo(products.gradient_dtype).max)
        grad_hidden = torch.empty(tokens, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    results = []
    for begin, end in token_chunks(tokens, width, None):
        logits_Cv = scaled_product(Scaled(rows.data[begin:end], rows.inverse), forth, hidden.dtype, fast=True)
        column_C = labels.column_T[begin:end]
        results.append(combine(row_statistics(logits_Cv, column_C, valid, maths), width, maths, group))
        if grad_hidden is not None and grad_vT is not None:
            turned_vC, norm_C = grad_vT.data[:, begin:end], results[-1].log_norm_T
            grad_Cv = to_narrow_gradient(logits_Cv, column_C, valid, maths, norm_C, weights_T[begin:end], grad_vT.inverse, turned_vC)
            grad_hidden[begin:end] = scaled_product(Scaled(grad_Cv, grad_vT.inverse), back, hidden.dtype)
    if grad_hidden is not None:
        grad_hidden = (reduce_scatter if job.route.sequence_parallel else all_reduce)(grad_hidden, group)
    return _Found(torch.where(labels.counted_T, join_rows(results).loss_T, 0.0), grad_hidden, grad_vT, columns)
