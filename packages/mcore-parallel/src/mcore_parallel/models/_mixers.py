# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Builders of the mixers other than self-attention, of the config's sizes."""

from collections.abc import Callable

from torch import nn

from mcore_parallel.models._slots import MixerBuilder, Site
from mcore_parallel.nn import GatedDeltaNet, GatedDeltaNetConfig, MambaConfig, MambaMixer


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
        layers=site.layers,
        dtype=site.dtype,
        device=site.device,
        init=False,
    )
