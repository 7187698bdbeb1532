# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parts of Triton kernels that cast to fp8 (e4m3) with a scale; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import triton
import triton.language as tl


@triton.jit
def inverse_of(amax, sums):
    """What a head in fp8 (e4m3) is multiplied by; that of zeros is not zero.

    Args:
        amax: its largest magnitude.
        sums: of its values: of what is not finite, which a maximum passes over, the scale is NaN.
    """
    return tl.div_rn(tl.maximum(amax, 1e-30), 448.0) + sums * 0.0


@triton.jit
def shrunk(x, inverse):
    """float32 values in the range of fp8; the comparisons leave NaN as it is."""
    x = x * tl.div_rn(1.0, inverse)
    return tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))


@triton.jit
def rounded(x):
    """float32 values in the range of fp8, to the nearest that it holds, ties to even: to convert them changes nothing any more.

    By bits, and not there and back: of values that are stored in fp8 as well ptxas of CUDA 13.0 takes the wrong half of a register back,
    where a thread has eight of them.
    """
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF).to(tl.float32, bitcast=True)
    # Below the smallest normal number, 2^-6, steps are of 2^-9; a number of which the last bit is such a step makes all others round.
    small = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, small, tl.where(x == x, normal, x))
