# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Kernel that adds rows in float32 and rounds once."""

# pyright: reportInvalidTypeForm=false, reportArgumentType=false, reportUnreachable=false

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _sum(rows, out, n, num_rows, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(rows + at, mask=inside, other=0.0).to(tl.float32)
    place = at
    for _ in range(1, num_rows):
        # Of 64 bits, as the product of a row number and n would not be.
        place += n
        total += tl.load(rows + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def sum_rows_kernel(rows: Tensor, out: Tensor) -> None:
    """out [n] = rows [W, n] added up, both contiguous."""
    num_rows, n = rows.shape
    _sum[(triton.cdiv(n, _BLOCK),)](rows, out, n, num_rows, BLOCK=_BLOCK)
