# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The memory of keys and values, cut into blocks."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api


@experimental_api
def block_bytes(*, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, parts: int = 2) -> int:
    """Bytes of one block over all layers: keys and values, or latents alone as the one of ``parts``."""
    return parts * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize


@experimental_api
def num_blocks_for_bytes(buffer_bytes: int, bytes_per_block: int) -> int:
    """Blocks (the sink included) that fit.

    Raises:
        ValueError: fewer than two fit; says how many bytes two blocks take.
    """
    count = buffer_bytes // bytes_per_block
    if count < 2:
        raise ValueError(
            f"a cache of {buffer_bytes} bytes holds {count} blocks of {bytes_per_block} bytes; give it at least {2 * bytes_per_block} bytes"
        )
    return count


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PagedKVCache:
    """Keys and values of all layers of one stage.

    A token's slot is ``block * block_size + offset in the block``.
    """

    pages: Tensor
    """[layers, 2, blocks, block_size, K, d]: keys at 0, values at 1; K key-value heads of this tp rank. Of latent attention
    [layers, 1, blocks, block_size, 1, d]: latents with their rotary keys, whole on every tp rank."""
    layers: tuple[int, ...] | None = None
    """Numbers of the layers that have pages, in order; None for all from 0."""

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        parts: int = 2,
        layers: tuple[int, ...] | None = None,
    ) -> "PagedKVCache":
        # Zeros, not empty memory: the sink block is read by padding and must stay finite.
        pages = torch.zeros((num_layers, parts, num_blocks, block_size, num_kv_heads, head_dim), dtype=dtype, device=device)
        return cls(pages=pages, layers=layers)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.pages.shape) * self.pages.itemsize

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory behind the pages."""
        return self.pages.untyped_storage().size() > 0

    def free(self) -> None:
        """Give the memory back; what it held is lost."""
        self.pages.untyped_storage().resize_(0)

    def allocate_again(self) -> None:
        """Zeros where ``free`` left nothing, at another address as a rule.

        Raises:
            torch.OutOfMemoryError: there is too little memory; nothing is changed.
        """
        self.pages.untyped_storage().resize_(self.num_bytes)
        self.pages.zero_()

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as [blocks * block_size, K, d] views; of latents both are the same."""
        parts = self.pages[layer if self.layers is None else self.layers.index(layer)].flatten(1, 2)
        return parts[0], parts[-1]

    @property
    def holds_latents(self) -> bool:
        """Whether a token has one entry in place of keys and values."""
        return self.pages.shape[1] == 1
