# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The slots of a transformer layer: who builds what goes into them, and what it must do."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.nn import Step


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where in a model a slot is filled."""

    layer: int
    """Global layer number, from 0."""
    local_layer: int
    """Number among the layers this pipeline stage holds, from 0."""
    config: TransformerConfig
    groups: ProcessGroups


class FeedForwardBuilder(Protocol):
    """Builds a module ``forward(x, step) -> (y, aux)``: x and y are [T or T / tp, D], aux a scalar loss or None.

    ``aux`` is this rank's part of an auxiliary loss of one micro-batch: the parts of the tp and cp ranks add up.
    """

    def __call__(self, site: Site) -> nn.Module: ...


class MixerBuilder(Protocol):
    """Builds a module ``forward(x, step) -> y`` that mixes tokens (attention, state space)."""

    def __call__(self, site: Site) -> nn.Module: ...


class AttentionCore(Protocol):
    """The part of attention without parameters of its own.

    q is [T, A, d], k and v are [T, K, d] (A heads and K key-value heads of this tp rank), the result is [T, A, d].
    ``layer`` is the number of the layer among those of this stage.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor: ...
