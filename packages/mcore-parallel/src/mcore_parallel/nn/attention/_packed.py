# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Heads as the projection leaves them, and the cores that take these."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mcore_parallel._stability import experimental_api
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.positions import apply_rotary


# T tokens, A heads and K key-value heads of this tp rank, d width of a head.
@experimental_api
@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """RMS norms of the query and key heads, d channels each."""

    query: Tensor
    """[d]."""
    key: Tensor
    """[d]."""
    epsilon: float
    shift: float
    """Added to the weights."""

    @property
    def parts(self) -> tuple[Tensor, Tensor, float, float]:
        """All four, in this order."""
        return self.query, self.key, self.epsilon, self.shift


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PackedHeads:
    """T tokens of a step between the projection and attention, biases included.

    Example:
        >>> q, k, v = PackedHeads(qkv=torch.ones(3, 2, 6, 4)).split()
        >>> q.shape, k.shape, v.shape
        (torch.Size([3, 8, 4]), torch.Size([3, 2, 4]), torch.Size([3, 2, 4]))
    """

    qkv: Tensor
    """[T, K, A / K + 2, d]: of each key-value head its query heads, its key, its value. Whoever takes it may overwrite it."""
    tables: tuple[Tensor, Tensor] | None = None
    """cos and sin [T, channels of a head that turn], which turn queries and keys; None for none."""
    interleaved: bool = False
    """Channel 2 i turns with 2 i + 1, not with the one half a head further."""
    norms: HeadNorms | None = None
    """Of queries and keys, in front of the rotation; None for none."""

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, A, d] and keys [T, K, d], normalised and turned, and values [T, K, d], by torch: what a kernel is tested against."""
        q, k, v = self.qkv[:, :, :-2].flatten(1, 2), self.qkv[:, :, -2], self.qkv[:, :, -1]
        if self.norms is not None:
            query, key, epsilon, shift = self.norms.parts
            q, k = _normalised(q, query, epsilon, shift), _normalised(k, key, epsilon, shift)
        if self.tables is not None:
            q, k = (apply_rotary(x, self.tables, interleaved=self.interleaved) for x in (q, k))
        return q, k, v


@experimental_api
@runtime_checkable
class PackedAttentionCore(Protocol):
    """An attention core that may take heads as they are, so that head norms, rotation, a cache's write and attention are few launches.

    ``SelfAttention`` asks it in steps that bring it something (``Step.attention``); it is called as an ``AttentionCore`` in the others,
    and where it does not take the heads. There are no gradients through packed heads.
    """

    def takes_packed(self, heads: PackedHeads, layer: int, step: Step) -> bool:
        """Whether ``attend_packed`` computes these heads of a layer; it neither waits for the device nor changes anything."""
        ...

    def attend_packed(self, heads: PackedHeads, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        """[T, K, A / K + 2, d] -> [T, A, d], with a sink [A] as of ``SinkAttentionCore``."""
        ...


def _normalised(x: Tensor, weight: Tensor, epsilon: float, shift: float) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale * (weight.to(wide.dtype) + shift)).to(x.dtype)
