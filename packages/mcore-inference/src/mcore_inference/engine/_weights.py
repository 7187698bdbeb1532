# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""New weights for a model that is being served."""

import difflib
from collections.abc import Iterable

import torch
from torch import Tensor

from mcore_parallel import named_buffer_shards, named_shards
from mcore_parallel.models import GPTModel


class ModelWeights:
    """Replaces all parameters and persistent buffers of a model in place.

    Args:
        model: its parameters keep their addresses.
    """

    def __init__(self, model: GPTModel) -> None:
        self._model = model
        self.are_complete = True
        """False between the first copy of a load and its end, so after a load that failed half-way."""

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy this rank's slices of full tensors; the contract is that of ``DynamicInferenceEngine.load_weights``."""
        shards = {shard.name: (shard.parameter, shard.spec) for shard in named_shards(self._model)}
        shards |= {buffer.name: (buffer.tensor, buffer.spec) for buffer in named_buffer_shards(self._model)}
        missing = set(shards)
        for name, tensor in weights:
            if name not in missing:
                if name in shards:
                    raise ValueError(f"{name} came twice; give each parameter once")
                near = difflib.get_close_matches(name, shards, n=3)
                raise ValueError(f"{name} is no parameter of the model; the nearest are {near}")
            own, spec = shards[name]
            if tuple(tensor.shape) != spec.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; its global shape is {spec.shape}")
            self.are_complete = False
            own.copy_(tensor[spec.slices(self._model.groups)])
            missing.remove(name)
        if missing:
            raise ValueError(f"{len(missing)} parameters did not come, among them {sorted(missing)[:5]}; give all")
        self.are_complete = True
