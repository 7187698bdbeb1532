# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The first GEMM of gated experts, with the gather of its rows before it and the activation behind it."""

from typing import Any, Protocol

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.backends._grouped import expert_product, finish_weight_gradient, grouped_matmul, is_kernel_faster
from mcore_parallel.nn import Activation
from mcore_parallel.nn.kernels import activation_kernels
from mcore_parallel.tensor_parallel import DeferredWeightGrads, MainGradient

# T tokens, R rows, N experts of this rank, D model, F width of an expert.

_DEPTH = 64
"""Of which D is a multiple where the kernel gathers."""


@internal_api
class RowOrder(Protocol):
    """Which token each row is."""

    @property
    def tokens_R(self) -> Tensor:
        """int32; of rows behind the last expert any token."""
        ...

    def gather(self, x_TD: Tensor) -> Tensor:
        """[R, D]; rows behind the last expert hold anything."""
        ...

    def sum(self, rows_RD: Tensor) -> Tensor:
        """The gradient of ``gather``: the rows of each token added up, [T, D]."""
        ...


@internal_api
def has_gathered_kernel(x_TD: Tensor, weight_NGFD: Tensor, num_rows: int) -> bool:
    """Whether ``gathered_swiglu`` has a kernel for these tensors, and is faster with it than a gather, a GEMM and an activation."""
    return weight_NGFD.shape[-1] % _DEPTH == 0 and is_kernel_faster(x_TD, num_rows, weight_NGFD[:, 0])


@internal_api
def gathered_swiglu(
    x_TD: Tensor, weight_NGFD: Tensor, ends_N: Tensor, weights_R: Tensor, order: RowOrder, main_grad: MainGradient | None = None
) -> Tensor:
    """``swiglu(x W_e^T) * weight`` of rows in the order of their experts, [R, F]; nothing waits for the device.

    With the kernel (``has_gathered_kernel``) the rows are not in memory: x, the GEMM's result and the order are kept for the backward; the
    order also where hooks take saved tensors away.

    Args:
        x_TD: tokens.
        weight_NGFD: [N, 2, F, D], gates and values of each expert.
        ends_N: int32 on the tokens' device, the rows of this expert and of all before it.
        weights_R: of the rows.
        order: of the rows; those behind the last expert hold anything.
        main_grad: where the gradient of ``weight_NGFD`` is added, instead of being given to autograd.
    """
    if has_gathered_kernel(x_TD, weight_NGFD, len(order.tokens_R)):
        # Asked here: within the function nothing says whether gradients are on.
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_TD, weight_NGFD, weights_R))
        return _GatheredSwiglu.apply(x_TD, weight_NGFD.flatten(1, 2), weights_R, ends_N, order, main_grad, keep)
    rows_RD = _Gather.apply(x_TD, order)
    pre_RW = grouped_matmul(rows_RD, weight_NGFD.flatten(1, 2), ends_N, main_grad)
    return Activation(name="swiglu")(pre_RW, weights=weights_R, num_rows=ends_N[-1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return order.gather(x_TD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.order.sum(grads[0].contiguous()), None


class _GatheredSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weight_NWD: Tensor,
        weights_R: Tensor,
        ends_N: Tensor,
        order: RowOrder,
        main_grad: MainGradient | None,
        keep: bool,
    ) -> Tensor:
        from mcore_parallel.backends._gluon_grouped import gathered_swiglu as launch

        x_TD, weights_R = x_TD.contiguous(), weights_R.contiguous()
        # Tokens are copied 16 bytes at a time.
        x_TD = x_TD if x_TD.data_ptr() % 16 == 0 else x_TD.clone()
        weight_NGFD = weight_NWD.contiguous().unflatten(1, (2, -1))
        y_RF, pre_RW = launch(x_TD, order.tokens_R, weight_NGFD, ends_N, weights_R, keep=keep)
        ctx.order, ctx.main_grad, ctx.later = order, main_grad, DeferredWeightGrads()
        ctx.save_for_backward(x_TD, weight_NWD, weights_R, ends_N, pre_RW)
        return y_RF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x_TD, weight_NWD, weights_R, ends_N, pre_RW = ctx.saved_tensors
        order: RowOrder = ctx.order
        grad_RW, grad_weights_R = activation_kernels().activate_backward(
            grads[0].contiguous(), pre_RW, None, None, weights_R, curve="silu", gated=True, offset=0.0, clamp=None, num_rows=ends_N[-1:]
        )
        assert grad_weights_R is not None
        grad_TD = order.sum(expert_product(grad_RW, weight_NWD, ends_N)) if ctx.needs_input_grad[0] else None
        grad_NWD = None
        if ctx.needs_input_grad[1]:

            def weight_grad() -> Tensor | None:
                return finish_weight_gradient(grad_RW, order.gather(x_TD), ends_N, weight_NWD, ctx.main_grad)

            if ctx.later.jobs is None:
                grad_NWD = weight_grad()
            else:
                ctx.later.jobs.append((1, weight_grad))
        return grad_TD, grad_NWD, grad_weights_R.to(weights_R.dtype), None, None, None, None
