# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Positions: rotary embeddings with their scalings, and learned positions."""

from mcore_parallel.nn.positions._embeddings import LearnedPositions, RotaryConfig, RotaryEmbedding, YarnRotaryEmbedding, rotary_width
from mcore_parallel.nn.positions._rope import apply_rotary, rotary_frequencies, rotary_tables, split_rotary
from mcore_parallel.nn.positions._scaling import Llama3Scaling, YarnScaling

__all__ = [
    "LearnedPositions",
    "Llama3Scaling",
    "RotaryConfig",
    "RotaryEmbedding",
    "YarnRotaryEmbedding",
    "YarnScaling",
    "apply_rotary",
    "rotary_frequencies",
    "rotary_tables",
    "rotary_width",
    "split_rotary",
]
