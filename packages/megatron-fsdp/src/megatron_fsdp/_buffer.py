# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A flat buffer whose memory comes and goes while tensors keep pointing into it."""

import torch

from megatron_fsdp._layout import FlatLayout, Segment


class FlatBuffer:
    """Flat storage with parameter views, which survive ``release`` and see the new contents after ``allocate``.

    Autograd keeps views of weights for the backward; because release and allocate act on the storage, those views are
    valid again once the buffer is gathered again. A buffer in a slot borrows its memory, whose address never changes.
    """

    def __init__(self, layout: FlatLayout, flat: torch.Tensor, *, borrowed: bool = False) -> None:
        self.layout, self.flat = layout, flat
        self._num_bytes = flat.untyped_storage().nbytes()
        self._borrowed, self._in_use = borrowed, not borrowed

    @property
    def allocated(self) -> bool:
        return self._in_use

    def allocate(self) -> None:
        """Make room; contents are undefined until written."""
        if not self._in_use and not self._borrowed:
            self.flat.untyped_storage().resize_(self._num_bytes)
        self._in_use = True

    def release(self) -> None:
        """Give the memory back."""
        if not self._borrowed:
            self.flat.untyped_storage().resize_(0)
        self._in_use = False

    def view(self, segment: Segment) -> torch.Tensor:
        """The parameter's place, in its own shape.

        The view has its own version counter: gathering again writes the same values, which autograd must not take for
        a change of a saved tensor.
        """
        return self.flat.data[segment.offset : segment.offset + segment.numel].view(segment.shape)


def local_view(flat: torch.Tensor, segment: Segment, rank: int, shard_numel: int) -> torch.Tensor:
    """This rank's rows of a parameter in its slice ``flat`` [shard_numel]: [rows, *row shape]."""
    if segment.numel == 0:
        first, last = segment.rows(rank, shard_numel)
        return flat[:0].view(last - first if segment.row_numel == 0 else 0, *segment.row_shape)
    first, last = segment.rows(rank, shard_numel)
    # An empty share may lie outside of the slice.
    start = segment.offset + first * segment.row_numel - rank * shard_numel if last > first else 0
    return flat[start : start + (last - first) * segment.row_numel].view(last - first, *segment.row_shape)
