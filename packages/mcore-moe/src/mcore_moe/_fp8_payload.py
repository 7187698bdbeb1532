# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows that travel in fp8: e4m3 values with a scale for each block of 128, and the weight of the row behind them, in one message."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.comm import all_to_all

# R rows, D model, S blocks of a row, B bytes of a row.

_BLOCK = 128
_FORMAT = torch.float8_e4m3fn
_LEAST_EXPONENT = 27  # 2^-100, so that no scale is subnormal.


def encode(rows_RD: Tensor) -> Tensor:
    """[R, D + S] bytes: values, then the exponents of the scales as float32 has them.

    A scale is the least power of two with which no value of the block leaves the range. So what is decoded is exact in bfloat16, and loses
    nothing when it is encoded again. A block that holds anything not finite becomes NaN.
    """
    num_rows, width = rows_RD.shape
    wide_RD = rows_RD.float()
    blocks_RSC = F.pad(wide_RD, (0, -width % _BLOCK)).view(num_rows, -(-width // _BLOCK), _BLOCK)
    bits_RS = blocks_RSC.abs().amax(-1).view(torch.int32)
    exponent_RS = bits_RS >> 23 & 0xFF
    # 448, the largest value, is 1.75 * 2^8; the mantissa of 1.75 is 0x600000.
    scale_RS = (exponent_RS - 8 + ((bits_RS & 0x7FFFFF) > 0x600000)).clamp(min=_LEAST_EXPONENT)
    # Casts of infinities are NaN in some versions of torch only.
    factor_RS = _power(254 - scale_RS).masked_fill(exponent_RS == 255, torch.nan)
    values_RSC = (blocks_RSC * factor_RS.unsqueeze(-1)).to(_FORMAT).view(torch.uint8)
    return torch.cat((values_RSC.flatten(1)[:, :width], scale_RS.to(torch.uint8)), dim=1)


def decode(bytes_RB: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """[R, ``width``] in ``dtype``."""
    values_RD = bytes_RB[:, :width].contiguous().view(_FORMAT).float()
    scales_RD = _power(bytes_RB[:, width:].to(torch.int32)).repeat_interleave(_BLOCK, dim=1)[:, :width]
    return (values_RD * scales_RD).to(dtype)


def rounded(x_TD: Tensor) -> Tensor:
    """Tokens as they come out of the exchange, whether they travel or not; the gradient is that of the tokens."""
    return _Rounded.apply(x_TD)


def send(
    rows_RD: Tensor, weights_R: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], group: Group, pause: Callable[[], None] | None
) -> tuple[Tensor, Tensor]:
    """As ``all_to_all_autograd`` of rows, which are rounded, and of their weights; gradients travel in the dtypes of these."""
    return (rows_RD, weights_R) if group.size == 1 else _Send.apply(rows_RD, weights_R, out_splits, in_splits, group, pause)


def _power(exponent: Tensor) -> Tensor:
    """float32 2^(exponent - 127), exactly."""
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def _bytes(values: Tensor) -> Tensor:
    """[R, bytes] of [R, D], or of [R]."""
    return (values if values.dim() == 2 else values.unsqueeze(-1)).contiguous().view(torch.uint8)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor) -> Tensor:
        return decode(encode(x_TD), x_TD.shape[1], x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_RD: Tensor,
        weights_R: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        group: Group,
        pause: Callable[[], None] | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.back = in_splits, out_splits, group, pause
        message_RB = torch.cat((encode(rows_RD), _bytes(weights_R)), dim=1)
        coded_QB, weight_QB = _split(all_to_all(message_RB, out_splits, in_splits, group, pause), weights_R.element_size())
        return decode(coded_QB, rows_RD.shape[1], rows_RD.dtype), weight_QB.view(weights_R.dtype).flatten()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_rows_QD, grad_weights_Q = grads
        message_QB = torch.cat((_bytes(grad_rows_QD), _bytes(grad_weights_Q)), dim=1)
        rows_RB, weight_RB = _split(all_to_all(message_QB, *ctx.back), grad_weights_Q.element_size())
        return rows_RB.view(grad_rows_QD.dtype), weight_RB.view(grad_weights_Q.dtype).flatten(), None, None, None, None


def _split(message_RB: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    """The bytes of the rows, and the last of each, which are those of the weights."""
    # A copy, for another dtype needs a place that is a multiple of its size.
    return message_RB[:, :-num_bytes].contiguous(), message_RB[:, -num_bytes:].clone(memory_format=torch.contiguous_format)
