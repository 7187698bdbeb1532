# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton functions that kernels of several wheels call; imported only where such a kernel is."""

# pyright: reportArgumentType=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_parallel._stability import internal_api

__all__ = ["widened", "widens_by_bits"]


@internal_api
def widens_by_bits(x: Tensor) -> bool:
    """Whether ``widened`` may compute with bits beside these values: bfloat16 on an NVIDIA GPU."""
    return x.dtype == torch.bfloat16 and x.is_cuda and torch.version.hip is None


@internal_api
@triton.jit
def widened(weight, kind: tl.constexpr, BY_BITS: tl.constexpr):
    """Weights in the dtype of what they are multiplied by; those in e4m3 exactly, by bits where ``widens_by_bits`` says so.

    Hopper converts e4m3 to float16 and on over float32, a quarter as fast as it moves bits. The bits of e4m3 under the exponent of
    bfloat16 are the number over 2^120, also of those below the smallest normal one; so four are spread, shifted and multiplied at once.
    NaN becomes 480: whoever stores weights keeps it in their scales.
    """
    if BY_BITS and weight.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, low_bits, high_bits, factor, nothing;
            prmt.b32 low, 0, $2, 0x5040;
            prmt.b32 high, 0, $2, 0x7060;
            shr.u32 low_bits, low, 4;
            shr.u32 high_bits, high, 4;
            and.b32 low_bits, low_bits, 0x07F007F0;
            and.b32 high_bits, high_bits, 0x07F007F0;
            lop3.b32 low_bits, low, 0x80008000, low_bits, 0xEA;
            lop3.b32 high_bits, high, 0x80008000, high_bits, 0xEA;
            mov.b32 factor, 0x7B807B80;
            mov.b32 nothing, 0x80008000;
            fma.rn.bf16x2 $0, low_bits, factor, nothing;
            fma.rn.bf16x2 $1, high_bits, factor, nothing;
            }
            """,
            "=r,=r,r",
            [weight],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return weight.to(kind)
