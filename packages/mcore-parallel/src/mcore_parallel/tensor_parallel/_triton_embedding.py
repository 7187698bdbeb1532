# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The Triton kernel that adds gradients of picked rows; imported only when it runs."""

import triton
import triton.language as tl
from torch import Tensor

_PICKS, _COLUMNS = 16, 512


def add_rows_(total_VD: Tensor, rows_T: Tensor, grad_TD: Tensor) -> None:
    """As there: one program a distinct row and block of columns, so nothing is added by two."""
    tokens, width = grad_TD.shape
    if tokens:
        grad_TD = grad_TD.contiguous()
        # Stable: the picks of a row are added in their order.
        sorted_T, order_T = rows_T.sort(stable=True)
        _add_rows_kernel[(tokens, triton.cdiv(width, _COLUMNS))](
            sorted_T, order_T, grad_TD, total_VD, tokens, width, total_VD.stride(0), PICKS=_PICKS, COLUMNS=_COLUMNS
        )


@triton.jit
def _add_rows_kernel(
    sorted_ptr, order_ptr, grad_ptr, total_ptr, tokens, width, total_stride, PICKS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0)
    row = tl.load(sorted_ptr + first)
    before = tl.load(sorted_ptr + first - 1, mask=first > 0, other=-1)
    # The first pick of a row does the work of all; rows of -1 come first, and have no work.
    if row != before:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((COLUMNS,), tl.float32)
        begin = first
        more = True
        while more:
            place = begin + tl.arange(0, PICKS)
            same = tl.load(sorted_ptr + place, mask=place < tokens, other=-1) == row
            pick = tl.load(order_ptr + place, mask=same, other=0)
            inside = same[:, None] & (column < width)[None, :]
            total += tl.sum(tl.load(grad_ptr + pick[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32), 0)
            begin += PICKS
            more = tl.sum(same.to(tl.int32), 0) == PICKS
        target = total_ptr + row * total_stride + column
        tl.store(target, (tl.load(target, mask=column < width).to(tl.float32) + total).to(total_ptr.dtype.element_ty), mask=column < width)
