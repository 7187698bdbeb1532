# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a rank holds of one parameter, as flat memory."""

from dataclasses import dataclass

import torch

from megatron_fsdp._layout import Shape


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatShard:
    """A contiguous range of one flattened parameter; over the ranks that shard it, the ranges cover it once.

    Example:
        >>> shard = FlatShard(shape=(4, 3), start=6, end=12, boxes=(((2, 0), (2, 3)),), parameter=torch.ones(6), gradient=None, replica=0)
        >>> [(offset, tuple(view.shape)) for offset, view in shard.blocks(shard.parameter)]
        [((2, 0), (2, 3))]
    """

    shape: Shape
    """Of the whole parameter."""
    start: int
    """First element, in the flattened parameter."""
    end: int
    """Element after the last."""
    boxes: tuple[tuple[Shape, Shape], ...]
    """(offset, size) of the blocks of the parameter that cover the range, in memory order."""
    parameter: torch.Tensor
    """[end - start], of the main parameter."""
    gradient: torch.Tensor | None
    """[end - start], of the reduced gradient, complete after ``finish_grad_sync``; None for a frozen parameter."""
    replica: int
    """Number of this copy among the ranks that hold the same range."""

    def blocks(self, flat: torch.Tensor) -> list[tuple[Shape, torch.Tensor]]:
        """(offset, view) of each box in a tensor [end - start] that lies as this shard does."""
        found, at = [], 0
        for offset, size in self.boxes:
            numel = torch.Size(size).numel()
            found.append((offset, flat[at : at + numel].view(size)))
            at += numel
        return found
