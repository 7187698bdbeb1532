# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Cuts data groups into optimizer instances."""

import torch.distributed as dist

from mcore_parallel.data_parallel._buffer import DataGroups
from mcore_parallel.data_parallel._config import DistributedDataParallelConfig
from mcore_parallel.groups import Group, ProcessGroups, connect


class DataGroupSplitter:
    """Finds the groups of optimizer instances in ``groups``, or makes those that are not there.

    Args:
        groups: of the model.
        config: how many instances, and whether gathers get communicators of their own.
    """

    def __init__(self, groups: ProcessGroups, config: DistributedDataParallelConfig) -> None:
        self._groups, self._config = groups, config

    def split(self, group: Group) -> DataGroups:
        """Instances are neighbours in the group.

        Raises:
            ValueError: the number of instances does not divide the group.
        """
        instances, groups = self._config.num_distributed_optimizer_instances, self._groups
        if group.size % instances:
            raise ValueError(
                f"num_distributed_optimizer_instances={instances} must divide the {group.size} replicas of a parameter; choose a divisor"
            )
        dense = (groups.intra_dp_cp, groups.inter_dp_cp, groups.dp_cp_ag)
        inner, outer, gather = dense if group == groups.dp_cp else (groups.intra_expt_dp, groups.inter_expt_dp, groups.expt_dp_ag)
        if groups.plan.optimizer_instances != instances:
            size = group.size // instances
            instance, place = divmod(group.rank, size)
            inner = gather = group
            outer = Group.single(group.ranks[group.rank])
            if instances > 1:
                inner = gather = self._connect(group, group.ranks[instance * size : (instance + 1) * size], "inner")
                outer = self._connect(group, group.ranks[place::size], "outer")
        if not self._config.separate_all_gather_group:
            gather = inner
        elif gather == inner:
            gather = self._connect(group, inner.ranks, "gather")
        return DataGroups(group, inner, outer, gather)

    def _connect(self, group: Group, ranks: tuple[int, ...], purpose: str) -> Group:
        """The same communicator for the same ranks and purpose, also of a later model over the same ``groups``.

        Only members take part: ranks without such parameters do not know of this group.
        """
        deferred = self._groups._later
        if (ranks, purpose) not in deferred:
            backend = None if group.pg is None else dist.get_backend(group.pg)
            deferred[ranks, purpose] = connect(ranks, group.ranks[group.rank], backend=backend, timeout_s=group.timeout_s, local=True)
        return deferred[ranks, purpose]
