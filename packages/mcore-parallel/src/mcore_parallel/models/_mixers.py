# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Builders of the mixers other than self-attention, by the sizes of the config."""

from collections.abc import Callable

from torch import nn

from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.models._cores import Core, CoreChooser, attention_spec, layer_rotary
from mcore_parallel.models._slots import MixerBuilder, Site
from mcore_parallel.nn import (
    AttentionCoreBuilder,
    GatedDeltaNet,
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    LatentCore,
    LatentSelfAttention,
    MambaConfig,
    MambaMixer,
)


def mamba_mixer() -> MixerBuilder:
    """A builder of Mamba-2 mixers of ``config.mamba``."""

    def build(site: Site) -> nn.Module:
        return _build(MambaMixer, site, site.config.mamba, "M, but mamba=None; give a MambaConfig")

    return build


def delta_net_mixer() -> MixerBuilder:
    """A builder of gated delta nets of ``config.delta_net``."""

    def build(site: Site) -> nn.Module:
        return _build(GatedDeltaNet, site, site.config.delta_net, "G, but delta_net=None; give a GatedDeltaNetConfig")

    return build


def _build(mixer: Callable[..., nn.Module], site: Site, sizes: MambaConfig | GatedDeltaNetConfig | None, missing: str) -> nn.Module:
    if sizes is None:
        raise ValueError(f"layer {site.layer} is {missing}")
    return mixer(
        site.config.hidden_size,
        sizes,
        site.groups,
        norm_epsilon=site.config.norm_epsilon,
        layer=site.local_layer,
        layers=site.layers,
        batch_invariant=site.batch_invariant,
        dtype=site.dtype,
        device=site.device,
        init=False,
    )


# Fields of other attentions; the norms of the latents are always there.
_PLAIN = {
    "qk_layernorm": False,
    "add_qkv_bias": False,
    "attention_output_gate": False,
    "rotary_percent": 1.0,
    "rotary_base_window": None,
    "softmax_type": "vanilla",
    "attn_logit_softcapping": None,
}


def latent_attention(
    core: Core | AttentionCoreBuilder | LatentCore | None = None, *, manage: Callable[[Core], Core] | None = None
) -> MixerBuilder:
    """A builder of multi-head latent attention of the config's ``latent_attention`` sizes.

    Args:
        core: attention itself, with the scale of ``latent_softmax_scale`` in it, a builder that is told it, or a ``LatentCore``;
            None for ``choose_attention`` by the widths of the heads.
        manage: as of ``CoreChooser``; a ``LatentCore`` is left as it is.

    Raises:
        ValueError: when it builds: a field of the config that latent attention cannot follow, no core that can do it all, or a
            ``LatentCore`` with sequences split over cp or with a window.
    """
    # A batch-invariant layer attends to keys and values of every head.
    chooser = CoreChooser(core, manage=manage) if not isinstance(core, LatentCore) or isinstance(core, AttentionCoreBuilder) else None

    def build(site: Site) -> nn.Module:
        config = site.config
        latent = _checked(config)
        scale = latent_softmax_scale(config)
        heads = config.num_attention_heads
        spec = attention_spec(site, num_kv_heads=heads, head_dim=latent.qk_head_dim, value_dim=latent.v_head_dim, softmax_scale=scale)
        if chooser is not None and (site.batch_invariant or not isinstance(core, LatentCore)):
            inner: Core | LatentCore = chooser.core(spec, site)
        elif site.groups.cp.size > 1:
            raise ValueError(f"cp={site.groups.cp.size} splits sequences, of which a cache of latents holds all tokens; decode with cp=1")
        elif spec.bounds != (-1, 0):
            raise ValueError(f"window_size={spec.window} is nothing that a cache of latents knows of; leave it out, or give another core")
        else:
            assert isinstance(core, LatentCore)
            inner = core
        return LatentSelfAttention(
            config.hidden_size,
            config.num_attention_heads,
            latent,
            site.groups,
            layer=site.local_layer,
            core=inner,
            softmax_scale=scale,
            norm_epsilon=config.norm_epsilon if latent.norm_epsilon is None else latent.norm_epsilon,
            rotary=layer_rotary(config, site.layer) is not None,
            rotary_interleaved=config.rotary_interleaved,
            out_bias=config.add_bias_linear,
            spec=spec,
            layers=site.layers,
            dtype=site.dtype,
            device=site.device,
            init=False,
        )

    return build


def latent_softmax_scale(config: TransformerConfig) -> float:
    """Factor of the scores: ``softmax_scale``, or 1 / sqrt(width of a query head) times YaRN's factor.

    Raises:
        ValueError: a config without latent attention, or one that it cannot follow.
    """
    latent = _checked(config)
    if config.softmax_scale is not None:
        return config.softmax_scale
    yarn = config.yarn if config.position_embedding_type == "yarn" else None
    return latent.qk_head_dim**-0.5 * (1.0 if yarn is None else yarn.softmax_factor)


def _checked(config: TransformerConfig) -> LatentAttentionConfig:
    if config.latent_attention is None:
        raise ValueError("latent_attention=None; give the sizes of latent attention in the config")
    for field, plain in _PLAIN.items():
        if (value := getattr(config, field)) != plain:
            raise ValueError(f"{field}={value!r} is not there with latent attention; leave it at {plain!r}")
    return config.latent_attention
