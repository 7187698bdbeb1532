# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a model's config says about rotary embedding and attention of one layer, and the core that each layer gets."""

from collections.abc import Callable

import torch

from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._slots import Site
from mcore_parallel.nn import (
    AttentionCore,
    AttentionCoreBuilder,
    AttentionSpec,
    Llama3Scaling,
    RotaryConfig,
    SinkAttentionCore,
    YarnScaling,
    choose_attention,
    is_layer_window_attention,
    rotary_width,
)


def rotary_config(config: TransformerConfig, *, window: bool = False) -> RotaryConfig | None:
    """How the heads of a model turn; None where they do not.

    Args:
        config: the architecture.
        window: of the layers with a window; None unless ``rotary_base_window`` gives them a base of their own. Scalings of the
            frequencies are for long contexts, and so not for them.

    Raises:
        ValueError: numbers out of range.
    """
    kind = config.position_embedding_type
    if kind not in ("rope", "yarn", "mrope") or (window and config.rotary_base_window is None):
        return None
    scaling: Llama3Scaling | YarnScaling | None = None
    if not window:
        scaling = config.yarn if kind == "yarn" else config.rope_scaling
    latent = config.latent_attention
    return RotaryConfig(
        width=rotary_width(config.head_dim, config.rotary_percent) if latent is None else latent.qk_rope_head_dim,
        base=config.rotary_base_window if window and config.rotary_base_window is not None else config.rotary_base,
        interleaved=config.rotary_interleaved,
        interpolation_factor=None if window else config.seq_len_interpolation_factor,
        scaling=scaling,
        sections=config.mrope_section if kind == "mrope" else None,
    )


Core = AttentionCore | SinkAttentionCore


class CoreChooser:
    """Gives the attention layers of a model their cores; layers that ask for the same share one.

    Args:
        core: one for all layers, which must then ask for nothing that it was not made for; or a builder that is asked for each
            layer; None for ``choose_attention`` by the config's ``attention_backend``.
        manage: what is done to each core before it is used, as recomputation needs it.
    """

    def __init__(self, core: Core | AttentionCoreBuilder | None = None, *, manage: Callable[[Core], Core] | None = None) -> None:
        self._given, self._manage = core, manage
        self._made: dict[tuple[AttentionSpec, str], Core] = {}
        self._managed: dict[int, tuple[Core, Core]] = {}

    def core(self, spec: AttentionSpec, site: Site) -> Core:
        """The core of a layer.

        Raises:
            ValueError: no backend can do it, or the one core that was given knows nothing of a field.
        """
        if self._given is None:
            backend = site.config.attention_backend
            if (spec, backend) not in self._made:
                self._made[spec, backend] = choose_attention(spec, site.groups, backend)
            return self._with_management(self._made[spec, backend])
        if isinstance(self._given, AttentionCoreBuilder):
            return self._with_management(self._given.build_core(spec, site.groups, site.local_layer))
        _check_bare(spec, site.config)
        return self._with_management(self._given)

    def _with_management(self, core: Core) -> Core:
        if self._manage is None:
            return core
        # The core stays beside what was made of it: a number of an object is only its own while the object lives.
        if id(core) not in self._managed:
            self._managed[id(core)] = (core, self._manage(core))
        return self._managed[id(core)][1]


def attention_spec(
    site: Site,
    *,
    causal: bool = True,
    softmax_type: str | None = None,
    softmax_scale: float | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
) -> AttentionSpec:
    """What the config asks of the attention of a layer; arguments replace what it says.

    Raises:
        ValueError: tp does not divide the heads, fields that do not fit together.
    """
    config, tp = site.config, site.groups.tp.size
    if config.num_attention_heads % tp:
        raise ValueError(f"tp={tp} must divide num_attention_heads={config.num_attention_heads}; lower tp")
    windowed = has_window(config, site.layer)
    return AttentionSpec(
        num_heads=config.num_attention_heads // tp,
        num_kv_heads=max(1, (config.kv_heads if num_kv_heads is None else num_kv_heads) // tp),
        head_dim=config.head_dim if head_dim is None else head_dim,
        value_dim=value_dim,
        causal=causal,
        window=config.window_size if windowed else None,
        softmax_type=config.softmax_type if softmax_type is None else softmax_type,
        softmax_scale=config.softmax_scale if softmax_scale is None else softmax_scale,
        softcap=config.attn_logit_softcapping,
        dtype=site.dtype,
        device=_device_type(site.device),
        batch_invariant=site.batch_invariant,
    )


def has_window(config: TransformerConfig, layer: int) -> bool:
    """Whether layer ``layer`` (global, from 0) has the config's window."""
    return is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer + 1, num_layers=config.num_layers)


def layer_rotary(config: TransformerConfig, layer: int) -> str | None:
    """Which rotary tables layer ``layer`` (global, from 0) uses: "default", "window" or None."""
    skip = config.no_rope_freq
    if isinstance(skip, int):
        without = (layer + 1) % skip == 0
    else:
        # Layers of further depths are not listed.
        without = skip is not None and layer < len(skip) and skip[layer] == 1
    if without:
        return None
    return "window" if config.rotary_base_window is not None and has_window(config, layer) else "default"


def _check_bare(spec: AttentionSpec, config: TransformerConfig) -> None:
    """A core that is a function says nothing about itself: it is taken for plain causal attention, with sinks if it is called with them."""
    required = {
        "window_size": spec.window,
        "softmax_scale": config.softmax_scale,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "softmax_type": config.softmax_type if config.softmax_type != "vanilla" else None,
    }
    for field, value in required.items():
        if value is not None:
            raise ValueError(
                f"{field}={value!r} of the config is nothing that attention_core knows of; "
                "give an AttentionCoreBuilder, which is told it, or leave the field to the core"
            )


def _device_type(device: torch.device | str) -> str:
    kind = torch.device(device).type
    # What is made on no device yet will go to the one there is.
    return kind if kind != "meta" else "cuda" if torch.cuda.is_available() else "cpu"
