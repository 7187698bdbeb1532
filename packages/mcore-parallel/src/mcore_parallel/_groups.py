# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The process groups of one plan, handed to whatever needs one."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from mcore_parallel._grid import HyperCommGrid
from mcore_parallel._plan import ParallelPlan

# field of ProcessGroups -> (view, axes)
_DENSE = {
    "tp": "tp",
    "cp": "cp",
    "dp": "dp",
    "pp": "pp",
    "dp_cp": "cp-dp",
    "tp_pp": "tp-pp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-cp-dp",
}
_EXPERT = {"ep": "ep", "expt_tp": "tp", "expt_dp": "dp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp"}


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, seen from one of them.

    A group of one rank has no communicator, so every collective over it is the identity and
    single-rank work needs no ``torch.distributed`` set-up.

    Example:
        >>> Group.single().size
        1
    """

    ranks: tuple[int, ...]
    rank: int
    """Position of this process in ``ranks``."""
    pg: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    name: str = ""
    """Name under which functional collectives find the communicator; empty for a group of one."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @classmethod
    def single(cls, rank: int = 0) -> "Group":
        return cls((rank,), 0)

    @classmethod
    def of(cls, pg: dist.ProcessGroup) -> "Group":
        """Wrap a torch process group this process belongs to."""
        ranks = tuple(dist.get_process_group_ranks(pg))
        return cls(ranks, ranks.index(dist.get_rank()), pg, pg.group_name)


@dataclass(frozen=True, kw_only=True)
class ProcessGroups:
    """Every group of one rank under a plan: dense groups, expert groups (``ep``, ``expt_*``, ``tp_ep*``), embedding groups.

    Example:
        >>> ProcessGroups.single().tp.size
        1
    """

    plan: ParallelPlan
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    dp_cp: Group
    """Ranks over which dense gradients are summed."""
    tp_pp: Group
    """One model replica of the dense view."""
    tp_cp: Group
    tp_dp: Group
    tp_dp_cp: Group
    ep: Group
    expt_tp: Group
    """Tensor parallelism inside an expert."""
    expt_dp: Group
    """Ranks over which expert gradients are summed."""
    tp_ep: Group
    """All ranks that hold the experts of one layer once (expert tp x ep)."""
    tp_ep_pp: Group
    embd: Group | None
    """First and last pipeline rank; None in between."""
    pos_embd: Group | None
    """First pipeline rank; None elsewhere."""
    world: Group

    @classmethod
    def single(cls) -> "ProcessGroups":
        """This rank alone, no communicator; works inside a larger world too."""
        alone = Group.single(dist.get_rank() if dist.is_initialized() else 0)
        return cls(plan=ParallelPlan(), embd=alone, pos_embd=alone, world=alone, **dict.fromkeys((*_DENSE, *_EXPERT), alone))

    @classmethod
    def build(
        cls, plan: ParallelPlan, *, backend: str | None = None, rank_offset: int = 0, timeout_s: float | None = None
    ) -> "ProcessGroups":
        """Create the groups of ``plan``; every rank of the world calls this with the same plan.

        Groups that hold the same ranks share one communicator.

        Args:
            plan: the degrees; their product must equal the world size left from ``rank_offset``.
            backend: communication backend, None for the default one.
            rank_offset: first rank of the grid.
            timeout_s: time limit of each collective.

        Raises:
            ValueError: the plan needs another number of ranks than there are (names the degrees and the world size).
        """
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        me = dist.get_rank() if dist.is_initialized() else 0
        if plan.world_size > world_size - rank_offset:
            raise ValueError(
                f"tp={plan.tp} * cp={plan.cp} * dp={plan.dp} * pp={plan.pp} = {plan.world_size} ranks, but the world has "
                f"{world_size} from rank {rank_offset}; lower a degree or start {plan.world_size} ranks"
            )
        if rank_offset == 0 and plan.world_size < world_size:
            raise ValueError(
                f"tp={plan.tp} * cp={plan.cp} * dp={plan.dp} * pp={plan.pp} = {plan.world_size} ranks "
                f"leave part of world_size={world_size} idle; "
                "raise dp, or use ParallelPlan.for_world"
            )
        made: dict[tuple[int, ...], Group] = {}

        def pick(enumeration: Sequence[Sequence[int]]) -> Group | None:
            """This rank's group of an enumeration; creates missing communicators in the same order on every rank."""
            mine = None
            for ranks in map(tuple, enumeration):
                if ranks not in made:
                    made[ranks] = _connect(ranks, me, backend, timeout_s)
                if me in ranks:
                    mine = made[ranks]
            return mine

        dense, expert = plan.dense_shape(), plan.expert_shape()
        grid = HyperCommGrid(list(dense.values()), list(dense), rank_offset, world_size=world_size)
        grid.register_view("expert", list(expert.values()), list(expert), shared_dims=["pp"])
        groups = {name: pick(grid.get_rank_enum(axes)) for name, axes in _DENSE.items()}
        groups |= {name: pick(grid.get_rank_enum(axes, "expert")) for name, axes in _EXPERT.items()}
        pipelines = grid.get_rank_enum("pp")
        groups["embd"] = pick([ranks if len(ranks) == 1 else [ranks[0], ranks[-1]] for ranks in pipelines])
        groups["pos_embd"] = pick([ranks[:1] for ranks in pipelines])
        groups["world"] = pick([range(rank_offset, rank_offset + plan.world_size)])
        pipeline = groups["pp"]
        if pipeline is not None:
            _open_links(pipeline)
        return cls(plan=plan, **groups)  # type: ignore[arg-type]

    @property
    def sequence_parallel(self) -> bool:
        """Whether tokens are split over tp between the tensor-parallel layers."""
        return self.plan.sequence_parallel and self.tp.size > 1

    def axis(self, view: str, name: str) -> Group:
        """The group along one axis of a view (``"dense"``: tp cp dp pp; ``"expert"``: tp ep dp pp)."""
        field_name = {"expert": {"tp": "expt_tp", "dp": "expt_dp"}}.get(view, {}).get(name, name)
        return getattr(self, field_name)

    def data(self, view: str) -> Group:
        """The group over which gradients of a view's parameters are summed."""
        return self.expt_dp if view == "expert" else self.dp_cp


def _connect(ranks: tuple[int, ...], me: int, backend: str | None, timeout_s: float | None) -> Group:
    if len(ranks) == 1:
        return Group(ranks, 0)
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    pg = dist.new_group(list(ranks), backend=backend, timeout=timeout)
    if me not in ranks:
        return Group(ranks, -1)
    assert pg is not None
    return Group(ranks, ranks.index(me), pg, pg.group_name)


def _open_links(group: Group) -> None:
    """Connect the neighbours of a chain both ways.

    NCCL connects a pair on its first transfer in each direction, on the host, and a schedule's first transfers do not pair up.
    """
    if group.size == 1 or group.rank < 0 or dist.get_backend(group.pg) != "nccl":
        return
    token = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
    peers = [group.ranks[index] for index in (group.rank - 1, group.rank + 1) if 0 <= index < group.size]
    batch = [dist.P2POp(dist.isend, token, peer, group.pg) for peer in peers]
    batch += [dist.P2POp(dist.irecv, torch.empty_like(token), peer, group.pg) for peer in peers]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
