# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Cuts data groups into optimizer instances."""

import torch.distributed as dist

from mcore_parallel._groups import Group
from mcore_parallel.data_parallel._buffer import DataGroups
from mcore_parallel.data_parallel._config import DistributedDataParallelConfig


def split_data_group(group: Group, config: DistributedDataParallelConfig) -> DataGroups:
    """Instances are neighbours in the group; only the members of a new communicator take part in making it.

    Raises:
        ValueError: the number of instances does not divide the group.
    """
    instances = config.num_distributed_optimizer_instances
    if group.size % instances:
        raise ValueError(
            f"num_distributed_optimizer_instances={instances} must divide the {group.size} replicas of a parameter; choose a divisor"
        )
    size = group.size // instances
    instance, place = divmod(group.rank, size)
    inner, outer = group, Group.single(group.ranks[group.rank])
    if instances > 1:
        inner = _connect(group, group.ranks[instance * size : (instance + 1) * size])
        outer = _connect(group, group.ranks[place::size])
    gather = _connect(group, inner.ranks) if config.separate_all_gather_group else inner
    return DataGroups(group, inner, outer, gather)


def _connect(group: Group, ranks: tuple[int, ...]) -> Group:
    me = group.ranks[group.rank]
    if len(ranks) == 1:
        return Group(ranks, 0)
    assert group.pg is not None
    # Other data groups need not take part, and do not know of this one.
    pg = dist.new_group(list(ranks), backend=dist.get_backend(group.pg), use_local_synchronization=True)
    assert isinstance(pg, dist.ProcessGroup)
    return Group(ranks, ranks.index(me), pg, pg.group_name)
