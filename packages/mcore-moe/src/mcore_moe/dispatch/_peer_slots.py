# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where tokens and sums of an exchange lie in the memory of each rank, and the moves between, as torch code: the reference of the kernels.

A rank has a place for every token of every rank, whatever the routing, so no rank needs another's counts to know where to store. A token
is stored once in the memory of each rank that holds one of its experts, with its experts and weights; that rank sorts by itself. On the
way back it stores its part of the token's sum at the place of the same number in the memory of the token's own rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# G ranks, T tokens of this rank, A = G * room places for tokens, K experts a token, N experts of a rank, R rows, D model.

_ALIGNED_BYTES = 256


@dataclass(frozen=True)
class Slot:
    """What one exchange moves, in the memory of one rank."""

    x_AD: Tensor
    """Tokens, or parts of sums."""
    weights_AK: Tensor
    """Weights of the picks, or their gradients."""
    experts_AK: Tensor
    """int32 numbers over the ranks; -1 for no expert."""


@dataclass(frozen=True)
class SlotLayout:
    """Sizes of a slot, equal on all ranks. The token of number t of rank r has place r * room + t.

    Example:
        >>> layout = SlotLayout(2, 4, width=8, topk=2, num_local_experts=3, dtype=torch.bfloat16, weights_dtype=torch.float32)
        >>> layout.weights_at, layout.experts_at, layout.num_bytes
        (256, 512, 768)
    """

    num_ranks: int
    room: int
    """Most tokens of a rank."""
    width: int
    topk: int
    num_local_experts: int
    dtype: torch.dtype
    weights_dtype: torch.dtype

    @property
    def places(self) -> int:
        """A."""
        return self.num_ranks * self.room

    @property
    def weights_at(self) -> int:
        """Byte of the slot at which the weights begin."""
        return _aligned(self.places * self.width * self.dtype.itemsize)

    @property
    def experts_at(self) -> int:
        """Byte of the slot at which the experts begin."""
        return self.weights_at + _aligned(self.places * self.topk * self.weights_dtype.itemsize)

    @property
    def num_bytes(self) -> int:
        """Of a slot."""
        return self.experts_at + _aligned(self.places * self.topk * torch.int32.itemsize)

    @property
    def most_rows(self) -> int:
        """Rows of a rank when every token of every rank goes to as many of its experts as it can."""
        return self.places * min(self.topk, self.num_local_experts)

    def slot(self, memory: Tensor, begin: int) -> Slot:
        """Views of a rank's uint8 memory."""

        def view(at: int, size: int, dtype: torch.dtype) -> Tensor:
            first = begin + at
            return memory[first : first + self.places * size * dtype.itemsize].view(dtype).view(self.places, size)

        return Slot(
            view(0, self.width, self.dtype),
            view(self.weights_at, self.topk, self.weights_dtype),
            view(self.experts_at, self.topk, torch.int32),
        )


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNED_BYTES) * _ALIGNED_BYTES


def push_tokens(layout: SlotLayout, slots: Sequence[Slot], rank: int, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor | None) -> None:
    """Store this rank's tokens with the ranks of their experts, and unless ``weights_TK`` is None the routing of all with all ranks."""
    begin = rank * layout.room
    for peer, slot in enumerate(slots):
        if weights_TK is not None:
            # Of the places that this rank has no token for, the others see that they go nowhere.
            slot.experts_AK[begin : begin + layout.room] = -1
            slot.experts_AK[begin : begin + len(x_TD)] = experts_TK
            slot.weights_AK[begin : begin + len(x_TD)] = weights_TK
        wanted_T = of_rank(experts_TK, peer, layout.num_local_experts).any(1)
        slot.x_AD[begin : begin + len(x_TD)][wanted_T] = x_TD[wanted_T]


def push_sums(layout: SlotLayout, slots: Sequence[Slot], rank: int, rows_RD: Tensor, places_AK: Tensor, grad_R: Tensor | None) -> None:
    """Store the sum over each token's rows with its own rank, and unless ``grad_R`` is None the gradients of its weights."""
    wide, mine = torch.promote_types(rows_RD.dtype, torch.float32), slice(rank * layout.room, (rank + 1) * layout.room)
    for places_TK, slot in zip(places_AK.split(layout.room), slots, strict=True):
        came_TK = places_TK >= 0
        sums_TD = rows_RD.new_zeros((layout.room, layout.width), dtype=wide)
        for places_T, came_T in zip(places_TK.unbind(1), came_TK.unbind(1), strict=True):
            sums_TD[came_T] += rows_RD[places_T[came_T].long()].to(wide)
        came_T = came_TK.any(1)
        slot.x_AD[mine][came_T] = sums_TD[came_T].to(rows_RD.dtype)
        if grad_R is not None:
            slot.weights_AK[mine][came_TK] = grad_R[places_TK[came_TK].long()]


def add_sums(layout: SlotLayout, slot: Slot, experts_TK: Tensor, *, weighted: bool) -> tuple[Tensor, Tensor | None]:
    """[T, D], the parts of all ranks added up in their order, and with ``weighted`` [T, K], the gradients of the weights."""
    tokens, wide = len(experts_TK), torch.promote_types(layout.dtype, torch.float32)
    y_TD = slot.x_AD.new_zeros((tokens, layout.width), dtype=wide)
    grad_TK = slot.weights_AK.new_zeros(tokens, layout.topk) if weighted else None
    for peer in range(layout.num_ranks):
        came_TK = of_rank(experts_TK, peer, layout.num_local_experts)
        mine = slice(peer * layout.room, peer * layout.room + tokens)
        y_TD += torch.where(came_TK.any(1, keepdim=True), slot.x_AD[mine].to(wide), 0)
        if grad_TK is not None:
            grad_TK += torch.where(came_TK, slot.weights_AK[mine], 0)
    return y_TD.to(layout.dtype), grad_TK


def of_rank(experts_TK: Tensor, rank: int, num_local_experts: int) -> Tensor:
    """bool [T, K], the picks whose expert a rank holds."""
    return (experts_TK >= rank * num_local_experts) & (experts_TK < (rank + 1) * num_local_experts)
