# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Linear mixers: Mamba-2 and the gated delta net."""

from mcore_parallel.nn.mixers._delta_net import GatedDeltaNet, GatedDeltaNetConfig
from mcore_parallel.nn.mixers._linear_mixer import LinearMixer, LinearMixerConfig
from mcore_parallel.nn.mixers._mamba import MambaConfig, MambaMixer
from mcore_parallel.nn.mixers._state import RecurrentRows, RecurrentState

__all__ = [
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "LinearMixer",
    "LinearMixerConfig",
    "MambaConfig",
    "MambaMixer",
    "RecurrentRows",
    "RecurrentState",
]
