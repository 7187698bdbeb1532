# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sizes and choices of a transformer, and the table of what must hold of them."""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_parallel._field_types import check_field_types
from mcore_parallel.models._pattern import read_pattern
from mcore_parallel.nn import (
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    Llama3Scaling,
    MambaConfig,
    YarnScaling,
    is_layer_window_attention,
)

NORMALIZATIONS = ("RMSNorm", "LayerNorm")
GATED = ("swiglu", "geglu", "geglu_tanh", "quick_geglu")
ACTIVATIONS = (*GATED, "gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "squared_relu")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
POSITIONS = ("rope", "yarn", "mrope", "learned_absolute", "none")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The architecture, independent of any layout.

    Raises:
        ValueError: a rule of ``CONFIG_RULES`` does not hold.
    """

    num_layers: int
    """Layers of the whole model."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Query heads of a layer."""
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
    """Added to the variance in each norm."""
    layernorm_zero_centered_gamma: bool = False
    """Norm weights are stored less 1."""
    qk_layernorm: bool = False
    """Normalise each query and key head before the rotary embedding."""
    qk_layernorm_across_heads: bool = False
    """These norms go over all query heads, and all key heads, together (OLMo 2, OLMoE); needs ``qk_layernorm`` and RMSNorm."""
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
    attn_logit_softcapping: float | None = None
    """Attention's scores s become c tanh(s / c) of this number c; None for none (Gemma 2)."""
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
    """Base of the rotary frequencies."""
    rotary_base_window: float | None = None
    """Of layers with a window; None for ``rotary_base``."""
    rotary_percent: float = 1.0
    """Share of a head's channels that turn."""
    rotary_interleaved: bool = False
    """Channel 2 i pairs with 2 i + 1 in place of i + half the width."""
    seq_len_interpolation_factor: float | None = None
    """Positions are divided by it."""
    rope_scaling: Llama3Scaling | None = None
    """Stretches the context as Llama 3.1 does; None for none."""
    yarn: YarnScaling | None = None
    """Of position_embedding_type yarn."""
    mrope_section: tuple[int, ...] | None = None
    """Frequencies that follow each of the position's components (time, height, width)."""
    no_rope_freq: int | tuple[int, ...] | None = None
    """Layers without rotary embedding: every N-th, or 1 (without) and 0 a layer."""

    hybrid_layer_pattern: str | None = None
    """One symbol a layer: M Mamba-2, G gated delta net, * attention, + latent attention, - feed-forward, E the feed-forward slot that
    was given; "|" between pipeline segments, "/" before each multi-token prediction depth. None for attention and feed-forward in
    each layer."""
    mamba: MambaConfig | None = None
    """Sizes of Mamba-2 layers; needed where there are any."""
    delta_net: GatedDeltaNetConfig | None = None
    """Sizes of gated delta nets; needed where there are any."""
    mtp_num_layers: int = 0
    """Further tokens that are predicted, one depth of layers each."""
    mtp_detach: bool = False
    """Their losses train the depths only, not the trunk, the embedding or the output layer."""

    embedding_multiplier: float = 1.0
    """Factor of the embeddings."""
    output_multiplier: float = 1.0
    """Factor of the logits."""
    final_logit_softcapping: float | None = None
    """Logits l become c tanh(l / c) of this number c, behind ``output_multiplier``; None for none (Gemma 2)."""
    init_method_std: float = 0.02
    """Standard deviation of the first weights."""
    share_embeddings_and_output_weights: bool = False
    """The output layer uses the rows of the embedding."""

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


@dataclass(frozen=True)
class ConfigRule:
    """One condition on a config."""

    id: str
    fields: tuple[str, ...]
    """What it speaks of; the message shows their values."""
    holds: Callable[[TransformerConfig], bool]
    must: str
    """What is wanted."""
    remedy: str

    def check(self, config: TransformerConfig) -> None:
        """Raises:
        ValueError: it does not hold; the message names fields, values and remedy.
        """
        if not self.holds(config):
            values = ", ".join(f"{name}={getattr(config, name)!r}" for name in self.fields)
            raise ValueError(f"{values} {self.must}; {self.remedy}")


def check_config(config: TransformerConfig) -> None:
    """Whether all fields have their types and all rules hold.

    Raises:
        ValueError: a field of another type, or the first rule that does not hold.
    """
    check_field_types(config)
    for rule in CONFIG_RULES:
        rule.check(config)


def _positive(name: str) -> ConfigRule:
    def holds(config: TransformerConfig) -> bool:
        return getattr(config, name) is None or getattr(config, name) >= 1

    return ConfigRule(f"positive-{name}", (name,), holds, "must be at least 1", "set a size")


def _above_zero(name: str) -> ConfigRule:
    def holds(config: TransformerConfig) -> bool:
        return getattr(config, name) is None or 0 < getattr(config, name) < float("inf")

    return ConfigRule(f"above-zero-{name}", (name,), holds, "must be a number above 0", "leave it out for the default")


def _known(name: str, values: tuple[str, ...]) -> ConfigRule:
    def holds(config: TransformerConfig) -> bool:
        return getattr(config, name) in values

    return ConfigRule(f"known-{name}", (name,), holds, "is unknown", f"use one of {', '.join(values)}")


def _per_layer(name: str) -> ConfigRule:
    """A whole number at least 1, or 0 and 1 a layer."""

    def holds(config: TransformerConfig) -> bool:
        value = getattr(config, name)
        if isinstance(value, int):
            return value >= 1
        if isinstance(value, tuple):
            return len(value) == config.num_layers and set(value) <= {0, 1}
        if isinstance(value, str):
            # Raises with the place in the pattern.
            is_layer_window_attention((0, 0), value, 1, num_layers=config.num_layers)
        return True

    must = "must be at least 1, or 0 or 1 for each layer"
    return ConfigRule(f"per-layer-{name}", (name, "num_layers"), holds, must, f"give {name} as many entries as layers")


def _symbols(config: TransformerConfig) -> str:
    return config.hybrid_layer_pattern or ""


def _rotary_width(config: TransformerConfig) -> float:
    if config.latent_attention is not None:
        return config.latent_attention.qk_rope_head_dim
    return config.head_dim * config.rotary_percent


def _turns(config: TransformerConfig) -> bool:
    return config.position_embedding_type in ("rope", "yarn", "mrope")


def _has(symbol: str, field: str, kind: str) -> tuple[ConfigRule, ConfigRule]:
    """A symbol needs its config, and a config its symbol."""
    return (
        ConfigRule(
            f"{field}-for-{symbol}", ("hybrid_layer_pattern", field),
            lambda c: symbol not in _symbols(c) or getattr(c, field) is not None,
            f"lacks the sizes of {symbol}", f"give {field}={kind}(...), or take {symbol} out of the pattern",
        ),
        ConfigRule(
            f"{symbol}-for-{field}", (field, "hybrid_layer_pattern"),
            lambda c: getattr(c, field) is None or symbol in _symbols(c),
            "is of no layer", f"write {symbol} into hybrid_layer_pattern, or leave {field} out",
        ),
    )  # fmt: skip


CONFIG_RULES: tuple[ConfigRule, ...] = (
    *map(_positive, ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")),
    *map(_positive, ("num_query_groups", "ffn_hidden_size", "kv_channels", "max_position_embeddings")),
    *map(_above_zero, ("norm_epsilon", "softmax_scale", "activation_func_clamp_value", "rotary_base", "rotary_base_window")),
    *map(_above_zero, ("attn_logit_softcapping", "final_logit_softcapping")),
    *map(_above_zero, ("seq_len_interpolation_factor", "embedding_multiplier", "output_multiplier")),
    _known("normalization", NORMALIZATIONS),
    _known("activation", ACTIVATIONS),
    _known("softmax_type", SOFTMAX_TYPES),
    _known("position_embedding_type", POSITIONS),
    ConfigRule(
        "heads-divide-hidden", ("num_attention_heads", "hidden_size"),
        lambda c: c.kv_channels is not None or c.hidden_size % c.num_attention_heads == 0,
        "must divide each other", "change one, or set kv_channels",
    ),
    ConfigRule(
        "groups-divide-heads", ("num_query_groups", "num_attention_heads"),
        lambda c: c.num_attention_heads % c.kv_heads == 0,
        "must divide each other", "set num_query_groups to a divisor of num_attention_heads",
    ),
    ConfigRule(
        "quick-geglu-options", ("glu_linear_offset", "activation_func_clamp_value", "activation"),
        lambda c: c.activation == "quick_geglu" or (c.glu_linear_offset == 0.0 and c.activation_func_clamp_value is None),
        "are options of quick_geglu", "leave them out, or set activation='quick_geglu'",
    ),
    ConfigRule(
        "one-norm-order", ("post_norm", "sandwich_norm"), lambda c: not (c.post_norm and c.sandwich_norm),
        "exclude one another", "set one of them",
    ),
    ConfigRule(
        "norms-across-heads", ("qk_layernorm_across_heads", "qk_layernorm", "normalization"),
        lambda c: not c.qk_layernorm_across_heads or (c.qk_layernorm and c.normalization == "RMSNorm"),
        "are no norms of queries and keys that go across heads", "set qk_layernorm=True and normalization='RMSNorm'",
    ),
    ConfigRule(
        "window-range", ("window_size",), lambda c: c.window_size is None or (len(c.window_size) == 2 and min(c.window_size) >= -1),
        "must be two numbers of tokens", "give (left, right), with -1 for no limit",
    ),
    ConfigRule(
        "window-for-skip-freq", ("window_attn_skip_freq", "window_size"),
        lambda c: c.window_attn_skip_freq is None or c.window_size is not None,
        "has no window to skip", "set window_size, or leave window_attn_skip_freq out",
    ),
    ConfigRule(
        "window-for-base", ("rotary_base_window", "window_size"), lambda c: c.rotary_base_window is None or c.window_size is not None,
        "is the base of no layer", "set window_size, or leave rotary_base_window out",
    ),
    _per_layer("window_attn_skip_freq"),
    _per_layer("no_rope_freq"),
    ConfigRule(
        "rotary-share", ("rotary_percent",), lambda c: 0.0 < c.rotary_percent <= 1.0,
        "must lie in (0, 1]", "for none set position_embedding_type='none'",
    ),
    ConfigRule(
        "rotary-width", ("hidden_size", "num_attention_heads", "kv_channels", "rotary_percent", "latent_attention"),
        lambda c: not _turns(c) or round(_rotary_width(c)) % 2 == 0,
        "give a rotary embedding of odd width", "set kv_channels, rotary_percent or qk_rope_head_dim for an even one",
    ),
    ConfigRule(
        "rows-for-learned-positions", ("position_embedding_type", "max_position_embeddings"),
        lambda c: c.position_embedding_type != "learned_absolute" or c.max_position_embeddings is not None,
        "lacks the rows of the table", "set max_position_embeddings",
    ),
    ConfigRule(
        "yarn", ("position_embedding_type", "yarn"), lambda c: (c.position_embedding_type == "yarn") == (c.yarn is not None),
        "go together", "set position_embedding_type='yarn' and yarn=YarnScaling(...), or neither",
    ),
    ConfigRule(
        "rope-scaling", ("rope_scaling", "position_embedding_type"),
        lambda c: c.rope_scaling is None or c.position_embedding_type == "rope",
        "does not scale this", "set position_embedding_type='rope', or leave rope_scaling out",
    ),
    ConfigRule(
        "mrope", ("position_embedding_type", "mrope_section"),
        lambda c: (c.position_embedding_type == "mrope") == (c.mrope_section is not None),
        "go together", "set position_embedding_type='mrope' and mrope_section, or neither",
    ),
    ConfigRule(
        "mrope-sum", ("mrope_section", "rotary_percent"),
        lambda c: c.mrope_section is None or (min(c.mrope_section) >= 0 and 2 * sum(c.mrope_section) == round(_rotary_width(c))),
        "must add up to half the rotary width", "change its entries",
    ),
    ConfigRule(
        "pattern-length", ("num_layers", "hybrid_layer_pattern"),
        lambda c: (pattern := read_pattern(c.hybrid_layer_pattern)) is None or pattern.num_layers == c.num_layers,
        "must hold as many layers", "set num_layers to the number of symbols before the first '/', without '|'",
    ),
    ConfigRule(
        "pattern-depths", ("mtp_num_layers", "hybrid_layer_pattern"),
        lambda c: (pattern := read_pattern(c.hybrid_layer_pattern)) is None or len(pattern.mtp) == c.mtp_num_layers,
        "must hold as many depths", "append '/' and the layers of a depth for each, or change mtp_num_layers",
    ),
    *_has("M", "mamba", "MambaConfig"),
    *_has("G", "delta_net", "GatedDeltaNetConfig"),
    ConfigRule(
        "latent-attention-for-+", ("hybrid_layer_pattern", "latent_attention"),
        lambda c: "+" not in _symbols(c) or c.latent_attention is not None,
        "lacks the sizes of +", "give latent_attention=LatentAttentionConfig(...), or write *",
    ),
    ConfigRule(
        "+-for-latent-attention", ("latent_attention", "hybrid_layer_pattern"),
        lambda c: c.latent_attention is None or c.hybrid_layer_pattern is None or "+" in c.hybrid_layer_pattern,
        "is of no layer", "write + into hybrid_layer_pattern, or leave latent_attention out",
    ),
    ConfigRule(
        "latent-attention-heads", ("latent_attention", "num_query_groups"),
        lambda c: c.latent_attention is None or c.kv_heads == c.num_attention_heads,
        "has no grouped queries", "leave num_query_groups out",
    ),
    ConfigRule(
        "mtp-number", ("mtp_num_layers",), lambda c: c.mtp_num_layers >= 0, "must not be negative", "0 is for none",
    ),
    ConfigRule(
        "mtp-detach", ("mtp_detach", "mtp_num_layers"), lambda c: not c.mtp_detach or c.mtp_num_layers > 0,
        "has no depth to detach", "set mtp_num_layers, or leave mtp_detach out",
    ),
    ConfigRule(
        "init-std", ("init_method_std",), lambda c: c.init_method_std >= 0.0, "must not be negative", "use 0.02 or so",
    ),
)  # fmt: skip
"""In the order in which they are checked: later ones may rely on earlier ones."""
