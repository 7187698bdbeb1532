# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Causal convolution of each channel with itself, and SiLU."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.nn.kernels import fused_causal_conv, has_kernel


# T tokens, B sequences, G groups, W channels of a group, K taps.
class CausalConv(nn.Module):
    """Weight [G, W, K] and bias [G, W] of the short convolution before a linear mixer, cut over tp by group.

    Args:
        num_groups: G.
        channels: W.
        kernel: K.
        groups: tp is used.
        bias: add one.
        dtype: of the parameters.
        device: of the parameters.
    """

    def __init__(
        self,
        num_groups: int,
        channels: int,
        kernel: int,
        groups: ProcessGroups,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self._specs = {"weight": ShardSpec(shape=(num_groups, channels, kernel), shards={"tp": 0})}
        if bias:
            self._specs["bias"] = ShardSpec(shape=(num_groups, channels), shards={"tp": 0})
        self.weight = nn.Parameter(torch.empty(self._specs["weight"].local_shape(groups), dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(self._specs["bias"].local_shape(groups), dtype=dtype, device=device)) if bias else None

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: Any) -> Tensor:
        """Uniform within 1 / sqrt(K), as torch draws a convolution with one input channel a group."""
        bound = 1.0 / math.sqrt(self.weight.shape[-1])
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    def extra_repr(self) -> str:
        return f"{self._specs['weight'].shape}, bias={self.bias is not None}"


def causal_conv(x_TGW: Tensor, weight_GWK: Tensor, bias_GW: Tensor | None, positions_T: Tensor) -> Tensor:
    """``silu(bias + sum_k weight[k] x[t - K + 1 + k])``; tokens before the sequence count as zeros.

    Args:
        x_TGW: channels.
        weight_GWK: taps, the last one is of the token itself.
        bias_GW: or None.
        positions_T: of each token in its sequence; sequences lie behind one another.

    Returns:
        [T, G, W] in the dtype of x, computed in float32 at least.
    """
    if has_kernel(x_TGW):
        return fused_causal_conv(x_TGW, weight_GWK, bias_GW, positions_T)
    wide = torch.promote_types(x_TGW.dtype, torch.float32)
    x, weight = x_TGW.to(wide), weight_GWK.to(wide)
    kernel = weight.shape[-1]
    total = x * weight[..., -1] if bias_GW is None else x * weight[..., -1] + bias_GW.to(wide)
    for back in range(1, min(kernel, len(x))):
        earlier = F.pad(x[:-back], (0, 0, 0, 0, back, 0))
        total = total + torch.where((positions_T >= back)[:, None, None], earlier, 0.0) * weight[..., -1 - back]
    return F.silu(total).to(x_TGW.dtype)


def extend(x_TGW: Tensor, state_BKGW: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sequences with the K - 1 tokens before each of them, for a prefill that goes on; nothing waits for the device.

    Args:
        x_TGW: tokens, some of which may lie before and behind the sequences.
        state_BKGW: [B, K - 1, G, W] tokens before each sequence.
        tokens: of ``ChunkPlan``.

    Returns:
        The longer sequences [T + B (K - 1), G, W], the positions in them [T + B (K - 1)], the rows [T] of x in them, and the last K - 1
        tokens of each [B, K - 1, G, W].
    """
    (batch, size), device = state_BKGW.shape[:2], x_TGW.device
    starts, ends = tokens[:-1].long(), tokens[1:].long()
    token_T, before_K = (torch.arange(count, device=device) for count in (len(x_TGW), size))
    added_B = size * torch.arange(batch, device=device)
    # Sequences that have begun, each of which moves what follows.
    begun_T = torch.searchsorted(starts, token_T, right=True)
    row_T, row_BK = token_T + size * begun_T, (starts + added_B)[:, None] + before_K
    rows = torch.cat((row_T, row_BK.flatten()))
    begin_T = F.pad(starts - size, (1, 0))[begun_T]
    longer = x_TGW.new_empty(len(rows), *x_TGW.shape[1:]).index_copy_(0, rows, torch.cat((x_TGW, state_BKGW.to(x_TGW.dtype).flatten(0, 1))))
    positions = torch.empty_like(rows).index_copy_(0, rows, torch.cat((token_T - begin_T, before_K.repeat(batch))))
    return longer, positions.to(torch.int32), row_T, longer[(ends + added_B)[:, None] + before_K]


def conv_step(x_BGW: Tensor, state_BKGW: Tensor, weight_GWK: Tensor, bias_GW: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token of each of B sequences and the K - 1 before it -> (result [B, G, W], the next K - 1)."""
    window = torch.cat((state_BKGW, x_BGW[:, None].to(state_BKGW.dtype)), dim=1)
    wide = torch.promote_types(x_BGW.dtype, torch.float32)
    total = torch.einsum("bkgw,gwk->bgw", window.to(wide), weight_GWK.to(wide))
    if bias_GW is not None:
        total = total + bias_GW.to(wide)
    return F.silu(total).to(x_BGW.dtype), window[:, 1:]
