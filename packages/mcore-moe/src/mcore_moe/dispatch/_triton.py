# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel that sums the rows of each token; imported only when it runs."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def gather_sum(rows_RD: Tensor, places_TK: Tensor) -> Tensor:
    """[T, D]: rows at the places of each token, added in order in float32; places below 0 add nothing."""
    tokens, topk = places_TK.shape
    width = rows_RD.shape[1]
    y_TD = torch.empty((tokens, width), dtype=rows_RD.dtype, device=rows_RD.device)
    if y_TD.numel():
        blocks = triton.cdiv(width, _BLOCK)
        _gather_sum_kernel[(tokens * blocks,)](
            rows_RD, places_TK, y_TD, rows_RD.stride(0), width, blocks, TOPK=topk, BLOCK=_BLOCK, num_warps=4
        )  # fmt: skip
    return y_TD


@triton.jit
def _gather_sum_kernel(rows_ptr, places_ptr, y_ptr, stride, width, blocks, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = (tl.program_id(0) // blocks).to(tl.int64)
    lanes = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOPK):
        place = tl.load(places_ptr + token * TOPK + choice).to(tl.int64)
        row = tl.load(rows_ptr + place * stride + lanes, mask=inside & (place >= 0), other=0.0)
        total += row.to(tl.float32)
    tl.store(y_ptr + token * width + lanes, total.to(y_ptr.dtype.element_ty), mask=inside)
