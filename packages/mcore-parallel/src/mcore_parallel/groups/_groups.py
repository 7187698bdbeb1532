# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The process groups of one plan, handed to whatever needs one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
import torch.distributed as dist

from mcore_parallel.groups._communicator import CommunicatorOptions, Group, connect, made_by_members, uses_nccl
from mcore_parallel.groups._grid import HyperCommGrid
from mcore_parallel.groups._plan import ParallelPlan

__all__ = ["Group", "ProcessGroups", "enumerate_groups"]

# field of ProcessGroups -> axes, of the dense and of the expert view
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
# Their collectives run between the GEMMs of layers, which wait for them. Those of the other groups run beside the computation; on one
# communicator, which runs one after the other, a layer's exchange would wait behind a bucket of gradients or a layer of weights.
_LAYERS = frozenset({*_DENSE, *_EXPERT, "hierarchical_cp", "embd", "pos_embd"}) - {"dp", "dp_cp", "expt_dp"}
_SHARP = {"dp": "dp_cp", "dp_replica": "inter_dp_cp"}
# replicas, those of one optimizer instance, one of each instance, for gathers
_DATA = (("dp_cp", "intra_dp_cp", "inter_dp_cp", "dp_cp_ag"), ("expt_dp", "intra_expt_dp", "inter_expt_dp", "expt_dp_ag"))


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
    intra_dp_cp: Group
    """Ranks of ``dp_cp`` in one optimizer instance (``ParallelPlan.optimizer_instances``)."""
    inter_dp_cp: Group
    """Ranks that hold the same slice of dense parameters, one an instance."""
    intra_expt_dp: Group
    """Ranks of ``expt_dp`` in one optimizer instance."""
    inter_expt_dp: Group
    """Ranks that hold the same slice of expert parameters, one an instance."""
    intra_dist_opt: Group | None
    """All ranks of one optimizer instance; None when the dense and the expert view cut the ranks into different instances."""
    dp_cp_ag: Group
    """The ranks of ``intra_dp_cp``, for parameter gathers; a communicator of its own with ``separate_all_gather``."""
    expt_dp_ag: Group
    """The ranks of ``intra_expt_dp``, for parameter gathers."""
    hierarchical_cp: tuple[Group, ...]
    """One group for each level of ``ParallelPlan.hierarchical_cp``, the level of neighbours first."""
    embd: Group | None
    """First and last pipeline rank; None in between."""
    pos_embd: Group | None
    """First pipeline rank; None elsewhere."""
    world: Group
    _open: list[dist.ProcessGroup] = field(default_factory=list, repr=False, compare=False)
    _later: dict[tuple[tuple[int, ...], str], Group] = field(default_factory=dict, repr=False, compare=False)
    """Communicators that data parallelism made beside ``build``, by ranks and purpose; they stay until the world ends."""

    @classmethod
    def single(cls) -> "ProcessGroups":
        """This rank alone, no communicator; works inside a larger world too."""
        alone = Group.single(dist.get_rank() if dist.is_initialized() else 0)
        return cls(plan=ParallelPlan(), hierarchical_cp=(), **dict.fromkeys(_names(), alone))  # type: ignore[arg-type]

    @classmethod
    def build(
        cls,
        plan: ParallelPlan,
        *,
        backend: str | None = None,
        rank_offset: int = 0,
        leave_idle: bool = False,
        timeout_s: float | None = None,
        separate_all_gather: bool = False,
        options: Mapping[str, CommunicatorOptions] | None = None,
        use_sharp: bool = False,
        sharp_enabled_group: str | None = None,
    ) -> "ProcessGroups":
        """Create the groups of ``plan``; every rank of the world calls this with the same plan.

        Groups that hold the same ranks share one communicator, unless their options differ, or one serves layers and the other data
        parallelism (``dp``, ``dp_cp``, ``expt_dp`` and what they are cut into, ``intra_dist_opt``, ``world``).

        Args:
            plan: the degrees; their product must equal the world size left from ``rank_offset``.
            backend: communication backend, None for the default one. A second set of groups over "gloo" serves host tensors.
            rank_offset: first rank of the grid.
            leave_idle: the grid may begin at rank 0 and leave ranks to another one. They call this too, and use nothing of the result.
            timeout_s: time limit of each collective of every group.
            separate_all_gather: ``dp_cp_ag`` and ``expt_dp_ag`` get communicators of their own, so that parameter gathers need not
                queue behind sums of gradients.
            options: NCCL's choices by field name (``load_communicator_options`` reads them from a file).
            use_sharp: let the switches of the network add gradients where they can (``CommunicatorOptions.use_sharp``). Some serve the
                first communicators only, so the group that has it is made first.
            sharp_enabled_group: which group has it: "dp", the default, for ``dp_cp``, or "dp_replica" for ``inter_dp_cp``.

        Raises:
            ValueError: the plan needs another number of ranks than there are (names the degrees and the world size), options for
                a group that does not exist, ``sharp_enabled_group`` without ``use_sharp`` or of a name that is none.
        """
        sharp = _sharp_field(plan, use_sharp, sharp_enabled_group)
        if sharp is not None:
            options = {**(options or {}), sharp: replace((options or {}).get(sharp, CommunicatorOptions()), use_sharp=True)}
        if unknown := set(options or {}) - {*_names(), "hierarchical_cp"}:
            raise ValueError(f"options name unknown groups {sorted(unknown)}; known: {sorted({*_names(), 'hierarchical_cp'})}")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        me = dist.get_rank() if dist.is_initialized() else 0
        if plan.world_size > world_size - rank_offset:
            raise ValueError(
                f"tp={plan.tp} * cp={plan.cp} * dp={plan.dp} * pp={plan.pp} = {plan.world_size} ranks, but the world has "
                f"{world_size} from rank {rank_offset}; lower a degree or start {plan.world_size} ranks"
            )
        if rank_offset == 0 and plan.world_size < world_size and not leave_idle:
            raise ValueError(
                f"tp={plan.tp} * cp={plan.cp} * dp={plan.dp} * pp={plan.pp} = {plan.world_size} ranks "
                f"leave part of world_size={world_size} idle; "
                "raise dp, or use ParallelPlan.for_world"
            )
        enumerations = enumerate_groups(plan, rank_offset, world_size)
        maker = _Maker(me, backend, timeout_s, options or {}, {"dp_cp_ag", "expt_dp_ag"} if separate_all_gather else set())
        # Groups with options come first, so that those of the same ranks without any share their communicators.
        order = sorted(enumerations, key=lambda name: (name != sharp, not maker.has_options(name)))
        by_name = {name: maker.pick(name, enumerations[name]) for name in order}
        if by_name["embd"] is None and by_name["world"] is not None:
            # A stage between the ends. torch names a group that its members make alone by how many groups each of them is in.
            with made_by_members():
                alone = dist.new_group([me], backend=backend, use_local_synchronization=True, group_desc="mcore alone")
            assert isinstance(alone, dist.ProcessGroup)
            maker.mine.append(alone)
        if sharp is not None and (group := by_name[sharp]) is not None:
            _connect_all(group)
        levels = tuple(
            group for level in range(len(plan.hierarchical_cp)) if (group := by_name.pop(f"hierarchical_cp.{level}")) is not None
        )
        groups = {"intra_dist_opt": None, **by_name}
        pipeline = groups["pp"]
        if pipeline is not None:
            _open_links(pipeline)
        for ring in (groups["cp"], *levels[1:]):
            if ring is not None:
                _open_links(ring, closed=True)
        return cls(plan=plan, hierarchical_cp=levels, _open=maker.mine, **groups)  # type: ignore[arg-type]

    def close(self) -> None:
        """Destroy the communicators of ``build``, each once, on every rank at the same point; the world stays, and ``build`` may follow.

        A second call does nothing.
        """
        while self._open:
            dist.destroy_process_group(self._open.pop())

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


def enumerate_groups(plan: ParallelPlan, rank_offset: int = 0, world_size: int | None = None) -> dict[str, list[list[int]]]:
    """The ranks of every group of ``plan`` by field name (levels of ``hierarchical_cp`` as ``hierarchical_cp.0`` and so on).

    A pure function, so that all ranks agree; each rank lies in at most one group of a name.
    """
    dense, expert = plan.dense_shape(), plan.expert_shape()
    world_size = rank_offset + plan.world_size if world_size is None else world_size
    grid = HyperCommGrid(list(dense.values()), list(dense), rank_offset, world_size=world_size)
    grid.register_view("expert", list(expert.values()), list(expert), shared_dims=["pp"])
    enumerations = {name: grid.get_rank_enum(axes) for name, axes in _DENSE.items()}
    enumerations |= {name: grid.get_rank_enum(axes, "expert") for name, axes in _EXPERT.items()}
    instances = {}
    for data, inner, outer, gather in _DATA:
        size = len(enumerations[data][0]) // plan.optimizer_instances
        cut = [[ranks[start : start + size] for ranks in enumerations[data]] for start in range(0, len(enumerations[data][0]), size)]
        enumerations[inner] = enumerations[gather] = [ranks for instance in cut for ranks in instance]
        enumerations[outer] = [ranks[place::size] for ranks in enumerations[data] for place in range(size)]
        instances[data] = [sorted(rank for ranks in instance for rank in ranks) for instance in cut]
    if instances["dp_cp"] == instances["expt_dp"]:
        enumerations["intra_dist_opt"] = instances["dp_cp"]
    below = 1
    for level, size in enumerate(plan.hierarchical_cp):
        enumerations[f"hierarchical_cp.{level}"] = [
            ranks[start + place : start + place + size * below : below]
            for ranks in enumerations["cp"]
            for start in range(0, plan.cp, size * below)
            for place in range(below)
        ]
        below *= size
    pipelines = grid.get_rank_enum("pp")
    enumerations["embd"] = [ranks if len(ranks) == 1 else [ranks[0], ranks[-1]] for ranks in pipelines]
    enumerations["pos_embd"] = [ranks[:1] for ranks in pipelines]
    enumerations["world"] = [list(range(rank_offset, rank_offset + plan.world_size))]
    return enumerations


def _sharp_field(plan: ParallelPlan, use_sharp: bool, name: str | None) -> str | None:
    """The group whose sums the network adds; None for none."""
    if not use_sharp:
        if name is not None:
            raise ValueError(f"sharp_enabled_group={name!r} needs use_sharp=True; set it, or leave the group out")
        return None
    if name not in (None, *_SHARP):
        raise ValueError(f"sharp_enabled_group={name!r} must be one of {', '.join(map(repr, _SHARP))}")
    if name == "dp_replica" and plan.optimizer_instances == 1:
        raise ValueError("sharp_enabled_group='dp_replica' needs optimizer_instances above 1, between which it adds; use 'dp'")
    return _SHARP[name or "dp"]


class _Maker:
    """Makes communicators in one order on every rank; groups that hold the same ranks share one where one need not wait for the other."""

    def __init__(
        self, me: int, backend: str | None, timeout_s: float | None, options: Mapping[str, CommunicatorOptions], separate: set[str]
    ) -> None:
        self._me, self._backend, self._timeout_s, self._options, self._separate = me, backend, timeout_s, options, separate
        self._made: dict[tuple[object, ...], Group] = {}
        self.mine: list[dist.ProcessGroup] = []
        """Communicators of this rank, each once."""

    def has_options(self, name: str) -> bool:
        return name.partition(".")[0] in self._options

    def pick(self, name: str, enumeration: Sequence[Sequence[int]]) -> Group | None:
        """This rank's group of an enumeration."""
        field_name = name.partition(".")[0]
        options = self._options.get(field_name)
        lane = "gather" if name in self._separate else "layers" if field_name in _LAYERS else "data"
        created = None
        for ranks in map(tuple, enumeration):
            key = (ranks, lane) if options is None else (ranks, lane, options)
            if key not in self._made:
                group = connect(ranks, self._me, backend=self._backend, timeout_s=self._timeout_s, options=options, name=f"mcore {name}")
                self._made[key] = group
                self._made.setdefault((ranks, lane), group)
                if group.pg is not None:
                    self.mine.append(group.pg)
            if self._me in ranks:
                created = self._made[key]
        return created


def _names() -> list[str]:
    """Fields of ``ProcessGroups`` that are one group."""
    return [item.name for item in fields(ProcessGroups) if item.name not in ("plan", "hierarchical_cp", "_open", "_later")]


def _connect_all(group: Group) -> None:
    """Make NCCL's communicator now, in place of at the first sum; the ranks of the group call it together."""
    if group.size > 1 and group.rank >= 0 and uses_nccl(group.pg) and torch.cuda.is_initialized():
        dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group.pg)


def _open_links(group: Group, *, closed: bool = False) -> None:
    """Connect the neighbours of a chain both ways; of a ring when it is closed.

    NCCL connects a pair on its first transfer in each direction, on the host, and a schedule's first transfers do not pair up.
    """
    # Where NCCL is one of several backends, a process that has not touched its GPU works with tensors of the host.
    if group.size == 1 or group.rank < 0 or not uses_nccl(group.pg):
        return
    if dist.get_backend(group.pg) != "nccl" and not torch.cuda.is_initialized():
        return
    token = torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))
    places = [group.rank - 1, group.rank + 1]
    places = {place % group.size for place in places} if closed else {place for place in places if 0 <= place < group.size}
    peers = [group.ranks[place] for place in sorted(places)]
    batch = [dist.P2POp(dist.isend, token, peer, group.pg) for peer in peers]
    batch += [dist.P2POp(dist.irecv, torch.empty_like(token), peer, group.pg) for peer in peers]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
