# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes and choices of a transformer."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The architecture, independent of any layout.

    Raises:
        ValueError: sizes that do not fit together.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    """Rows of the embedding; callers pad it to a multiple of tp (``mcore_parallel.tensor_parallel.pad_vocab_size``)."""
    num_query_groups: int | None = None
    """Key-value heads; None for as many as attention heads."""
    ffn_hidden_size: int | None = None
    """None for 4 * hidden_size."""
    kv_channels: int | None = None
    """Width of one head; None for hidden_size / num_attention_heads."""
    norm_epsilon: float = 1e-5
    rotary_base: float = 10_000.0
    init_method_std: float = 0.02
    share_embeddings_and_output_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must divide hidden_size={self.hidden_size}, or set kv_channels"
            )
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(f"num_query_groups={self.kv_heads} must divide num_attention_heads={self.num_attention_heads}")

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size
