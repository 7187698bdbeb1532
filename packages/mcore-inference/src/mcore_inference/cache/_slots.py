# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Slots of one layer of the cache: how keys and values are written and read, in the model's dtype or in fp8."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_parallel.backends import quantize_rows

FP8 = torch.float8_e4m3fn
"""The format of keys and values in fp8."""


# N slots, T tokens, K key-value heads, d width of a head; of latents C channels that are values, and R of the rotary key.
@experimental_api
@dataclass(frozen=True, kw_only=True)
class LayerSlots:
    """Keys and values of one layer.

    In fp8 (e4m3) a head of a token has a scale of its own, its largest magnitude over 448, so that an element is off by at most 1/16 of
    itself, or 2**-10 / 448 of the largest one where that is more. What is stored depends on the token alone. Of latents those channels
    that are values are in fp8; the rotary key behind them keeps the model's dtype, in ``rotary``.
    """

    keys: Tensor
    """[N, K, d]; of latents in fp8 [N, 1, C]."""
    values: Tensor
    """[N, K, d]; the keys again where latents are both. Narrower ones lie at the beginning of their slots (``of_value_width``)."""
    scales: tuple[Tensor, Tensor] | None = None
    """float32 [N, K] of the keys and of the values, side by side over the slots; None where they are not in fp8."""
    rotary: Tensor | None = None
    """[N, R], rotary keys of latents in fp8; None for all else."""

    def of_value_width(self, width: int) -> "LayerSlots":
        """The same memory for values of ``width`` channels a head, [N, K, w], which lie side by side at the beginning of each slot."""
        num_heads, most = self.values.shape[1:]
        if width == most:
            return self
        assert width < most and self.scales is None, "slots hold values that are as wide as keys, or narrower, and no scales of others"
        return dataclasses.replace(self, values=self.values.flatten(1)[:, : num_heads * width].unflatten(1, (num_heads, width)))

    def write(self, slots_T: Tensor, k: Tensor, v: Tensor) -> None:
        """Put keys and values [T, K, d] into their slots; of latents entries [T, 1, C + R] as both."""
        if self.rotary is not None:
            width = self.keys.shape[-1]
            self.rotary.index_copy_(0, slots_T, k[:, 0, width:])
            k = v = k[..., :width]
        if self.scales is None:
            self.keys.index_copy_(0, slots_T, k)
            self.values.index_copy_(0, slots_T, v)
            return
        for x, data, scales in zip((k, v), (self.keys, self.values), self.scales, strict=True):
            scaled = quantize_rows(x.flatten(0, 1), FP8)
            # Bytes: fp8 has no such copy on every device.
            data.view(torch.uint8).index_copy_(0, slots_T, scaled.data.view(torch.uint8).view(x.shape))
            scales.index_copy_(0, slots_T, scaled.inverse.view(x.shape[:2]))

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [*slots, K, d] in a dtype; of latents entries [*slots, 1, C + R] as both."""
        if self.scales is None:
            return _take(self.keys, slots), _take(self.values, slots)
        wide = torch.promote_types(dtype, torch.float32)
        k, v = (
            (data.view(torch.uint8)[slots].view(FP8).to(wide) * scales[slots][..., None].to(wide)).to(dtype)
            for data, scales in zip((self.keys, self.values), self.scales, strict=True)
        )
        if self.rotary is not None:
            k = v = torch.cat((k, _take(self.rotary, slots)[..., None, :].to(dtype)), dim=-1)
        return k, v


def _take(x: Tensor, slots: Tensor) -> Tensor:
    """``x[slots]`` of slots from 0 on: whole rows, which on a CPU are copied three times as fast as by an index of several dims."""
    return x.index_select(0, slots.flatten()).view(*slots.shape, *x.shape[1:])
