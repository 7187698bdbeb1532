# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows picked from a table, and the gradient of the few that were picked."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from mcore_parallel.tensor_parallel._rows import use_triton
from mcore_parallel.tensor_parallel._weight_gradient import MainGradient

# T picks, V rows of the table, D numbers of a row


def pick_rows(table_VD: Tensor, rows_T: Tensor, main_grad: MainGradient) -> Tensor:
    """``table[rows]``; zero where the row is -1. The gradient goes to ``main_grad``, and autograd gets none.

    On a GPU the gradient touches the picked rows only, each summed in float32 in the order of the picks and added once; a dense
    one of all V rows would be written, widened and added for each call. Equal inputs give equal bits.
    """
    return _Rows.apply(table_VD, rows_T, main_grad)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, rows_T: Tensor, main_grad: MainGradient) -> Tensor:
        ctx.save_for_backward(rows_T)
        ctx.main_grad = main_grad
        return F.embedding(rows_T.clamp(min=0), table_VD).masked_fill((rows_T < 0).unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (rows_T,) = ctx.saved_tensors
        with ctx.main_grad.open() as total:
            add_rows_(total, rows_T, grads[0])
        return None, None, None


def add_rows_(total_VD: Tensor, rows_T: Tensor, grad_TD: Tensor) -> None:
    """``total[rows] += grad``, rows that repeat summed first; those of -1 are left out."""
    if use_triton(grad_TD):
        from mcore_parallel.tensor_parallel import _triton_embedding

        _triton_embedding.add_rows_(total_VD, rows_T, grad_TD)
        return
    grad_TD = grad_TD.masked_fill((rows_T < 0).unsqueeze(-1), 0.0)
    total_VD.add_(torch.ops.aten.embedding_dense_backward(grad_TD, rows_T.clamp(min=0), total_VD.shape[0], -1, False))
