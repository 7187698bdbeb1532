# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The memory of keys and values, cut into blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.cache._slots import FP8, LayerSlots
from mcore_inference.memory import CacheMemory, cache_memory


@experimental_api
def block_bytes(
    *,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    parts: int = 2,
    rotary: tuple[int, torch.dtype] | None = None,
) -> int:
    """Bytes of one block over all layers: keys and values, or latents alone as the one of ``parts``; those in fp8 with their scales, and
    rotary keys beside them as of ``PagedKVCache.allocate``."""
    head = head_dim * dtype.itemsize + (4 if dtype == FP8 else 0)
    beside = 0 if rotary is None else rotary[0] * rotary[1].itemsize
    return num_layers * block_size * (parts * num_kv_heads * head + beside)


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
    [layers, 1, blocks, block_size, 1, d]: latents with their rotary keys, whole on every tp rank; in fp8 the latents alone."""
    layers: tuple[int, ...] | None = None
    """Numbers of the layers that have pages, in order; None for all from 0."""
    scales: Tensor | None = None
    """[layers, 2, K, blocks * block_size] float32, what the values of a head of a token in fp8 are multiplied by; None in other dtypes."""
    latent_rank: int | None = None
    """Of latents the channels that are values; their rotary key follows. None for keys and values."""
    rotary: Tensor | None = None
    """[layers, blocks * block_size, R] in the model's dtype, the rotary keys of latents in fp8; None for all else."""
    attention_backend: str | None = None
    """Who attends over it, as of ``PagedAttention``: steps are made for that."""

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
        memory: CacheMemory | None = None,
        latent_rank: int | None = None,
        rotary: tuple[int, torch.dtype] | None = None,
        attention_backend: str | None = None,
    ) -> "PagedKVCache":
        """Pages of zeros in ``memory``, or in memory of the device that is theirs for good.

        ``rotary`` is the width and dtype of rotary keys beside latents in fp8, whose ``head_dim`` does not count them.
        """
        memory = cache_memory(torch.device(device)) if memory is None else memory
        # Zeros, not empty memory: the sink block is read by padding and must stay finite.
        pages = memory.zeros((num_layers, parts, num_blocks, block_size, num_kv_heads, head_dim), dtype)
        scales = None
        if dtype == FP8:
            # Heads outside: the scales of a tile of keys lie side by side.
            scales = memory.zeros((num_layers, parts, num_kv_heads, num_blocks * block_size), torch.float32)
        beside = None if rotary is None else memory.zeros((num_layers, num_blocks * block_size, rotary[0]), rotary[1])
        return cls(pages=pages, layers=layers, scales=scales, latent_rank=latent_rank, rotary=beside, attention_backend=attention_backend)

    def release(self, memory: CacheMemory) -> None:
        """Free them for good, in the memory that they were allocated in."""
        for tensor in self._tensors:
            memory.release(tensor)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def width(self) -> int:
        """Channels of a head, or of a latent and its rotary key."""
        return self.pages.shape[-1] + (0 if self.rotary is None else self.rotary.shape[-1])

    @property
    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.pages, self.scales, self.rotary) if tensor is not None]

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as [blocks * block_size, K, d] views; of latents both are the same, in fp8 without rotary keys."""
        parts = self.pages[self._place(layer)].flatten(1, 2)
        return parts[0], parts[-1]

    def layer(self, layer: int) -> LayerSlots:
        """What one layer writes and reads."""
        keys, values = self.slots(layer)
        if self.scales is None:
            return LayerSlots(keys=keys, values=values)
        place = self._place(layer)
        scales = self.scales[place].transpose(1, 2)
        rotary = None if self.rotary is None else self.rotary[place]
        return LayerSlots(keys=keys, values=values, scales=(scales[0], scales[-1]), rotary=rotary)

    def _place(self, layer: int) -> int:
        return layer if self.layers is None else self.layers.index(layer)

    @property
    def holds_latents(self) -> bool:
        """Whether a token has one entry in place of keys and values."""
        return self.pages.shape[1] == 1
