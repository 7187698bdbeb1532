# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The fields of our config with their defaults, which of them the config.json of a family carries, and the rules that families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from mcore_ckpt._errors import list_names
from mcore_ckpt.hf._rules import Dim, Form, HFPart, PartLayout, WeightRule

__all__ = [
    "ATTENTION",
    "DEFAULTS",
    "DENSE_FFN",
    "ENDS",
    "FFN_NORM",
    "INPUT_NORM",
    "NESTED",
    "SIZES",
    "Codec",
    "Config",
    "Family",
    "attention_projections",
    "inner",
    "named",
    "refuse",
    "renamed",
    "same",
]

Config = Mapping[str, Any]

DEFAULTS: Config = MappingProxyType(
    {
        "num_layers": None,
        "hidden_size": None,
        "num_attention_heads": None,
        "vocab_size": None,
        "num_query_groups": None,
        "ffn_hidden_size": None,
        "kv_channels": None,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "layernorm_zero_centered_gamma": False,
        "qk_layernorm": False,
        "qk_layernorm_across_heads": False,
        "sandwich_norm": False,
        "post_norm": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "activation": "swiglu",
        "glu_linear_offset": 0.0,
        "activation_func_clamp_value": None,
        "softmax_type": "vanilla",
        "softmax_scale": None,
        "window_size": None,
        "window_attn_skip_freq": None,
        "attention_output_gate": False,
        "latent_attention": None,
        "attention_backend": "auto",
        "position_embedding_type": "rope",
        "max_position_embeddings": None,
        "rotary_base": 10_000.0,
        "rotary_base_window": None,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "seq_len_interpolation_factor": None,
        "rope_scaling": None,
        "yarn": None,
        "mrope_section": None,
        "no_rope_freq": None,
        "hybrid_layer_pattern": None,
        "mamba": None,
        "delta_net": None,
        "mtp_num_layers": 0,
        "mtp_detach": False,
        "embedding_multiplier": 1.0,
        "output_multiplier": 1.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "init_method_std": 0.02,
        "share_embeddings_and_output_weights": False,
        "num_moe_experts": None,
        "moe_router_topk": None,
        "moe_ffn_hidden_size": None,
        "moe_layer_freq": 1,
        "moe_shared_expert_intermediate_size": None,
        "moe_shared_expert_gate": False,
        "moe_latent_size": None,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None,
        "moe_router_num_groups": None,
        "moe_router_group_topk": None,
        "moe_router_enable_expert_bias": False,
        "moe_router_bias": None,
        "moe_apply_probs_on_input": False,
        "num_token_types": None,
        "add_binary_head": None,
    }
)
"""Our fields and what each means when nothing is said; from num_moe_experts on they are of slots and heads, not of the model's config.
Where every layer has experts, ffn_hidden_size is their width."""

NESTED: Mapping[str, Config] = MappingProxyType(
    {
        "latent_attention": {
            "q_lora_rank": None, "kv_lora_rank": ..., "qk_nope_head_dim": ..., "qk_rope_head_dim": ..., "v_head_dim": ...,
            "norm_epsilon": None,
        },
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        "yarn": {
            "factor": 1.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
            "mscale_all_dim": 0.0, "correction_range_round_to_int": True,
        },
        "mamba": {
            "state_dim": 128, "head_dim": 64, "num_groups": 8, "num_heads": None, "expand": 2, "conv_kernel": 4, "chunk_size": 128,
            "use_conv_bias": True, "dt_limits": (0.0, float("inf")),
        },
        "delta_net": {
            "num_key_heads": ..., "num_value_heads": ..., "key_head_dim": 128, "value_head_dim": 128, "conv_kernel": 4, "chunk_size": 64,
        },
    }
)  # fmt: skip
"""Fields that are groups of fields; `...` where something must be said."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """Carries some of our fields in entries of the other config, both ways."""

    ours: tuple[str, ...]
    """Names, without the part behind a dot; every value of them goes through ``write``."""
    theirs: tuple[str, ...]
    """Entries that ``read`` looks at, or that mean nothing beside them; all others are refused."""
    write: Callable[[Config], dict[str, Any]]
    """Our complete config -> their entries. Raises ValueError for a value that they cannot hold."""
    read: Callable[[Config], dict[str, Any]]
    """Their config -> our fields, "mamba.state_dim" for one of a group; those left out have their default. Raises ValueError."""


_NEEDED = frozenset(("num_layers", "hidden_size", "num_attention_heads", "vocab_size"))


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that is particular to one family of models.

    Raises:
        ValueError: something is missing, said twice, or of a field or tensor that does not exist.
    """

    name: str
    """What ``family=`` says."""
    model_type: str
    """Of config.json."""
    architecture: str
    """The class in transformers that config.json names."""
    codecs: tuple[Codec, ...]
    """The entries of config.json that carry our fields."""
    implies: Config = field(default_factory=dict)
    """Our fields that no codec carries and that are not at their default in this family; a function computes from the complete config."""
    free: Config = field(default_factory=dict)
    """Our fields without a meaning for this family, and what an import makes of them."""
    fixed: Config
    """Their entries that are always written, and whose other values mean a model that we do not describe."""
    silent: Config = field(default_factory=dict)
    """Values of entries of ``fixed`` that config.json leaves out, where that means another value than the one described."""
    inert: frozenset[str] = frozenset()
    """Their entries that change no numbers of this family."""
    rules: tuple[WeightRule, ...]
    """Every tensor of ours, and how it is stored there."""
    shown_by: Mapping[str, str] = field(default_factory=dict)
    """Our fields that are true where a weight of this name is stored, whatever config.json says."""
    ignored: tuple[str, ...] = ()
    """Endings of names there that carry no weights."""

    def __post_init__(self) -> None:
        for name in ("name", "model_type", "architecture"):
            if not getattr(self, name):
                refuse(name, getattr(self, name), "says nothing; give the family one")
        ours = self.carried | self.implies.keys() | self.free.keys() | self.shown_by.keys()
        if unknown := ours - DEFAULTS.keys():
            raise ValueError(f"family {self.name} has values for {list_names(unknown, DEFAULTS)}, which no model has; use our field names")
        if lacking := _NEEDED - ours:
            raise ValueError(f"family {self.name} lacks a codec for {list_names(lacking)}; add renamed(OURS, THEIRS)")
        tensors = [rule.name for rule in self.rules if not rule.when and not rule.kinds]
        if twice := {name for name in tensors if tensors.count(name) > 1}:
            raise ValueError(f"family {self.name} has two rules for {list_names(twice)}; merge them, or give each a condition")
        if "embedding.weight" not in tensors:
            raise ValueError(f"family {self.name} lacks a rule for embedding.weight; say where it is stored")

    @property
    def carried(self) -> frozenset[str]:
        """Our fields that a codec carries."""
        return frozenset(name for codec in self.codecs for name in codec.ours)


def refuse(name: str, value: Any, why: str) -> NoReturn:
    """Raises:
    ValueError: names the field, its value, and what to do.
    """
    raise ValueError(f"{name}={value!r} {why}")


def inner(config: Config, path: str) -> Any:
    """The value at "group.field"; None below a group that is None or absent."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def renamed(ours: str, theirs: str, default: Any = ...) -> Codec:
    """A field that only has another name there; ``default`` is what it means to leave it out there, `...` if that is not allowed."""

    def read(config: Config) -> dict[str, Any]:
        value = config.get(theirs)
        if value is None and default is ...:
            raise ValueError(f"lacks {theirs}")
        return {ours: default if value is None else value}

    return Codec(ours=(ours.partition(".")[0],), theirs=(theirs,), write=lambda full: {theirs: inner(full, ours)}, read=read)


def named(ours: str, theirs: str, words: Mapping[Any, Any], default: Any = ...) -> Codec:
    """A field whose values have other names there; ``words`` gives theirs to ours, the first of several spellings is written."""

    def write(full: Config) -> dict[str, Any]:
        value = inner(full, ours)
        for word, meaning in words.items():
            if meaning == value:
                return {theirs: word}
        refuse(ours, value, f"has no name in {theirs}; use one of {', '.join(sorted(map(repr, words.values())))}")

    def read(config: Config) -> dict[str, Any]:
        word = config.get(theirs, default)
        if word is ...:
            raise ValueError(f"lacks {theirs}")
        if word not in words:
            refuse(theirs, word, f"is not supported; only {', '.join(map(repr, words))} is")
        return {ours: words[word]}

    return Codec(ours=(ours.partition(".")[0],), theirs=(theirs,), write=write, read=read)


_LAYER = "model.layers.{layer}."


def same(ours: str, theirs: str, *shape: Dim, when: str = "", kinds: str = "") -> WeightRule:
    """A tensor that only has another name there."""
    return WeightRule(ours, shape, (Form((HFPart(theirs, shape),)),), when, kinds)


def attention_projections(ours: str, q: str, k: str, v: str, o: str, *, kinds: str = "") -> tuple[WeightRule, ...]:
    """Projections of grouped-query attention with their biases, from the prefixes ``ours`` and those of the other side's four."""

    def fused(suffix: str, inner: tuple[Dim, ...], when: str) -> WeightRule:
        parts = (HFPart(q + suffix, ("Q", *inner)), HFPart(k + suffix, ("C", *inner)), HFPart(v + suffix, ("C", *inner)))
        return WeightRule(f"{ours}qkv{suffix}", ("K", "R", *inner), (Form(parts, PartLayout.GROUPED, "K"),), when, kinds)

    return (
        fused(".weight", ("D",), ""),
        fused(".bias", (), "add_qkv_bias"),
        same(f"{ours}out.weight", o + ".weight", "D", "Q", kinds=kinds),
        same(f"{ours}out.bias", o + ".bias", "D", when="add_bias_linear", kinds=kinds),
    )


ENDS = (
    same("embedding.weight", "model.embed_tokens.weight", "V", "D"),
    same("final_norm.weight", "model.norm.weight", "D"),
    same("output.weight", "lm_head.weight", "V", "D", when="not share_embeddings_and_output_weights"),
)
INPUT_NORM = same("layers.{layer}.input_norm.weight", _LAYER + "input_layernorm.weight", "D")
ATTENTION = (
    INPUT_NORM,
    *attention_projections("layers.{layer}.attention.", *(f"{_LAYER}self_attn.{name}_proj" for name in "qkvo")),
    *(
        same(f"layers.{{layer}}.attention.{name}.weight", f"{_LAYER}self_attn.{name}.weight", size, when=when)
        for name, across in (("q_norm", "Q"), ("k_norm", "C"))
        for size, when in (("H", "qk_layernorm and not qk_layernorm_across_heads"), (across, "qk_layernorm_across_heads"))
    ),
)
FFN_NORM = same("layers.{layer}.ffn_norm.weight", _LAYER + "post_attention_layernorm.weight", "D")
# Of models with experts, the layers without.
DENSE_FFN = (
    WeightRule(
        "layers.{layer}.mlp.up.weight",
        (2, "F", "D"),
        (Form((HFPart(_LAYER + "mlp.gate_proj.weight", ("F", "D")), HFPart(_LAYER + "mlp.up_proj.weight", ("F", "D")))),),
        kinds="-",
    ),
    WeightRule(
        "layers.{layer}.mlp.up.bias",
        (2, "F"),
        (Form((HFPart(_LAYER + "mlp.gate_proj.bias", ("F",)), HFPart(_LAYER + "mlp.up_proj.bias", ("F",)))),),
        "add_bias_linear",
        "-",
    ),
    same("layers.{layer}.mlp.down.weight", _LAYER + "mlp.down_proj.weight", "D", "F", kinds="-"),
    same("layers.{layer}.mlp.down.bias", _LAYER + "mlp.down_proj.bias", "D", when="add_bias_linear", kinds="-"),
)
SIZES: tuple[Codec, ...] = (
    renamed("num_layers", "num_hidden_layers"),
    renamed("hidden_size", "hidden_size"),
    renamed("num_attention_heads", "num_attention_heads"),
    renamed("num_query_groups", "num_key_value_heads", None),
    renamed("ffn_hidden_size", "intermediate_size"),
    renamed("kv_channels", "head_dim", None),
    renamed("vocab_size", "vocab_size"),
    renamed("init_method_std", "initializer_range", 0.02),
)
