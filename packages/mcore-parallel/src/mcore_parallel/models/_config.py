# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes and choices of a transformer."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mcore_parallel.models._rules import check_config
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, Llama3Scaling, MambaConfig, YarnScaling


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The architecture, independent of any layout.

    Raises:
        ValueError: a rule of ``CONFIG_RULES`` does not hold.
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

    normalization: str = "RMSNorm"
    """"RMSNorm" or "LayerNorm"."""
    norm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    """Norm weights are stored less 1."""
    qk_layernorm: bool = False
    """Normalise each query and key head before the rotary embedding."""
    sandwich_norm: bool = False
    """Normalise what mixer and feed-forward give, too, before it is added."""
    post_norm: bool = False
    """Normalise the sum of each branch and its input in place of the input, and the embeddings; no norm stands before the output
    (BERT)."""

    add_bias_linear: bool = False
    """Biases in the projection behind attention and in the feed-forward."""
    add_qkv_bias: bool = False
    """Biases of queries, keys and values."""
    activation: str = "swiglu"
    """Of the feed-forward: "swiglu", "geglu", "geglu_tanh", "quick_geglu", or, without a gate, "gelu", "gelu_tanh", "quick_gelu", "relu",
    "silu", "squared_relu"."""
    glu_linear_offset: float = 0.0
    """Added to the value of quick_geglu."""
    activation_func_clamp_value: float | None = None
    """Cuts gate and value of quick_geglu."""

    softmax_type: str = "vanilla"
    """"vanilla", "off-by-one" or "learnable" (a sink a head)."""
    softmax_scale: float | None = None
    """Factor of attention's scores; None for 1 / sqrt(width of a query head)."""
    window_size: tuple[int, int] | None = None
    """(left, right): how many tokens before and behind it a query sees in windowed layers, -1 for no limit; None for no window."""
    window_attn_skip_freq: int | tuple[int, ...] | str | None = None
    """Which layers have the window: None for all; N for all but every N-th; or 1 and 0 a layer, as a tuple or a pattern as
    "([1]*3+[0]*1)*6"."""
    attention_output_gate: bool = False
    """Multiply what attention gives by the sigmoid of a projection of its input."""
    latent_attention: LatentAttentionConfig | None = None
    """Multi-head latent attention in place of grouped queries."""
    attention_backend: str = "auto"
    """Name of an attention core of the registry, or "auto" for the best one that can do what is asked."""

    position_embedding_type: str = "rope"
    """"rope", "yarn", "mrope", "learned_absolute" or "none"."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table."""
    rotary_base: float = 10_000.0
    rotary_base_window: float | None = None
    """Of layers with a window; None for ``rotary_base``."""
    rotary_percent: float = 1.0
    """Share of a head's channels that turn."""
    rotary_interleaved: bool = False
    """Channel 2 i pairs with 2 i + 1 in place of i + half the width."""
    seq_len_interpolation_factor: float | None = None
    """Positions are divided by it."""
    rope_scaling: Llama3Scaling | None = None
    yarn: YarnScaling | None = None
    mrope_section: tuple[int, ...] | None = None
    """Frequencies that follow each of the position's components (time, height, width)."""
    no_rope_freq: int | tuple[int, ...] | None = None
    """Layers without rotary embedding: every N-th, or 1 (without) and 0 a layer."""

    hybrid_layer_pattern: str | None = None
    """One symbol a layer: M Mamba-2, G gated delta net, * attention, + latent attention, - feed-forward, E the feed-forward slot that
    was given; "|" between pipeline segments, "/" before each multi-token prediction depth. None for attention and feed-forward in
    each layer."""
    mamba: MambaConfig | None = None
    delta_net: GatedDeltaNetConfig | None = None
    mtp_num_layers: int = 0
    """Further tokens that are predicted, one depth of layers each."""
    mtp_detach: bool = False
    """Their losses train the depths only, not the trunk, the embedding or the output layer."""

    embedding_multiplier: float = 1.0
    """Factor of the embeddings."""
    output_multiplier: float = 1.0
    """Factor of the logits."""
    init_method_std: float = 0.02
    share_embeddings_and_output_weights: bool = False

    def __post_init__(self) -> None:
        check_config(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TransformerConfig":
        """Inverse of ``dataclasses.asdict``, also behind JSON: groups of fields become their classes, lists tuples.

        Raises:
            ValueError: a name that is no field.
        """
        refuse_unknown_fields(cls, values)

        def built(name: str, value: Any) -> Any:
            if name in _GROUPS and isinstance(value, Mapping):
                return _GROUPS[name](**{key: _tuples(one) for key, one in value.items()})
            return _tuples(value)

        return cls(**{name: built(name, value) for name, value in values.items()})

    @property
    def kv_heads(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size


def refuse_unknown_fields(cls: Any, values: Mapping[str, Any]) -> None:
    """Whether every name is a field of the dataclass.

    Raises:
        ValueError: names one that is none, and the nearest field.
    """
    fields = [item.name for item in dataclasses.fields(cls)]
    for name in values:
        if name not in fields:
            nearest = difflib.get_close_matches(name, fields, 1)
            raise ValueError(
                f"{name!r} is no field of {cls.__name__}; " + (f"write {nearest[0]!r}, or leave" if nearest else "leave") + " it out"
            )


_GROUPS: Mapping[str, Any] = {
    "latent_attention": LatentAttentionConfig,
    "rope_scaling": Llama3Scaling,
    "yarn": YarnScaling,
    "mamba": MambaConfig,
    "delta_net": GatedDeltaNetConfig,
}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value
