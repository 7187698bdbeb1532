# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fused kernels with autograd. Triton is imported only when one of them runs."""

from mcore_parallel.nn.kernels._chunks import BoundedSequences, ChunkPlan, plan_chunks
from mcore_parallel.nn.kernels._fixed_scan import WIDEST_STATE, SlotSpans, fixed_conv, fixed_delta, fixed_ssd
from mcore_parallel.nn.kernels._fused import (
    activation_kernels,
    attention_gradient_kernels,
    fixed_attention_kernels,
    fused_layer_norm,
    fused_rms_norm,
    fused_rotary,
    fused_split_rotary,
    has_kernel,
    softmax_kernels,
    unit_stride,
)
from mcore_parallel.nn.kernels._fused_decode import SlotStates, fits_decode, fused_delta_decode, fused_ssd_decode
from mcore_parallel.nn.kernels._fused_mixers import (
    fits_delta,
    fits_ssd,
    fused_causal_conv,
    fused_delta_sweep,
    fused_gated_rms_norm,
    fused_ssd,
    kernel_plan,
)

__all__ = [
    "WIDEST_STATE",
    "BoundedSequences",
    "ChunkPlan",
    "SlotSpans",
    "SlotStates",
    "activation_kernels",
    "attention_gradient_kernels",
    "fits_decode",
    "fits_delta",
    "fits_ssd",
    "fixed_attention_kernels",
    "fixed_conv",
    "fixed_delta",
    "fixed_ssd",
    "fused_causal_conv",
    "fused_delta_decode",
    "fused_delta_sweep",
    "fused_gated_rms_norm",
    "fused_layer_norm",
    "fused_rms_norm",
    "fused_rotary",
    "fused_split_rotary",
    "fused_ssd",
    "fused_ssd_decode",
    "has_kernel",
    "kernel_plan",
    "plan_chunks",
    "softmax_kernels",
    "unit_stride",
]
