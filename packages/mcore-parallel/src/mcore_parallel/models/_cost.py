# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters and floating-point operations of a model, counted from its config."""

from mcore_parallel.models._config import TransformerConfig


def num_parameters(config: TransformerConfig, *, feed_forward: int | None = None) -> int:
    """Distinct parameters of a ``GPTModel``.

    Args:
        config: the architecture.
        feed_forward: parameters of the feed-forward slot of one layer; None for the dense one.
    """
    vocabulary = config.vocab_size * config.hidden_size
    layer = _attention_weights(config) + (_dense_weights(config) if feed_forward is None else feed_forward) + 2 * config.hidden_size
    tables = 1 if config.share_embeddings_and_output_weights else 2
    return config.num_layers * layer + config.hidden_size + tables * vocabulary


def flops_per_token(config: TransformerConfig, seq_len: int, *, feed_forward: int | None = None, causal: bool = True) -> float:
    """Operations of forward and backward a token, on average over a sequence; a multiply-add is two.

    A matrix costs 2 operations a weight forward and 4 backward; the embedding look-up costs nothing, the output projection
    counts. Attention costs 2 products of head_dim per query head and visible key, of which a causal mask leaves
    (seq_len + 1) / 2. Recomputation does not count.

    Args:
        config: the architecture.
        seq_len: tokens a token may see in one sequence.
        feed_forward: weights of one layer's feed-forward that a token passes (of a mixture: router, the chosen experts, shared
            ones); None for the dense one.
        causal: a token sees itself and those before it only.
    """
    weights = _attention_weights(config) + (_dense_weights(config) if feed_forward is None else feed_forward)
    visible = (seq_len + 1) / 2 if causal else seq_len
    attention = 2 * config.num_attention_heads * config.head_dim * visible
    return 6 * (config.num_layers * (weights + attention) + config.vocab_size * config.hidden_size)


def _attention_weights(config: TransformerConfig) -> int:
    """Queries, keys, values and the projection back."""
    return 2 * (config.num_attention_heads + config.kv_heads) * config.head_dim * config.hidden_size


def _dense_weights(config: TransformerConfig) -> int:
    return 3 * config.hidden_size * config.ffn_size
