# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Initial values of a model's parameters, the same in every layout."""

import hashlib
import math
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mcore_parallel.groups import NamedShard, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.models._config import TransformerConfig

# Parameters that write into the residual stream.
_OUTPUTS = (".out.weight", ".out_proj.weight", ".down.weight", ".experts.down", ".latent_up.weight")


@runtime_checkable
class SelfInitialised(Protocol):
    """A module whose parameters do not follow the rules of ``init_parameters``."""

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: TransformerConfig) -> Tensor | None:
        """Global float32 value of the module's own parameter ``name`` (one leading index of it when it has more than two
        dims, with ``shape`` then that of the part), or None for the usual rule."""
        ...


def fill_parameters(model: nn.Module, config: TransformerConfig, groups: ProcessGroups, seed: int) -> None:
    """The work of ``init_parameters``."""
    owners = {id(parameter): module for module in model.modules() for parameter in module.parameters(recurse=False)}
    with torch.no_grad():
        for shard in named_shards(model):
            if shard.parameter.is_meta:
                raise ValueError(f"{shard.name} is on the meta device; call model.to_empty(device=...) before init_parameters")
            for part, name, shape, slices in _parts(shard, groups):
                value = _initial(shard.name, name, shape, owners[id(shard.parameter)], config, seed)
                part.copy_(value[slices]) if isinstance(value, Tensor) else part.fill_(value)
        for buffer in named_buffer_shards(model):
            buffer.tensor.zero_()


def _parts(shard: NamedShard, groups: ProcessGroups) -> Iterator[tuple[Tensor, str, tuple[int, ...], tuple[slice, ...]]]:
    """Pieces of a parameter: the tensor to fill, its name, its global shape, and the cut of this rank in it."""
    shape, slices = shard.spec.shape, shard.spec.slices(groups)
    if len(shape) < 3:
        yield shard.parameter, shard.name, shape, slices
        return
    for local, index in enumerate(range(slices[0].start, slices[0].stop)):
        yield shard.parameter[local], f"{shard.name}[{index}]", shape[1:], slices[1:]


def _initial(parameter: str, name: str, shape: tuple[int, ...], owner: nn.Module, config: TransformerConfig, seed: int) -> Tensor | float:
    generator = torch.Generator().manual_seed(_seed(seed, name))
    if isinstance(owner, SelfInitialised):
        value = owner.initial_value(parameter.rpartition(".")[2], shape, generator, config)
        if value is not None:
            return value
    if parameter.endswith("norm.weight"):
        return 1.0
    if parameter.endswith("bias"):
        return 0.0
    std = config.init_method_std
    if parameter.endswith(_OUTPUTS):
        # Each layer of a pattern adds once to the residual stream, any other one twice.
        std /= math.sqrt(config.num_layers * (2 if config.hybrid_layer_pattern is None else 1))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _seed(seed: int, name: str) -> int:
    """63 bits that differ between names; Python's own hash changes from process to process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") >> 1
