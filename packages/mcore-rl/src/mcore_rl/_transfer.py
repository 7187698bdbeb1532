# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights from the ranks of a trained model to engines on the same ranks or on others, by a plan, in buckets."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_ckpt.chunks import Box
from mcore_parallel import Group, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.training import model_state
from mcore_rl._exchange import all_gather_json, device_of
from mcore_rl._placement import Placement, RankTimeoutError
from mcore_rl._refit import WeightSink, undivided
from mcore_rl._refit_plan import RefitPlan, WeightCopy, WeightShard, plan_refit
from mcore_rl._rendezvous import rendezvous
from mcore_rl._stability import experimental_api

_ALIGNMENT, _POLL_S = 16, 2e-4


@experimental_api
class RefitTimeoutError(TimeoutError):
    """A rank whose weights did not come, or were not taken, in time; names it."""


@runtime_checkable
class _Sliced(Protocol):
    """A model that says which boxes of its weights it holds."""

    def parameter_shards(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class _Part:
    """A box of a weight on this rank; its tensor may be a DTensor, which is gathered when its turn comes."""

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """What all ranks agreed on."""

    plan: RefitPlan
    buckets: list[list[str]]
    """Names in the order of the model."""
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    copies: Mapping[str, list[WeightCopy]]
    taken: Set[str]
    """Names that this rank's engine takes."""


@experimental_api
class WeightTransfer:
    """Carries weights between two layouts on the same or on disjoint ranks: each sends the boxes that others take, and none it need not.

    The plan is made at the first call, and again when a layout has changed. An engine whose ``model`` says its layout takes its own boxes;
    any other takes whole weights.

    Args:
        bucket_bytes: weights that are on their way at once, at least one; the smallest limit of any rank holds.
        timeout_s: limit of waiting for all ranks to come, and of each bucket; after it the rank that is waited for is named.

    Raises:
        ValueError: a number that is not positive.
    """

    def __init__(self, *, bucket_bytes: int = 1 << 28, timeout_s: float = 600.0) -> None:
        if bucket_bytes < 1 or not timeout_s > 0:
            raise ValueError(f"bucket_bytes={bucket_bytes} and timeout_s={timeout_s} must be positive")
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self._layout: list[Any] | None = None
        self._schedule: _Schedule | None = None

    @property
    def plan(self) -> RefitPlan | None:
        """Of the last call; None before the first."""
        return None if self._schedule is None else self._schedule.plan

    def weights(
        self, model: nn.Module | None, groups: ProcessGroups | None, engine: object, *, placement: Placement | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every weight by its name in a tensor of its global shape, of which the boxes that this rank's engine takes are filled.

        All ranks of ``groups.world``, or of ``placement.world``, consume it together.

        Args:
            model: the trained model; parameters may be DTensors, between two steps. None on a rank that only serves.
            groups: its layout; None with the model.
            engine: what takes the weights; None on a rank that only trains, on which nothing comes.
            placement: where trainer and engines have ranks of their own; None when each rank has both.

        Raises:
            ValueError: a rank without a model or an engine, and no placement.
            RefitPlanError: the model and the engine have not the same weights; on every rank.
            RefitTimeoutError: a rank did not come within ``timeout_s``.
        """
        if placement is None and (model is None or groups is None or engine is None):
            raise ValueError("model, groups and engine may be None only where ranks train or serve; pass placement=Placement.split(plan)")
        world = self._met(placement, groups)
        parts = [] if model is None or groups is None else _parts(model, groups)
        schedule = self._agreed(parts, _taken(engine), world)
        named: dict[str, list[_Part]] = {}
        for part in parts:
            named.setdefault(part.name, []).append(part)
        for number, names in enumerate(schedule.buckets, 1):
            where = f"bucket {number} of {len(schedule.buckets)}, from {names[0]} on"
            yield from self._bucket(schedule, names, {name: named.get(name, []) for name in names}, world, where)

    def _met(self, placement: Placement | None, groups: ProcessGroups | None) -> Group:
        """The world of a placement, or of a layout, all of whose ranks are there."""
        try:
            if placement is not None:
                placement.gather(None, self.timeout_s, "weights")
                return placement.world
            world = cast(ProcessGroups, groups).world
            rendezvous(world, self.timeout_s, "weights")
            return world
        except RankTimeoutError as error:
            raise RefitTimeoutError(str(error)) from error

    def _agreed(self, parts: Sequence[_Part], taken: list[Any] | None, world: Group) -> _Schedule:
        """The schedule of these layouts, which is made anew where any rank's has changed."""
        listing = [[part.name, part.shape, part.box.to_json(), str(part.tensor.dtype).removeprefix("torch.")] for part in parts]
        layout = [listing, taken]
        device = parts[0].tensor.device if parts else device_of(world)
        changed = all_reduce(torch.tensor([float(self._schedule is None or layout != self._layout)], device=device), world, op="max")
        if self._schedule is None or changed.item():
            # Ranks that cut their buckets otherwise would wait for messages that nobody sends.
            gathered = all_gather_json([layout, self.bucket_bytes], world, device)
            self._schedule = self._make([own for own, _ in gathered], world.rank, min(limit for _, limit in gathered))
            self._layout = layout
        return self._schedule

    def _make(self, layouts: Sequence[Sequence[Any]], rank: int, bucket_bytes: int) -> _Schedule:
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, shape, _, dtype in chain.from_iterable(listing for listing, _ in layouts):
            shapes.setdefault(name, tuple(shape))
            dtypes.setdefault(name, getattr(torch, dtype))
        sources = [
            WeightShard(name=name, rank=rank, shape=tuple(shape), box=Box.from_json(box))
            for rank, (listing, _) in enumerate(layouts)
            for name, shape, box, _ in listing
        ]
        destinations = [
            WeightShard(name=name, rank=rank, shape=tuple(shape), box=Box.from_json(box))
            for rank, (_, taken) in enumerate(layouts)
            for name, shape, box in (taken if taken is not None else [[n, s, [[0] * len(s), list(s)]] for n, s in shapes.items()])
        ]
        plan = plan_refit(sources, destinations)
        copies: dict[str, list[WeightCopy]] = {name: [] for name in shapes}
        for copy in plan.copies:
            copies[copy.name].append(copy)
        sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
        own = layouts[rank][1]
        return _Schedule(
            plan=plan,
            buckets=_buckets(sizes, bucket_bytes),
            shapes=shapes,
            dtypes=dtypes,
            copies=copies,
            taken=shapes.keys() if own is None else {name for name, _, _ in own},
        )

    def _bucket(
        self, schedule: _Schedule, names: Sequence[str], parts: Mapping[str, Sequence[_Part]], world: Group, where: str
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights of one bucket."""
        me = world.rank
        copies = [copy for name in names for copy in schedule.copies[name]]
        held = {(name, part.box): undivided(part.tensor) for name in names for part in parts[name]}
        # A tensor that is all of the weight needs no copy.
        whole = {name: held.get((name, Box.whole(schedule.shapes[name]))) for name in names if name in schedule.taken}
        device = next(iter(held.values())).device if held else device_of(world)
        incoming = {peer: _Message.of(copies, schedule.dtypes, peer, me) for peer in range(world.size) if peer != me}
        outgoing = {peer: _Message.of(copies, schedule.dtypes, me, peer) for peer in range(world.size) if peer != me}
        transfers = [(peer, message.empty(device), True) for peer, message in incoming.items() if message.copies]
        transfers += [(peer, message.pack(held), False) for peer, message in outgoing.items() if message.copies]
        works = _start(transfers, world)
        full = {
            name: torch.empty(schedule.shapes[name], dtype=schedule.dtypes[name], device=device) if tensor is None else tensor
            for name, tensor in whole.items()
        }
        for copy in copies:
            if copy.source_rank == copy.destination_rank == me and whole[copy.name] is None:
                full[copy.name][copy.box.slices()] = held[copy.name, copy.source][copy.source_slices]
        _finish(works, transfers, world, self.timeout_s, where)
        for peer, buffer, arrives in transfers:
            if arrives:
                incoming[peer].unpack(buffer, full)
        yield from full.items()


@experimental_api
def refit(
    model: nn.Module | None,
    groups: ProcessGroups | None,
    engine: WeightSink | None,
    transfer: WeightTransfer | None = None,
    *,
    placement: Placement | None = None,
) -> None:
    """Copy the weights of a trained model into engines; every rank of ``groups``, or of ``placement``, calls it.

    Args:
        model: as of ``WeightTransfer.weights``.
        groups: its layout.
        engine: of this rank; takes them over.
        transfer: keeps the plan from one call to the next; None to make it.
        placement: as of ``WeightTransfer.weights``.
    """
    weights = (transfer or WeightTransfer()).weights(model, groups, engine, placement=placement)
    if engine is not None:
        engine.load_weights(weights)
        return
    for _ in weights:
        raise AssertionError("weights came to a rank without an engine")


def _parts(model: nn.Module, groups: ProcessGroups) -> list[_Part]:
    """The boxes that this rank holds, in the order of the model."""
    if isinstance(model, _Sliced):
        state = {name: value if isinstance(value, list) else [value] for name, value in model_state(model, groups).items()}
        return [
            _Part(name, tuple(part.global_shape), Box(tuple(part.offset), tuple(part.data.shape)), part.data)
            for name, boxes in state.items()
            for part in boxes
        ]
    # Of a table at both ends of the pipeline, the first stage's copy is enough.
    own = [(s.name, s.parameter, s.spec) for s in named_shards(model) if groups.pp.is_first or "embd" not in s.spec.partial]
    own += [(buffer.name, buffer.tensor, buffer.spec) for buffer in named_buffer_shards(model)]
    return [_Part(name, tuple(spec.shape), Box(spec.offset(groups), spec.local_shape(groups)), tensor) for name, tensor, spec in own]


def _taken(engine: object) -> list[Any] | None:
    """Boxes of an engine's model on this rank; None for one that says nothing of it, which takes whole weights. None are taken by one that
    says ``takes_weights = False``, because it stands for an engine that another rank sends them to."""
    if engine is None or not getattr(engine, "takes_weights", True):
        return []
    model = getattr(engine, "model", None)
    if not isinstance(model, nn.Module) or not isinstance(groups := getattr(model, "groups", None), ProcessGroups):
        return None
    own = [*named_shards(model), *named_buffer_shards(model)]
    return [[part.name, list(part.spec.shape), [list(part.spec.offset(groups)), list(part.spec.local_shape(groups))]] for part in own]


def _buckets(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not buckets:
            buckets.append([])
            room = limit
        buckets[-1].append(name)
        room -= size
    return buckets


@dataclass(frozen=True)
class _Message:
    """What goes from one rank to another in one bucket: boxes one behind the other, as bytes."""

    copies: list[WeightCopy]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, copies: Sequence[WeightCopy], dtypes: Mapping[str, torch.dtype], source: int, destination: int) -> "_Message":
        return cls([copy for copy in copies if (copy.source_rank, copy.destination_rank) == (source, destination)], dtypes)

    def _places(self) -> Iterator[tuple[WeightCopy, int, int]]:
        begin = 0
        for copy in self.copies:
            end = begin + copy.box.num_elements * self.dtypes[copy.name].itemsize
            yield copy, begin, end
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT

    def empty(self, device: torch.device) -> Tensor:
        *_, (_, _, end) = self._places()
        return torch.empty(end, dtype=torch.uint8, device=device)

    def pack(self, held: Mapping[tuple[str, Box], Tensor]) -> Tensor:
        tensors = [held[copy.name, copy.source] for copy in self.copies]
        buffer = self.empty(tensors[0].device)
        for (copy, begin, end), tensor in zip(self._places(), tensors, strict=True):
            buffer[begin:end].view(tensor.dtype).view(copy.box.shape).copy_(tensor[copy.source_slices])
        return buffer

    def unpack(self, buffer: Tensor, full: Mapping[str, Tensor]) -> None:
        for copy, begin, end in self._places():
            full[copy.name][copy.box.slices()] = buffer[begin:end].view(self.dtypes[copy.name]).view(copy.box.shape)


def _start(transfers: Sequence[tuple[int, Tensor, bool]], world: Group) -> list[dist.Work]:
    operations = [
        dist.P2POp(dist.irecv if arrives else dist.isend, buffer, world.ranks[peer], world.pg) for peer, buffer, arrives in transfers
    ]
    return list(dist.batch_isend_irecv(operations)) if operations else []


def _finish(works: Sequence[dist.Work], transfers: Sequence[tuple[int, Tensor, bool]], world: Group, timeout_s: float, where: str) -> None:
    """Wait for all, within one limit.

    Raises:
        RefitTimeoutError: names those that were waited for.
    """
    end = time.monotonic() + timeout_s
    for number, work in enumerate(works):
        # One handle a transfer, or one for the whole batch.
        waited = transfers[number : number + 1] if len(works) == len(transfers) else transfers
        try:
            _wait(work, end, waited[0][1].device)
        except (RuntimeError, TimeoutError) as error:
            peers = " and ".join(f"{'from' if arrives else 'by'} rank {world.ranks[peer]}" for peer, _, arrives in waited)
            verb = "came" if waited[0][2] else "were taken"
            raise RefitTimeoutError(
                f"no weights {verb} {peers} within timeout_s={timeout_s:g} ({where}): {error}; look at the log of that rank"
            ) from error


def _wait(work: dist.Work, end: float, device: torch.device) -> None:
    if device.type == "cpu":
        # A host transfer tells that it is over only to who waits.
        work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        return
    while not work.is_completed():
        if time.monotonic() > end:
            raise TimeoutError("the transfer is still under way")
        time.sleep(_POLL_S)
    work.wait()
