# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The slots of a transformer layer: who builds what goes into them, and what it must do."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models._config import TransformerConfig
from mcore_parallel.nn import LayerFactory, LayerMemory, TorchLayers


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where in a model a slot is filled."""

    layer: int
    """Global layer number, from 0."""
    local_layer: int
    """Number among the layers this pipeline stage holds, from 0."""
    config: TransformerConfig
    groups: ProcessGroups
    dtype: torch.dtype = torch.float32
    """Of the parameters the slot creates."""
    device: torch.device | str = "cpu"
    """Of the parameters the slot creates; "meta" for none yet."""
    layers: LayerFactory = field(default_factory=TorchLayers)
    """Builds the norms and projections of the slot."""
    batch_invariant: bool = False
    """A token's bits depend on its own sequence only (``TorchBackend``)."""
    memory: LayerMemory = field(default_factory=LayerMemory)
    """What inside the feed-forward slot goes to the host until its backward."""


class FeedForwardBuilder(Protocol):
    """Builds a module ``forward(x, step) -> (y, aux)``: x and y are [T or T / tp, D], aux an ``Aux`` of this layer or None.

    A builder whose layers return one is ``DeclaresAux``; over pipeline stages only what it declares is reported by name.
    """

    def __call__(self, site: Site) -> nn.Module: ...


class MixerBuilder(Protocol):
    """Builds a module ``forward(x, step) -> y`` that mixes tokens (attention, state space)."""

    def __call__(self, site: Site) -> nn.Module: ...
