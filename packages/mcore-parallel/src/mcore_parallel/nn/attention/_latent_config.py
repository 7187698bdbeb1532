# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes of multi-head latent attention."""

from dataclasses import dataclass, fields

from mcore_parallel._field_types import check_field_types


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Queries, keys and values through low ranks; rotary embedding on channels of their own (DeepSeek-V2, 2024).

    Raises:
        ValueError: a size below 1, an odd qk_rope_head_dim, a norm_epsilon that is not above 0.

    Example:
        >>> LatentAttentionConfig(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128).qk_head_dim
        192
    """

    q_lora_rank: int | None = None
    """Rank of the query projection; None for a full one."""
    kv_lora_rank: int
    """Rank of the projection that keys and values share; what a cache holds, with the rotary key."""
    qk_nope_head_dim: int
    """Channels of a query or key head without rotary embedding."""
    qk_rope_head_dim: int
    """Channels of a query or key head with it; the key's are shared by all heads."""
    v_head_dim: int
    """Channels of a value head."""
    norm_epsilon: float | None = None
    """Of the norms of the latents; None for that of the layer's norms."""

    def __post_init__(self) -> None:
        check_field_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "norm_epsilon" and value is not None and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        if self.norm_epsilon is not None and not self.norm_epsilon > 0.0:
            raise ValueError(f"norm_epsilon={self.norm_epsilon} must be above 0; leave it at None for that of the layer's norms")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: channels turn in pairs")

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Channels of a token's entry in a latent cache, whatever the number of heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim
