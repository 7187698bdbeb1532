# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One token of linear mixers by states in slots, a kernel each, without autograd; the mixers' torch code is the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api

_LARGEST_SIDE = 4096
"""Channels of a head's state that a program can hold in one dim."""


# R rows (sequences) of one token each, M slots of states, G groups, W channels of a group, K taps, H heads.
@internal_api
@dataclass(frozen=True, kw_only=True, eq=False)
class SlotStates:
    """States of one layer, and where those of the rows lie."""

    conv: Tensor
    """[M, K - 1, G, W], contiguous."""
    memory: Tensor
    """[M, H, ...] float32, contiguous."""
    slots: Tensor
    """[R], each slot once; -1 for a row of padding, whose result is 0."""
    finished: Tensor | None = None
    """[at least R G] int32 of zeros, which a kernel counts in and leaves zero; None to make them."""

    def counters(self) -> Tensor:
        if self.finished is not None:
            return self.finished
        return torch.zeros(len(self.slots) * self.conv.shape[2], dtype=torch.int32, device=self.slots.device)


@internal_api
def fits_decode(memory_shape: tuple[int, ...], taps: int) -> bool:
    """Whether a kernel can hold a head's state, and the convolution keeps tokens at all."""
    return taps > 1 and max(memory_shape[-2:]) <= _LARGEST_SIDE


@internal_api
def fused_ssd_decode(
    channels_RGW: Tensor,
    numbers_RGh: Tensor,
    conv: tuple[Tensor, Tensor | None],
    heads: tuple[Tensor, Tensor, Tensor],
    states: SlotStates,
    limits: tuple[float, float],
) -> Tensor:
    """y [R, H, P]: ``conv_step`` and ``ssd_step``, whose states are replaced in their slots.

    Args:
        channels_RGW: of each group values [h P], b [N] and c [N]; the last dim has stride 1.
        numbers_RGh: step sizes before bias and softplus, likewise.
        conv: weight [G, W, K] and bias [G, W].
        heads: A_log, D and the bias of the step sizes, [H] float32.
        states: memory [M, H, P, N].
        limits: of the step sizes.
    """
    from mcore_parallel.nn.kernels import _triton_recurrent

    state = states.conv, states.memory
    return _triton_recurrent.ssd_decode(channels_RGW, numbers_RGh, conv, heads, state, states.slots, states.counters(), limits)


@internal_api
def fused_delta_decode(
    channels_RGW: Tensor, numbers_RGn: Tensor, weight_GWK: Tensor, heads: tuple[Tensor, Tensor], states: SlotStates, epsilon: float
) -> Tensor:
    """o [R, H, V]: ``conv_step`` and ``delta_step``, whose states are replaced in their slots.

    Args:
        channels_RGW: of each key head values [h V], the key and the query; the last dim has stride 1.
        numbers_RGn: of each key head a [h] and b [h], likewise.
        weight_GWK: of the convolution.
        heads: A_log and the bias of a, [H] float32.
        states: memory [M, H, width of keys, V].
        epsilon: added to the squared length of a query or key.
    """
    from mcore_parallel.nn.kernels import _triton_recurrent

    state = states.conv, states.memory
    return _triton_recurrent.delta_decode(channels_RGW, numbers_RGn, weight_GWK, heads, state, states.slots, states.counters(), epsilon)
