# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Builders of the mixers other than self-attention, of the config's sizes."""

from torch import nn

from mcore_parallel.models._slots import MixerBuilder, Site
from mcore_parallel.nn import GatedDeltaNet, MambaMixer


def mamba_mixer() -> MixerBuilder:
    """A builder of Mamba-2 mixers of ``config.mamba``."""

    def build(site: Site) -> nn.Module:
        config = site.config
        if config.mamba is None:
            raise ValueError(f"layer {site.layer} is M, but mamba=None; give a MambaConfig")
        return MambaMixer(
            config.hidden_size,
            config.mamba,
            site.groups,
            norm_epsilon=config.norm_epsilon,
            layers=site.layers,
            dtype=site.dtype,
            device=site.device,
            init=False,
        )

    return build


def delta_net_mixer() -> MixerBuilder:
    """A builder of gated delta nets of ``config.delta_net``."""

    def build(site: Site) -> nn.Module:
        config = site.config
        if config.delta_net is None:
            raise ValueError(f"layer {site.layer} is G, but delta_net=None; give a GatedDeltaNetConfig")
        return GatedDeltaNet(
            config.hidden_size,
            config.delta_net,
            site.groups,
            norm_epsilon=config.norm_epsilon,
            layers=site.layers,
            dtype=site.dtype,
            device=site.device,
            init=False,
        )

    return build
