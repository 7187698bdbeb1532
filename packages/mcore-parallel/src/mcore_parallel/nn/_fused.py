# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Normalisation, gating and rotation as one kernel each way, with autograd; the torch code beside each is the reference."""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

# T tokens, D model, F feed-forward, K key-value heads, G query heads of each, d width of a head.


def has_kernel(x: Tensor) -> bool:
    """Whether a tensor of this dtype and place has the kernels; a graph under compilation fuses the torch code itself."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and not torch.compiler.is_compiling() and _has_triton()


def fused_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``RMSNorm`` over the last dim."""
    return _RMSNorm.apply(x.reshape(-1, x.shape[-1]), weight, epsilon).view(x.shape)


def fused_swiglu(up_TF: Tensor) -> Tensor:
    """``swiglu`` of [T, 2 F], gates first; the gradient is one tensor, ready for the product behind."""
    return _SwiGLU.apply(up_TF)


def fused_split_rotary(qkv_TKHd: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """[T, K, G + 2, d] -> rotated queries [T, K G, d] and keys [T, K, d], and values [T, K, d]; tables as of ``rotary_tables``."""
    return _SplitRotary.apply(qkv_TKHd, *tables)


# Kept: the answer does not change while a process runs.
@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    from mcore_parallel.nn import _triton_layers

    return _triton_layers


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        x_TD = _unit_stride(x_TD)
        y_TD, scale_T = _kernels().rms_norm(x_TD, weight_D, epsilon)
        ctx.save_for_backward(x_TD, weight_D, scale_T)
        return y_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *_kernels().rms_norm_backward(_unit_stride(grads[0]), *ctx.saved_tensors), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up_TF: Tensor) -> Tensor:
        up_TF = _unit_stride(up_TF)
        ctx.save_for_backward(up_TF)
        return _kernels().swiglu(up_TF)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _kernels().swiglu_backward(_unit_stride(grads[0]), *ctx.saved_tensors)


class _SplitRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_TKHd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tables = cos_Td.contiguous(), sin_Td.contiguous()
        ctx.save_for_backward(*tables)
        return _kernels().split_rotated(qkv_TKHd.contiguous(), tables)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _kernels().split_rotated_backward(grads, ctx.saved_tensors), None, None


def _unit_stride(x: Tensor) -> Tensor:
    """Rows whose elements lie side by side; the rows themselves may have any distance."""
    return x if x.stride(-1) == 1 else x.contiguous()
