# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Normalisation and rotation as one kernel each way, with autograd; the torch code beside each is the reference."""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api

# T tokens, D width of a norm, K key-value heads, G query heads of each, A heads, d width of a head.


@internal_api
def has_kernel(x: Tensor) -> bool:
    """Whether a tensor of this dtype and place has the kernels; a graph under compilation fuses the torch code itself."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and not torch.compiler.is_compiling() and _has_triton()


@internal_api
def fused_rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """``RMSNorm`` over the last dim by ``weight + shift``, and x, as ``fused_layer_norm``."""
    return _normed(x, weight, None, epsilon, shift)


@internal_api
def fused_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float, *, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """``LayerNorm`` over the last dim by ``weight + shift``, and x itself: what flows back to that is added by the norm's own backward."""
    return _normed(x, weight, bias, epsilon, shift)


def _normed(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, shift: float) -> tuple[Tensor, Tensor]:
    y_TD, x_TD = _Norm.apply(x.reshape(-1, x.shape[-1]), weight, bias, epsilon, shift)
    return y_TD.view(x.shape), x_TD.view(x.shape)


@internal_api
def fused_split_rotary(qkv_TKHd: Tensor, tables: tuple[Tensor, Tensor], *, interleaved: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """[T, K, G + 2, d] -> rotated queries [T, K G, d] and keys [T, K, d], and values [T, K, d].

    Args:
        qkv_TKHd: rows of one width; queries, keys and values of different widths go through ``apply_rotary`` one by one.
        tables: cos and sin of ``rotary_tables`` for all channels of a head, or for the first ones.
        interleaved: as in ``apply_rotary``.
    """
    return _SplitRotary.apply(qkv_TKHd, *tables, interleaved)


@internal_api
def fused_rotary(x_TAd: Tensor, tables: tuple[Tensor, Tensor], *, interleaved: bool = False) -> Tensor:
    """``apply_rotary``."""
    return _Rotary.apply(x_TAd, *tables, interleaved)


# Kept: the answer does not change while a process runs.
@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@internal_api
def activation_kernels() -> Any:
    """The Triton kernels of activations; imports Triton."""
    from mcore_parallel.nn.kernels import _triton_activations

    return _triton_activations


@internal_api
def softmax_kernels() -> Any:
    """The Triton kernels of scale, mask and softmax; imports Triton."""
    from mcore_parallel.nn.kernels import _triton_softmax

    return _triton_softmax


@internal_api
def attention_gradient_kernels() -> Any:
    """The Triton kernels of the gradients of causal attention over packed sequences; imports Triton."""
    from mcore_parallel.nn.kernels import _triton_attention_gradients

    return _triton_attention_gradients


@internal_api
def fixed_attention_kernels() -> Any:
    """The Triton kernel of batch-invariant attention; imports Triton."""
    from mcore_parallel.nn.kernels import _triton_fixed_attention

    return _triton_fixed_attention


def _kernels() -> Any:
    from mcore_parallel.nn.kernels import _triton_layers

    return _triton_layers


class _Norm(torch.autograd.Function):
    """Layer norm with a bias, RMS norm without."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, epsilon: float, shift: float) -> tuple[Tensor, Tensor]:
        x_TD = unit_stride(x_TD)
        y_TD, scale_T, mean_T = _kernels().norm(x_TD, weight_D, bias_D, epsilon, shift)
        ctx.save_for_backward(x_TD, weight_D, scale_T, mean_T)
        ctx.shift = shift
        ctx.set_materialize_grads(False)
        return y_TD, x_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        grad_TD, residual_TD = grads
        if grad_TD is None:
            return residual_TD, None, None, None, None
        residual_TD = None if residual_TD is None else unit_stride(residual_TD)
        return *_kernels().norm_backward(unit_stride(grad_TD), residual_TD, *ctx.saved_tensors, ctx.shift), None, None


class _SplitRotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_TKHd: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
        tables = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(*tables)
        ctx.interleaved = interleaved
        return _kernels().split_rotated(qkv_TKHd.contiguous(), tables, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _kernels().split_rotated_backward(grads, ctx.saved_tensors, ctx.interleaved), None, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TAd: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        tables = cos.contiguous(), sin.contiguous()
        ctx.save_for_backward(*tables)
        ctx.interleaved = interleaved
        return _kernels().rotated(unit_stride(x_TAd), tables, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _kernels().rotated(unit_stride(grads[0]), ctx.saved_tensors, ctx.interleaved, backward=True), None, None, None


@internal_api
def unit_stride(x: Tensor) -> Tensor:
    """Rows whose elements lie side by side; the rows themselves may have any distance."""
    return x if x.stride(-1) == 1 else x.contiguous()
