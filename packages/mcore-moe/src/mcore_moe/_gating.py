# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The logits of a router: the gating matmul, noise on its input, random logits in place of its result."""

from typing import Any

import torch
from torch import Tensor

from mcore_moe._stability import experimental_api
from mcore_parallel import Group
from mcore_parallel.comm import all_reduce
from mcore_parallel.tensor_parallel import BatchInvariantMatmul

# T tokens, D model, E experts, F = 2 * E.


def gate(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    dtype: torch.dtype,
    valid_T: Tensor | None = None,
    matmul: BatchInvariantMatmul | None = None,
) -> Tensor:
    """[T, E] logits in ``dtype``; kept for the backward are the operands in their own dtypes, no wider copies.

    Where ``valid_T`` is False logits and gradients are 0, and no number of the token is read: it may be infinite, or none.

    On GPUs bfloat16 operands of float32 logits go to the tensor cores as they are: their products are exact in float32, in which they are
    added up. Their gradients then go as the sum of two bfloat16 numbers, which has 16 bits of each.

    With ``matmul`` it computes the forward, on GPUs for all operands of 16 bits as they are.
    """
    return _Gate.apply(x_TD, weight_ED, bias_E, dtype, valid_T, matmul)


class _Gate(torch.autograd.Function):
    """Matmul in a wider dtype, forwards and backwards."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        dtype: torch.dtype,
        valid_T: Tensor | None,
        matmul: BatchInvariantMatmul | None,
    ) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED, valid_T)
        ctx.dtype, ctx.bias_dtype = dtype, None if bias_E is None else bias_E.dtype
        ctx.narrow = dtype == torch.float32 and x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16
        if matmul is not None:
            logits_TE = matmul(x_TD, weight_ED, dtype)
        elif ctx.narrow:
            logits_TE = torch.mm(x_TD, weight_ED.t(), out_dtype=dtype)
        else:
            logits_TE = x_TD.to(dtype) @ weight_ED.to(dtype).t()
        logits_TE = logits_TE if bias_E is None else logits_TE + bias_E.to(dtype)
        return _of_valid(logits_TE, valid_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_TD, weight_ED, valid_T = ctx.saved_tensors
        grad_TE = _of_valid(grads[0].to(ctx.dtype), valid_T)
        # A gradient of 0 would make NaN of what is infinite.
        x_TD = _of_valid(x_TD, valid_T) if ctx.needs_input_grad[1] else x_TD
        grad_x, grad_weight = None, None
        if ctx.narrow:
            halves_TF = torch.cat(_halves(grad_TE), 1)
            if ctx.needs_input_grad[0]:
                grad_x = halves_TF @ torch.cat((weight_ED, weight_ED))
            if ctx.needs_input_grad[1]:
                grad_weight = torch.mm(halves_TF.t(), x_TD, out_dtype=ctx.dtype).view(2, *weight_ED.shape).sum(0).to(weight_ED.dtype)
        else:
            if ctx.needs_input_grad[0]:
                grad_x = (grad_TE @ weight_ED.to(ctx.dtype)).to(x_TD.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (grad_TE.t() @ x_TD.to(ctx.dtype)).to(weight_ED.dtype)
        grad_bias = grad_TE.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None, None


def _of_valid(rows: Tensor, valid_T: Tensor | None) -> Tensor:
    """Zeros in the rows of other tokens."""
    return rows if valid_T is None else rows.masked_fill(~valid_T.unsqueeze(-1), 0.0)


def _halves(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 numbers whose sum is the float32 one but for what is behind its first 16 bits."""
    first = wide.to(torch.bfloat16)
    return first, (wide - first).to(torch.bfloat16)


def jittered(x_TD: Tensor, eps: float, replicas: Group) -> Tensor:
    """The input times uniform noise in 1 - eps..1 + eps, drawn in its dtype from the default generator of its device."""
    noise_TD = torch.empty_like(x_TD).uniform_(1 - eps, 1 + eps)
    return x_TD * _agreed(noise_TD, replicas)


@experimental_api
class RandomSTE(torch.autograd.Function):
    """Standard normal noise in place of the logits; the gradient passes through."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, replicas: Group) -> Tensor:
        return _agreed(torch.randn_like(logits), replicas)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


@experimental_api
def apply_random_logits(logits: Tensor, replicas: Group | None = None) -> Tensor:
    """Logits that load all experts alike, for benchmarks; the generator is the device's default one, so graphs replay fresh noise.

    Args:
        logits: [T, E].
        replicas: ranks that hold the same tokens, and must draw the same; None for this rank alone.
    """
    return RandomSTE.apply(logits, Group.single() if replicas is None else replicas)


def _agreed(noise: Tensor, replicas: Group) -> Tensor:
    """The noise of the first rank, on all that hold the same tokens."""
    if replicas.size == 1:
        return noise
    return all_reduce(noise if replicas.is_first else torch.zeros_like(noise), replicas)
