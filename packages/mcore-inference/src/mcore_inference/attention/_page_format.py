# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a backend of attention is told about a cache, which may not be made yet."""

from dataclasses import dataclass

import torch

from mcore_inference._stability import experimental_api
from mcore_inference.cache import PagedKVCache


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PageFormat:
    """Of a cache, what decides whether a backend can read it."""

    dtype: torch.dtype
    """Of keys and values, or latents."""
    device: torch.device
    block_size: int
    """Tokens of a block."""
    latent: tuple[int, int] | None = None
    """Of latents, channels that are values and channels in all."""
    head_dim: int | None = None
    """Channels of a head; None for latents."""

    @classmethod
    def of(cls, cache: PagedKVCache) -> "PageFormat":
        """Of a cache that is made."""
        pages = cache.pages
        latent = (cache.latent_rank or 0, cache.width) if cache.holds_latents else None
        head_dim = None if latent is not None else pages.shape[-1]
        return cls(dtype=pages.dtype, device=pages.device, block_size=pages.shape[3], latent=latent, head_dim=head_dim)
