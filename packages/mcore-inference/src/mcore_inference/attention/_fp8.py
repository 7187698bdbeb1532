# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parts of Triton kernels that write keys and values in fp8, or read them; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import triton
import triton.language as tl


@triton.jit
def unpacked(pairs):
    """Pairs of e4m3 in int16 as two tiles of float16, the first and the second of each over 2^8, which the caller's scales take in.

    Their bits under the exponent of float16 are that number, also of those below the smallest normal one. NaN becomes 480: whoever stores
    keeps it in the scales.
    """
    first = ((pairs & 0x80) << 8) | ((pairs & 0x7F) << 7)
    second = (pairs & -0x8000) | ((pairs & 0x7F00) >> 1)
    return first.to(tl.float16, bitcast=True), second.to(tl.float16, bitcast=True)


@triton.jit
def bounded(x):
    """Lines [L, d] over their largest magnitude, in float16, and that: fp8 becomes float16 in one instruction."""
    wide = x.to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
    return (wide / most[:, None]).to(tl.float16), most


@triton.jit
def pair_scores(even, odd, pairs, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Products of lines [L, d / 2] of even and odd channels with keys [keys, d / 2] in pairs of them, over 2^8."""
    first, second = unpacked(pairs)
    scores = tl.dot(even, tl.trans(first.to(KIND)), input_precision=PRECISION)
    return tl.dot(odd, tl.trans(second.to(KIND)), scores, input_precision=PRECISION)


@triton.jit
def absorb_scaled(scores, v, scales, best, total, result, PRECISION: tl.constexpr):
    """Add a tile of keys to a running softmax; of the values v [keys, d] each key has a scale."""
    highest, total, shrink, shares, most = _weighed(scores, scales, best, total)
    result = result * shrink[:, None] + tl.dot(shares.to(v.dtype), v, input_precision=PRECISION) * most
    return highest, total, result


@triton.jit
def absorb_pairs(scores, pairs, scales, best, total, even, odd, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """The same for values [keys, d / 2] in pairs of channels, of which the sums of even and odd ones are kept apart.

    A tile of 8 bits cannot be turned on its way from shared memory to the tensor cores, one of 16 can.
    """
    highest, total, shrink, shares, most = _weighed(scores, scales, best, total)
    shares = shares.to(KIND)
    first, second = unpacked(pairs)
    # Of 2^8 that the values are too small.
    most = most * 256.0
    even = even * shrink[:, None] + tl.dot(shares, first.to(KIND), input_precision=PRECISION) * most
    odd = odd * shrink[:, None] + tl.dot(shares, second.to(KIND), input_precision=PRECISION) * most
    return highest, total, even, odd


@triton.jit
def add_pairs(scores, pairs, scales, best, total, most, even, odd, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """As ``absorb_pairs``, of sums over the largest scale so far and 2^8: tiles are added up in place, which takes fewer registers."""
    highest = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(best - highest)
    largest = tl.maximum(most, tl.max(scales, 0))
    shares = (weights * (scales / largest)[None, :]).to(KIND)
    first, second = unpacked(pairs)
    smaller = (shrink * (most / largest))[:, None]
    even = tl.dot(shares, first.to(KIND), even * smaller, input_precision=PRECISION)
    odd = tl.dot(shares, second.to(KIND), odd * smaller, input_precision=PRECISION)
    return highest, total * shrink + tl.sum(weights, 1), largest, even, odd


@triton.jit
def _weighed(scores, scales, best, total):
    """The running maxima and sums with a tile, what the result before shrinks by, and the tile's weights: shares, and their factor."""
    highest = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(best - highest)
    # Scales relative to the largest of the tile keep the weights in the range of float16.
    most = tl.maximum(tl.max(scales, 0), 1e-35)
    return highest, total * shrink + tl.sum(weights, 1), shrink, weights * (scales / most)[None, :], most
