# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of scale, mask and softmax; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# B sequences, A heads, Q queries, K keys; a program has one row of K.


def scale_mask_softmax(scores_BAQK: Tensor, mask: Tensor | None, scale: float, bounds: tuple[int, int], out_dtype: torch.dtype) -> Tensor:
    """Weights of contiguous scores; a mask is bool and broadcasts."""
    _, heads, queries, keys = scores_BAQK.shape
    out = torch.empty_like(scores_BAQK, dtype=out_dtype)
    whole = scores_BAQK if mask is None else mask.expand(scores_BAQK.shape).view(torch.uint8)
    strides = (0, 0, 0, 0) if mask is None else whole.stride()
    if out.numel():
        _forward_kernel[(out.numel() // keys,)](
            scores_BAQK, whole, out, *strides, heads, queries, keys, scale, *bounds, MASKED=mask is not None, **_constants(keys)
        )
    return out


def scale_mask_softmax_backward(grad_BAQK: Tensor, weights_BAQK: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Gradient of the scores; both tensors are contiguous."""
    keys = weights_BAQK.shape[-1]
    out = torch.empty_like(weights_BAQK, dtype=dtype)
    if out.numel():
        _backward_kernel[(out.numel() // keys,)](grad_BAQK, weights_BAQK, out, keys, scale, **_constants(keys))
    return out


def _constants(keys: int) -> dict[str, int]:
    block = triton.next_power_of_2(keys)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


@triton.jit
def _forward_kernel(
    scores_ptr, mask_ptr, out_ptr, batch_stride, head_stride, query_stride, key_stride, num_heads, num_queries, num_keys, scale,
    left, right,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = row % num_queries
    key = tl.arange(0, BLOCK)
    inside = key < num_keys
    # Of the key from where the query stands.
    distance = key - (query + num_keys - num_queries)
    seen = tl.where(left < 0, inside, inside & (distance >= -left))
    seen = tl.where(right < 0, seen, seen & (distance <= right))
    if MASKED:
        head, batch = (row // num_queries) % num_heads, row // num_queries // num_heads
        at = batch * batch_stride + head * head_stride + query * query_stride + key * key_stride
        seen = seen & (tl.load(mask_ptr + at, mask=inside, other=1) == 0)
    x = tl.load(scores_ptr + row * num_keys + key, mask=seen, other=0.0).to(tl.float32) * scale
    x = tl.where(seen, x, float("-inf"))
    highest = tl.max(x, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(x - highest)
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * num_keys + key, weights.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad_ptr, weights_ptr, out_ptr, num_keys, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, BLOCK)
    inside = key < num_keys
    grad = tl.load(grad_ptr + row * num_keys + key, mask=inside, other=0.0).to(tl.float32)
    weights = tl.load(weights_ptr + row * num_keys + key, mask=inside, other=0.0).to(tl.float32)
    grad = scale * weights * (grad - tl.sum(grad * weights, 0))
    tl.store(out_ptr + row * num_keys + key, grad.to(out_ptr.dtype.element_ty), mask=inside)
