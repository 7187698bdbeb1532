# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The plain cache of latent attention: contiguous, of a fixed size, on one device."""

import torch
from torch import Tensor

from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._latent_config import LatentAttentionConfig


# T new tokens, B sequences, S new tokens a sequence, M tokens a sequence may have, A heads, W = C + R channels of an entry.
class LatentCache:
    """Entries of all layers; conforms to ``LatentCore``.

    The tokens of a step go to their ``positions`` and attend to all positions up to their own, so a prompt may come in parts, and a
    step at a position that is taken replaces what follows.

    Args:
        latent: sizes of an entry.
        num_layers: of the stage.
        batch_size: B, of every step.
        max_length: M.
        dtype: of the entries.
        device: of the entries.

    Example:
        >>> sizes = LatentAttentionConfig(kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
        >>> LatentCache(sizes, num_layers=2, batch_size=1, max_length=8).entries.shape
        torch.Size([2, 1, 8, 6])
    """

    def __init__(
        self,
        latent: LatentAttentionConfig,
        *,
        num_layers: int,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.rank = latent.kv_lora_rank
        self.entries = torch.zeros(num_layers, batch_size, max_length, latent.cache_width, dtype=dtype, device=device)

    def attend_latent(self, queries: Tensor, entries: Tensor, scale: float, layer: int, step: Step) -> Tensor:
        """queries [T, A, W], entries [T, W] -> [T, A, C]; softmax in float32 (float64 for float64).

        Raises:
            ValueError: a step of another number of sequences, of packed sequences, or longer than the cache.
        """
        sequences, length = self.entries.shape[1:3]
        if step.cu_seqlens is not None or step.batch_size != sequences:
            raise ValueError(f"a step of batch_size={step.batch_size} must have the {sequences} sequences of the cache, not packed")
        if step.seq_len > length:
            raise ValueError(f"seq_len={step.seq_len} exceeds max_length={length} of the cache; make a longer one")
        positions_BS = step.positions.unflatten(0, (sequences, -1))
        cache_BMW = self.entries[layer]
        cache_BMW.scatter_(
            1, positions_BS[..., None].expand(-1, -1, cache_BMW.shape[-1]), entries.to(cache_BMW.dtype).unflatten(0, (sequences, -1))
        )
        cache_BMW = cache_BMW.to(queries.dtype)
        scores = torch.einsum("bsaw,bmw->basm", queries.unflatten(0, (sequences, -1)), cache_BMW) * scale
        hidden = torch.arange(length, device=scores.device) > positions_BS[:, None, :, None]
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=wide).to(scores.dtype)
        return torch.einsum("basm,bmc->bsac", weights, cache_BMW[..., : self.rank]).flatten(0, 1)
