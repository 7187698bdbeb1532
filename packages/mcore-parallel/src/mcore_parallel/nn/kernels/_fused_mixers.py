# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The parts of a linear mixer between its products as kernels, with autograd; the torch code beside each is the reference."""

from typing import Any

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.nn.kernels._chunks import ChunkPlan
from mcore_parallel.nn.kernels._fused import unit_stride

# T tokens, B sequences, G groups, W channels of a group, K taps, H heads, h heads of a group, P channels of a head, N of a state.

_CHUNK, _WIDE_CHUNK = 64, 32
"""Tokens of a chunk in the kernels for 16-bit values and for float32, whatever the config says for the torch code: what fits registers."""
_LARGEST_STATE = 2**15
"""Bytes of a head's state, in the dtype of the values, of which the kernels can hold two."""

_MOST_PLACES, _WIDEST_KEY = 64, 128
"""Of a chunk and of a state of the delta rule, of which shared memory holds the factors in float32."""


@internal_api
def fused_causal_conv(x_TGW: Tensor, weight_GWK: Tensor, bias_GW: Tensor | None, positions_T: Tensor) -> Tensor:
    """``causal_conv``; convolution, bias and SiLU are one kernel each way."""
    return _Conv.apply(x_TGW, weight_GWK, bias_GW, positions_T)


@internal_api
def fused_gated_rms_norm(y_TRW: Tensor, z_TGI: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool) -> Tensor:
    """``gated_rms_norm``."""
    return _GatedNorm.apply(y_TRW, z_TGI, weight, epsilon, gate_first)


@internal_api
def fused_ssd(
    mixed_TGW: Tensor,
    raw_TGh: Tensor,
    bias_H: Tensor,
    rates_H: Tensor,
    skip_H: Tensor,
    plan: ChunkPlan,
    sizes: tuple[int, int],
    limits: tuple[float, float],
    initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``ssd_chunked`` of what the convolution gives, with the step sizes made on the way; the states carry no gradient.

    Args:
        mixed_TGW: of each group values [h P], b [N] and c [N].
        raw_TGh: step sizes before bias and softplus.
        bias_H: of them.
        rates_H: negative rates of decay.
        skip_H: D.
        plan: the sequences; its chunks are those of the kernels.
        sizes: P and N.
        limits: of the step sizes.
        initial: states before the sequences; None for zeros.

    Returns:
        y [T, H, P], and the states [B, H, P, N] float32.
    """
    return _Scan.apply(mixed_TGW, raw_TGh, bias_H, rates_H, skip_H, plan, sizes, limits, initial)


@internal_api
def fused_delta_sweep(
    own_CHQV: Tensor, read_CHQK: Tensor, writers_CHKQ: Tensor, decay_CH: Tensor, plan: ChunkPlan, initial_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """States of the delta rule before each chunk and behind each sequence, without autograd: ``ChunkPlan.pass_states`` in one kernel."""
    from mcore_parallel.nn.kernels import _triton_delta

    return _triton_delta.delta_sweep(own_CHQV, read_CHQK, writers_CHKQ, decay_CH, plan, initial_BHKV)


@internal_api
def fits_delta(num_places: int, widths: tuple[int, int]) -> bool:
    """Whether the kernel can hold chunks of so many tokens and states of K and V channels."""
    return num_places <= _MOST_PLACES and widths[0] <= _WIDEST_KEY


@internal_api
def fits_ssd(mixed: Tensor, sizes: tuple[int, int]) -> bool:
    """Whether the kernels of the scan can hold states of P and N channels."""
    p, n = (max(16, 1 << (size - 1).bit_length()) for size in sizes)
    return max(p, n) <= 256 and p * n * mixed.element_size() <= _LARGEST_STATE


@internal_api
def kernel_plan(plan: ChunkPlan, dtype: torch.dtype) -> ChunkPlan:
    """The same sequences in the kernels' chunks for values of this dtype."""
    return plan.recut(_WIDE_CHUNK if dtype == torch.float32 else _CHUNK)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
        from mcore_parallel.nn.kernels import _triton_conv

        x, weight = unit_stride(x), weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(x, weight, bias, positions)
        return _triton_conv.conv_forward(x, weight, bias, positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from mcore_parallel.nn.kernels import _triton_conv

        return *_triton_conv.conv_backward(grads[0].contiguous(), *ctx.saved_tensors), None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, z: Tensor, weight: Tensor, epsilon: float, gate_first: bool) -> Tensor:
        from mcore_parallel.nn.kernels import _triton_gated_norm

        y, z = y.contiguous(), unit_stride(z)
        ctx.save_for_backward(y, z, weight)
        ctx.options = epsilon, gate_first
        return _triton_gated_norm.gated_norm_forward(y, z, weight, epsilon, gate_first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from mcore_parallel.nn.kernels import _triton_gated_norm

        return *_triton_gated_norm.gated_norm_backward(grads[0].contiguous(), *ctx.saved_tensors, *ctx.options), None, None


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, raw: Tensor, bias: Tensor, rates: Tensor, skip: Tensor,
        plan: ChunkPlan, sizes: tuple[int, int], limits: tuple[float, float], initial: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from mcore_parallel.nn.kernels import _triton_ssd

        ctx.options, ctx.dtypes = (plan, sizes, limits), (bias.dtype, rates.dtype, skip.dtype)
        mixed, raw, bias, rates, skip = mixed.contiguous(), unit_stride(raw), bias.float(), rates.float(), skip.float()
        initial = None if initial is None else initial.float().contiguous()
        ctx.save_for_backward(mixed, raw, bias, rates, skip, initial)
        y, behind = _triton_ssd.ssd_forward(mixed, raw, bias, rates, skip, plan, sizes, limits, initial)
        ctx.mark_non_differentiable(behind)
        return y, behind

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from mcore_parallel.nn.kernels import _triton_ssd

        mixed, raw, bias, rates, skip, initial = ctx.saved_tensors
        plan, sizes, limits = ctx.options
        gradients = _triton_ssd.ssd_backward(grads[0].contiguous(), mixed, raw, bias, rates, skip, plan, sizes, limits, initial)
        numbers = (value.to(dtype) for value, dtype in zip(gradients[2:], ctx.dtypes, strict=True))
        return gradients[0], gradients[1], *numbers, None, None, None, None
