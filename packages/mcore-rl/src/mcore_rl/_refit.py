# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Carrying trained weights into an engine, whatever the two layouts."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.comm import all_gather
from mcore_rl._exchange import broadcast_json


class WeightSink(Protocol):
    """What takes over weights: an inference engine."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...


def gather_weights(model: nn.Module, groups: ProcessGroups) -> Iterator[tuple[str, Tensor]]:
    """Every global parameter of ``model`` in full, one at a time, on every rank; all ranks must consume it together.

    Parameters may be DTensors, divided among data-parallel ranks: between two steps of a model that is sharded so.
    """
    # Of a table at both ends of the pipeline, the first stage's copy is enough.
    own = [shard for shard in named_shards(model) if groups.pp.is_first or "embd" not in shard.spec.partial]
    for stage in range(groups.pp.size):
        mine = stage == groups.pp.rank
        listing = [(s.name, list(s.spec.shape), str(s.parameter.dtype).removeprefix("torch.")) for s in own] if mine else []
        for number, (name, shape, dtype) in enumerate(broadcast_json(listing, groups.pp, stage, own[0].parameter.device)):
            if mine:
                full = _undivided(own[number].parameter)
                for axis, dim in own[number].spec.shards.items():
                    full = all_gather(full, groups.axis(own[number].spec.view, axis), dim=dim)
            else:
                full = torch.empty(shape, dtype=getattr(torch, dtype), device=own[0].parameter.device)
            if groups.pp.size > 1:
                full = full.contiguous()
                dist.broadcast(full, group=groups.pp.pg, group_src=stage)
            yield name, full


def refit(model: nn.Module, groups: ProcessGroups, engine: WeightSink) -> None:
    """Copy the weights of a trained model into an engine; every rank of ``groups`` calls it with an engine of its own."""
    engine.load_weights(gather_weights(model, groups))


def _undivided(parameter: nn.Parameter) -> Tensor:
    """What this rank computes with. A collective for a DTensor."""
    if type(parameter) is nn.Parameter:
        return parameter.detach()
    # Slow to import, so only where there is one.
    from torch.distributed.tensor import DTensor

    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()
