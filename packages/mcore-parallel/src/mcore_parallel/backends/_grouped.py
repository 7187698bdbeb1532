# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""GEMMs with a weight an expert."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.nn.kernels import has_kernel
from mcore_parallel.tensor_parallel import DeferredWeightGrads, MainGradient, batch_invariant_grouped_linear

# R rows, N experts of this rank, I input features, O output features (of this rank)

_ROW_BYTES = 16
"""Of which the rows of both factors and of the result are a multiple in ``torch.nn.functional.grouped_mm``, and in the project's kernel."""
_KERNEL_ROWS, _KERNEL_WIDTH = 128, 256
"""Rows an expert on average, and features on both sides, from which on the project's kernel is taken on Hopper: 1.0 to 1.25 times as fast
as torch's at 128 to 2,048 rows, and 1.0 to 1.5 times as its own for other GPUs where weight gradients are concerned (docs/performance.md);
below, tiles of 128 rows are mostly empty."""


def check_grouped_width(field: str, width: int, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
    """Whether grouped bfloat16 products on a GPU take rows of that many elements; elsewhere every width will do.

    Args:
        field: what the width is called, for the error.
        width: of this rank, after its division over expert tensor parallelism.
        dtype: of the weights; None for torch's default.
        device: of the weights; "meta" counts as the GPU where there is one.

    Raises:
        ValueError: names field, width and the next one that will do.

    Example:
        >>> check_grouped_width("moe_ffn_hidden_size", 12, torch.bfloat16, "cpu")
    """
    kind = torch.get_default_device().type if device is None else torch.device(device).type
    on_gpu = kind == "cuda" or (kind == "meta" and torch.cuda.is_available())
    dtype = torch.get_default_dtype() if dtype is None else dtype
    step = _ROW_BYTES // dtype.itemsize
    if on_gpu and dtype == torch.bfloat16 and width % step:
        raise ValueError(
            f"{field}={width} on a rank must be a multiple of {step}: grouped products of bfloat16 need rows of {_ROW_BYTES} bytes; "
            f"use {width + -width % step} on a rank, or float32"
        )


def row_ranges(ends_N: Tensor, num_rows: int) -> list[tuple[int, int]]:
    """First row of each expert and the one behind its last, on the host, which waits for the device.

    Args:
        ends_N: the rows of this expert and of all before it.
        num_rows: there are; those behind the last expert belong to none.

    Raises:
        ValueError: ends that fall, or lie behind the rows.

    Example:
        >>> row_ranges(torch.tensor([2, 2, 5]), 6)
        [(0, 2), (2, 2), (2, 5)]
    """
    ends: list[int] = ends_N.tolist()
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    if any(begin > end for begin, end in ranges) or max(ends, default=0) > num_rows:
        raise ValueError(
            f"ends_N={ends} of {num_rows} rows must not fall, nor lie outside of 0..{num_rows}; give the rows of each expert and of all "
            "before it, as counts.cumsum(0)"
        )
    return ranges


def grouped_matmul(rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: MainGradient | None = None) -> Tensor:
    """``y = x W_e^T`` of rows [R, I] that are sorted by expert: [R, O].

    bfloat16 rows on a GPU go through one kernel each way, and nothing waits for the device; other rows take one product an expert, whose
    sizes the host reads.

    Args:
        rows_RI: those behind the last expert belong to none; their results and gradients hold anything.
        weight_NOI: one matrix an expert.
        ends_N: int32 on the rows' device, the rows of this expert and of all before it.
        main_grad: where the weights' gradient [N, ..., I] is added, instead of being given to autograd.

    Raises:
        ValueError: ends that fall or lie behind the rows, where the host reads them.
    """
    return _GroupedMatmul.apply(rows_RI, weight_NOI, ends_N, main_grad, False)


class BatchInvariantGroupedProducts:
    """``grouped_matmul`` whose result for a row depends on that row and its expert only; conforms to ``GroupedProducts``.

    On a GPU nothing waits for the device in the forward. The backward is that of ``grouped_matmul``.
    """

    reads_sizes = False

    def matmul(self, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: MainGradient | None = None) -> Tensor:
        """[R, I] -> [R, O]; arguments as of ``grouped_matmul``.

        Raises:
            RuntimeError: a GPU without kernels for the dtype, or a graph under compilation there.
        """
        return _GroupedMatmul.apply(rows_RI, weight_NOI, ends_N, main_grad, True)

    def weight_changed(self) -> None:
        """Nothing is kept."""


class _GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: MainGradient | None, batch_invariant: bool
    ) -> Tensor:
        ctx.main_grad = main_grad
        ctx.later = None if torch.compiler.is_compiling() else DeferredWeightGrads()
        ctx.save_for_backward(rows_RI, weight_NOI, ends_N)
        if batch_invariant:
            if not rows_RI.is_cuda:
                row_ranges(ends_N, len(rows_RI))
            return batch_invariant_grouped_linear(rows_RI, weight_NOI, ends_N)
        return expert_product(rows_RI, weight_NOI.transpose(1, 2), ends_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows_RI, weight_NOI, ends_N = ctx.saved_tensors
        # The kernels refuse the broadcast gradient of a sum.
        grad_RO = grads[0].contiguous()
        grad_RI = expert_product(grad_RO, weight_NOI, ends_N) if ctx.needs_input_grad[0] else None
        grad_NOI = None
        if ctx.needs_input_grad[1]:
            weight_grad = functools.partial(finish_weight_gradient, grad_RO, rows_RI, ends_N, weight_NOI, ctx.main_grad)
            jobs = None if ctx.later is None else ctx.later.jobs
            if jobs is None:
                grad_NOI = weight_grad()
            else:
                jobs.append((1, weight_grad))
        return grad_RI, grad_NOI, None, None, None


def finish_weight_gradient(
    grad_RO: Tensor, rows_RI: Tensor, ends_N: Tensor, weight_NOI: Tensor, main_grad: MainGradient | None
) -> Tensor | None:
    """Adds it to the main gradient; without one, returns it."""
    if main_grad is None:
        grad_NOI = torch.empty_like(weight_NOI, memory_format=torch.contiguous_format)
        _weight_gradient(grad_RO, rows_RI, ends_N, grad_NOI, add=False)
        return grad_NOI
    with main_grad.open_or_claim() as (total, fresh):
        _weight_gradient(grad_RO, rows_RI, ends_N, total.view(weight_NOI.shape), add=not fresh)
    return None


def expert_product(rows_RI: Tensor, weight_NIO: Tensor, ends_N: Tensor) -> Tensor:
    """``x W_e``, [R, O]; in bfloat16 on a GPU by torch's kernel or by the project's, whichever is the faster one."""
    if rows_RI.is_cuda and rows_RI.dtype == torch.bfloat16 and rows_RI.shape[0]:
        turned = weight_NIO.is_contiguous()
        if is_kernel_faster(rows_RI, len(rows_RI), weight_NIO) and (turned or weight_NIO.mT.is_contiguous()):
            from mcore_parallel.backends._gluon_grouped import grouped_product

            return grouped_product(rows_RI.contiguous(), weight_NIO if turned else weight_NIO.mT, ends_N, turned=turned)
        return F.grouped_mm(rows_RI, weight_NIO, offs=ends_N)
    y_RO = rows_RI.new_zeros(rows_RI.shape[0], weight_NIO.shape[2])
    for (begin, end), weight_IO in zip(row_ranges(ends_N, rows_RI.shape[0]), weight_NIO, strict=True):
        torch.mm(rows_RI[begin:end], weight_IO, out=y_RO[begin:end])
    return y_RO


def is_kernel_faster(x: Tensor, num_rows: int, weight_NIO: Tensor) -> bool:
    """Whether the project's kernel takes these bfloat16 tensors, and is faster than torch's grouped GEMM: Hopper, and experts large enough
    in all three dims."""
    return weight_NIO.dtype == torch.bfloat16 and _suits_hopper(x, num_rows, weight_NIO.shape)


def _suits_hopper(x: Tensor, num_rows: int, shape: torch.Size) -> bool:
    """The same of kernels whose weights, or their gradients, have that shape."""
    num_experts, *sizes = shape
    if torch.compiler.is_compiling() or not has_kernel(x) or x.dtype != torch.bfloat16:
        return False
    large = num_rows >= _KERNEL_ROWS * num_experts and min(sizes) >= _KERNEL_WIDTH
    fits = not any(size * x.element_size() % _ROW_BYTES for size in sizes)
    return large and fits and torch.version.hip is None and torch.cuda.get_device_capability(x.device)[0] == 9


def _weight_gradient(grad_RO: Tensor, x_RI: Tensor, ends_N: Tensor, total_NOI: Tensor, *, add: bool) -> None:
    """``total_e (+)= grad_e^T x_e``."""
    if grad_RO.is_cuda and grad_RO.dtype == torch.bfloat16:
        if _suits_hopper(x_RI, len(x_RI), total_NOI.shape):
            from mcore_parallel.backends._gluon_weight_gradient import grouped_weight_gradient
        else:
            from mcore_parallel.backends._triton_grouped import grouped_weight_gradient
        grouped_weight_gradient(grad_RO, x_RI, ends_N, total_NOI, add=add)
        return
    for (begin, end), total_OI in zip(row_ranges(ends_N, x_RI.shape[0]), total_NOI, strict=True):
        product_OI = grad_RO[begin:end].T @ x_RI[begin:end]
        (total_OI.add_ if add else total_OI.copy_)(product_OI)
