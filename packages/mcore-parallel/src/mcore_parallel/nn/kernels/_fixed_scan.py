# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Linear mixers token after token, from states in slots, without autograd; the mixers' torch code is the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api

WIDEST_STATE = 4096
"""Channels of a head's state over which a program sums: those of the state in Mamba-2, those of a key in a delta net."""


# T tokens, B sequences, M slots of states, G groups, W channels of a group, K taps, H heads.
@internal_api
@dataclass(frozen=True, kw_only=True, eq=False)
class SlotSpans:
    """Where B sequences lie among the tokens of a step, and their states among those of a server."""

    begins: Tensor
    """[B] int32, first token of each."""
    ends: Tensor
    """[B] int32, the one behind its last; a sequence without tokens leaves its state as it is."""
    slots: Tensor
    """[B] int64, those of sequences with tokens each once; -1 for padding."""

    @classmethod
    def in_order(cls, tokens: Tensor) -> "SlotSpans":
        """Sequences behind one another, whose states lie in their order.

        Args:
            tokens: [B + 1] int32, of ``ChunkPlan``.
        """
        return cls(begins=tokens[:-1], ends=tokens[1:], slots=torch.arange(len(tokens) - 1, device=tokens.device))


@internal_api
def fixed_conv(channels_TGW: Tensor, conv: tuple[Tensor, Tensor | None], state_MKGW: Tensor, spans: SlotSpans) -> Tensor:
    """Convolution and SiLU [T, G, W]: ``conv_step`` for each token, whose states are replaced in their slots.

    Args:
        channels_TGW: contiguous; tokens of no sequence get 0.
        conv: weight [G, W, K] and bias [G, W].
        state_MKGW: [M, K - 1, G, W], contiguous.
        spans: the sequences.
    """
    from mcore_parallel.nn.kernels import _triton_fixed_scan

    return _triton_fixed_scan.conv_fixed(channels_TGW, conv, state_MKGW, (spans.begins, spans.ends, spans.slots))


@internal_api
def fixed_ssd(
    mixed_TGW: Tensor,
    numbers_TGh: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    memory_MHPN: Tensor,
    spans: SlotSpans,
    limits: tuple[float, float],
) -> Tensor:
    """y [T, H, P]: ``ssd_step`` for each token, whose states are replaced in their slots.

    Args:
        mixed_TGW: of each group values [h P], b [N] and c [N]; contiguous.
        numbers_TGh: step sizes before bias and softplus, contiguous.
        heads: A_log, D and the bias of the step sizes, [H].
        memory_MHPN: float32, contiguous.
        spans: the sequences.
        limits: of the step sizes.
    """
    from mcore_parallel.nn.kernels import _triton_fixed_scan

    return _triton_fixed_scan.ssd_fixed(mixed_TGW, numbers_TGh, heads, memory_MHPN, (spans.begins, spans.ends, spans.slots), limits)


@internal_api
def fixed_delta(
    mixed_TGW: Tensor, numbers_TGn: Tensor, heads: tuple[Tensor, Tensor], memory_MHDV: Tensor, spans: SlotSpans, epsilon: float
) -> Tensor:
    """o [T, H, V]: ``delta_step`` for each token, whose states are replaced in their slots.

    Args:
        mixed_TGW: of each key head values [h V], the key [D] and the query [D]; contiguous.
        numbers_TGn: of each key head a [h] and b [h], contiguous.
        heads: A_log and the bias of a, [H].
        memory_MHDV: float32, contiguous.
        spans: the sequences.
        epsilon: added to the squared length of a query or key.
    """
    from mcore_parallel.nn.kernels import _triton_fixed_scan

    return _triton_fixed_scan.delta_fixed(mixed_TGW, numbers_TGn, heads, memory_MHDV, (spans.begins, spans.ends, spans.slots), epsilon)
