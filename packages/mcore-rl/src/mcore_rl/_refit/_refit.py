# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Carrying trained weights into an engine, whatever the two layouts."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.comm import all_gather
from mcore_rl._ranks._exchange import broadcast_json
from mcore_rl._stability import experimental_api


@experimental_api
class WeightSink(Protocol):
    """What takes over weights: an inference engine.

    One whose ``model`` says its layout (``model.groups``) is given `mcore_inference.WeightSlice`s, any other a tensor for each weight.
    """

    def load_weights(self, weights: Iterable[tuple[str, Any]], /) -> None: ...


@experimental_api
def gather_weights(model: nn.Module, groups: ProcessGroups) -> Iterator[tuple[str, Tensor]]:
    """Every global parameter and persistent buffer of ``model`` in full, one at a time, on every rank; all ranks must consume it together.

    Parameters may be DTensors, divided among data-parallel ranks: between two steps of a model that is sharded so.

    Raises:
        ValueError: a weight is kept in eight bits with scales; on every rank, before the first one comes.
    """
    # Of a table at both ends of the pipeline, the first stage's copy is enough.
    own = [(s.name, s.parameter, s.spec) for s in named_shards(model) if groups.pp.is_first or "embd" not in s.spec.partial]
    own += [(buffer.name, buffer.tensor, buffer.spec) for buffer in named_buffer_shards(model)]
    device = own[0][1].device
    listing = [(name, list(spec.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor, spec in own]
    listings = [broadcast_json(listing if stage == groups.pp.rank else [], groups.pp, stage, device) for stage in range(groups.pp.size)]
    check_formats((name, getattr(torch, dtype)) for names in listings for name, _, dtype in names)
    for stage, names in enumerate(listings):
        mine = stage == groups.pp.rank
        for number, (name, shape, dtype) in enumerate(names):
            if mine:
                _, tensor, spec = own[number]
                full = undivided(tensor)
                for axis, dim in spec.shards.items():
                    full = all_gather(full, groups.axis(spec.view, axis), dim=dim)
            else:
                full = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            if groups.pp.size > 1:
                full = full.contiguous()
                dist.broadcast(full, group=groups.pp.pg, group_src=stage)
            yield name, full


def check_formats(weights: Iterable[tuple[str, torch.dtype]]) -> None:
    """See that weights say their values by themselves.

    Args:
        weights: names and dtypes.

    Raises:
        ValueError: one is in a floating-point format of one byte, whose scales are no parameters.
    """
    for name, dtype in weights:
        if dtype.is_floating_point and dtype.itemsize == 1:
            raise ValueError(
                f"{name} is in {dtype}, and its scales would not go with it; take weights from a model that keeps them in its own dtype "
                "(LoraConfig.base_dtype=None, weight_dtype=None)"
            )


def undivided(parameter: Tensor) -> Tensor:
    """What this rank computes with. A collective for a DTensor."""
    whole: Any = parameter.full_tensor() if is_divided(parameter) else parameter  # type: ignore[operator]
    return whole.detach()


def is_divided(parameter: Tensor) -> bool:
    """Whether it is a DTensor, of which this rank holds a part."""
    if type(parameter) in (nn.Parameter, Tensor):
        return False
    # Slow to import, so only where there may be one.
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)
