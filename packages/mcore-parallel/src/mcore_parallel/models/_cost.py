# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters and floating-point operations of a model, counted from its config."""

from collections.abc import Iterator
from dataclasses import dataclass

from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._cores import has_window
from mcore_parallel.models._pattern import is_feed_forward, read_pattern
from mcore_parallel.nn import Activation

# D model, A heads, K key-value heads, d width of a head, F feed-forward, V vocabulary; of linear mixers H heads, P channels of a
# head, G groups, N channels of a state.


@dataclass(frozen=True, kw_only=True)
class _Cost:
    """Of one branch of a layer."""

    matrices: int = 0
    """Weights that a token is multiplied by."""
    others: int = 0
    """Norms, biases and what there is once a head."""
    mixing: float = 0.0
    """Multiply-adds of a token that no weight has part in: with other tokens, or with a state."""


def num_parameters(config: TransformerConfig, *, feed_forward: int | None = None) -> int:
    """Distinct parameters of a ``GPTModel``.

    Args:
        config: the architecture.
        feed_forward: parameters of the feed-forward slot of one layer (of a pattern: of its E); None for the dense one.
    """
    tables = 1 if config.share_embeddings_and_output_weights else 2
    positions = config.max_position_embeddings or 0 if config.position_embedding_type == "learned_absolute" else 0
    depth = config.mtp_num_layers * (2 * config.hidden_size**2 + 3 * _norm(config))
    layers = sum(cost.matrices + cost.others for _, cost in _branches(config, 1, True, feed_forward))
    return layers + depth + _norm(config) + (tables * config.vocab_size + positions) * config.hidden_size


def num_bert_parameters(config: TransformerConfig, *, num_token_types: int = 2, add_binary_head: bool = True) -> int:
    """Distinct parameters of a ``BertModel``; arguments as there."""
    D, V, norm = config.hidden_size, config.vocab_size, _norm(config)
    heads = D * D + D + norm + V + ((D * D + D + 2 * D + 2) if add_binary_head else 0)
    # Where norms stand behind, the one of the end stands at the embeddings.
    return num_parameters(config) + num_token_types * D + heads


def flops_per_token(config: TransformerConfig, seq_len: int, *, feed_forward: int | None = None, causal: bool = True) -> float:
    """Operations of forward and backward a token, on average over a sequence; a multiply-add is two.

    A matrix costs 2 operations a weight forward and 4 backward; look-ups cost nothing, the output projection counts, once more for
    each depth of ``mtp_num_layers``. Attention costs 2 products a query head and visible key, as wide as keys and values; a causal mask
    leaves (seq_len + 1) / 2 of these, a window what lies in it. Linear mixers count as their recurrences, whatever the chunks: a
    state's entry is decayed, written and read, in a delta net also compared. Norms, activations and recomputation do not count.

    Args:
        config: the architecture.
        seq_len: tokens a token may see in one sequence.
        feed_forward: weights of one layer's feed-forward (of a pattern: of its E) that a token passes (of a mixture: router, the chosen
            experts, shared ones); None for the dense one.
        causal: a token sees itself and those before it only.
    """
    layers = sum(cost.matrices + cost.mixing for _, cost in _branches(config, seq_len, causal, feed_forward))
    depth = 2 * config.hidden_size**2
    return 6 * (layers + config.mtp_num_layers * depth + (1 + config.mtp_num_layers) * config.vocab_size * config.hidden_size)


def feed_forward_share(config: TransformerConfig, *, feed_forward: int | None = None) -> float:
    """Part of the layers' matrix products that their feed-forwards have; arguments as of ``num_parameters``."""
    costs = [(is_mlp, cost.matrices) for is_mlp, cost in _branches(config, 1, True, feed_forward)]
    return sum(count for is_mlp, count in costs if is_mlp) / max(1, sum(count for _, count in costs))


def _branches(config: TransformerConfig, seq_len: int, causal: bool, feed_forward: int | None) -> Iterator[tuple[bool, _Cost]]:
    """Of every layer, those of the depths too: whether a branch is a feed-forward, and its cost with its norms."""
    norms = (2 if config.sandwich_norm else 1) * _norm(config)
    dense = _dense(config, norms)
    chosen = dense if feed_forward is None else _Cost(matrices=feed_forward, others=norms)
    pattern = read_pattern(config.hybrid_layer_pattern)
    if pattern is None:
        # A mixer and a feed-forward each.
        symbols = ("+" if config.latent_attention is not None else "*") * (config.num_layers + config.mtp_num_layers)
    else:
        symbols = pattern.layers + "".join(pattern.mtp)
    for layer, symbol in enumerate(symbols):
        if is_feed_forward(symbol):
            yield True, chosen if symbol == "E" else dense
            continue
        yield False, _mixer(config, symbol, _visible(config, layer, seq_len, causal), norms)
        if pattern is None:
            yield True, chosen


def _mixer(config: TransformerConfig, symbol: str, visible: float, norms: int) -> _Cost:
    if symbol == "M":
        return _mamba(config, norms)
    if symbol == "G":
        return _delta_net(config, norms)
    return _latent(config, visible, norms) if symbol == "+" else _attention(config, visible, norms)


def _attention(config: TransformerConfig, visible: float, norms: int) -> _Cost:
    D, A, K, d = config.hidden_size, config.num_attention_heads, config.kv_heads, config.head_dim
    others = (A + 2 * K) * d * config.add_qkv_bias + D * config.add_bias_linear + A * (config.softmax_type == "learnable")
    if config.qk_layernorm:
        others += _norm(config, (A + K) * d) if config.qk_layernorm_across_heads else 2 * _norm(config, d)
    return _Cost(matrices=(2 * A + 2 * K + A * config.attention_output_gate) * d * D, others=norms + others, mixing=2 * A * d * visible)


def _latent(config: TransformerConfig, visible: float, norms: int) -> _Cost:
    latent = config.latent_attention
    assert latent is not None, "the config's rules bring latent_attention with +"
    D, A, rank = config.hidden_size, config.num_attention_heads, latent.kv_lora_rank
    q_rank, width, value = latent.q_lora_rank, latent.qk_head_dim, latent.v_head_dim
    queries = A * width * D if q_rank is None else q_rank * (D + A * width)
    keys = (rank + latent.qk_rope_head_dim) * D + A * (latent.qk_nope_head_dim + value) * rank
    others = norms + (q_rank or 0) + rank + D * config.add_bias_linear
    return _Cost(matrices=queries + keys + A * value * D, others=others, mixing=A * (width + value) * visible)


def _mamba(config: TransformerConfig, norms: int) -> _Cost:
    sizes = config.mamba
    assert sizes is not None, "the config's rules bring mamba with M"
    H = sizes.heads(config.hidden_size)
    inner, states = H * sizes.head_dim, sizes.num_groups * sizes.state_dim
    channels = inner + 2 * states
    taps = channels * sizes.conv_kernel
    return _Cost(
        matrices=(3 * inner + 2 * states + H) * config.hidden_size,
        others=norms + taps + channels * sizes.use_conv_bias + 3 * H + inner,
        mixing=taps + 2.5 * inner * sizes.state_dim,
    )


def _delta_net(config: TransformerConfig, norms: int) -> _Cost:
    sizes = config.delta_net
    assert sizes is not None, "the config's rules bring delta_net with G"
    H, value = sizes.num_value_heads, sizes.value_head_dim
    inner, keys = H * value, sizes.num_key_heads * sizes.key_head_dim
    taps = (inner + 2 * keys) * sizes.conv_kernel
    return _Cost(
        matrices=(3 * inner + 2 * keys + 2 * H) * config.hidden_size,
        others=norms + taps + 2 * H + value,
        mixing=taps + 3.5 * inner * sizes.key_head_dim,
    )


def _dense(config: TransformerConfig, norms: int) -> _Cost:
    parts = 2 if Activation(name=config.activation).gated else 1
    biases = (parts * config.ffn_size + config.hidden_size) * config.add_bias_linear
    return _Cost(matrices=(parts + 1) * config.hidden_size * config.ffn_size, others=norms + biases)


def _norm(config: TransformerConfig, size: int | None = None) -> int:
    """Parameters of a norm over that many channels, or over hidden states."""
    return (config.hidden_size if size is None else size) * (2 if config.normalization == "LayerNorm" else 1)


def _visible(config: TransformerConfig, layer: int, seq_len: int, causal: bool) -> float:
    """Keys that a query of the layer sees, on average."""
    left, right = config.window_size if config.window_size is not None and has_window(config, layer) else (-1, -1)
    return 1 + _side(left, seq_len) + (0 if causal else _side(right, seq_len))


def _side(most: int, seq_len: int) -> float:
    """How many of the tokens on one side are at most ``most`` away (-1: any), on average over the places of a sequence."""
    if most < 0 or most >= seq_len - 1:
        return (seq_len - 1) / 2
    return (most * (most - 1) / 2 + most * (seq_len - most)) / seq_len
