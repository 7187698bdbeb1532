# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The norm of all gradients of a model, whatever its layout."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mcore_parallel._groups import ProcessGroups
from mcore_parallel._shards import NamedShard, ShardSpec
from mcore_parallel.comm import all_reduce


def global_grad_norm(gradients: Mapping[str, Tensor], shards: Sequence[NamedShard], groups: ProcessGroups) -> Tensor:
    """2-norm of the whole model's gradient, as a float64 scalar tensor that is bit for bit the same on every rank.

    Every part of every parameter counts on exactly one rank of the world (the one whose replica number is 0), and
    one sum over the world adds them up: dense and expert parameters, all stages and all replicas at once. Replicas
    therefore cannot drift apart through a last bit of the clipping factor.

    Args:
        gradients: complete gradients by parameter name.
        shards: parameters and placements, on every rank those of its stage.
        groups: the process groups.
    """
    device = next(iter(gradients.values())).device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grads in by_dtype([gradients[shard.name] for shard in shards if counts_here(shard.spec, groups)]):
        maths = torch.promote_types(grads[0].dtype, torch.float32)
        total += torch.stack(torch._foreach_norm(grads, 2, dtype=maths)).double().square().sum()  # pyright: ignore[reportPrivateImportUsage]
    return all_reduce(total, groups.world).sqrt()


def counts_here(spec: ShardSpec, groups: ProcessGroups) -> bool:
    """Whether this rank is the one that counts its part of a parameter."""
    # A parameter shared by the first and the last stage is partial over embd; the first stage counts it.
    copy = groups.embd is not None and "embd" in spec.partial and not groups.embd.is_first
    return spec.replica(groups) == 0 and not copy


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists that a multi-tensor kernel takes in one go."""
    found: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())
