# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights from the ranks of a trained model to engines on the same ranks or on others, by a plan, in buckets."""

import math
import time
from collections import deque
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
from mcore_rl._ended import absence
from mcore_rl._exchange import all_gather_json, device_of
from mcore_rl._placement import Placement, RankTimeoutError
from mcore_rl._refit import WeightSink, is_divided, undivided
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
class _Bucket:
    """Weights that go together, and what of them this rank copies, receives and sends."""

    names: list[str]
    """In the order of the model."""
    where: str
    """Of all buckets, for errors."""
    own: list[WeightCopy]
    """From this rank to itself."""
    incoming: Mapping[int, "_Message"]
    """By the rank that sends it."""
    outgoing: Mapping[int, "_Message"]
    """By the rank that receives it."""


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    """What all ranks agreed on."""

    plan: RefitPlan
    buckets: list[_Bucket]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    taken: Set[str]
    """Names that this rank's engine takes."""


@dataclass(frozen=True, kw_only=True)
class _UnderWay:
    """A bucket whose messages are between the ranks."""

    bucket: _Bucket
    held: Mapping[tuple[str, Box], Tensor]
    """What this rank has of its weights."""
    device: torch.device
    transfers: list[tuple[int, Tensor, bool]]
    """Rank, buffer, and whether that is received; they are nobody else's until the works are done."""
    works: list[dist.Work]


@experimental_api
class WeightTransfer:
    """Carries weights between two layouts on the same or on disjoint ranks: each sends the boxes that others take, and none it need not.

    The plan is made at the first call, and again when a layout has changed. An engine whose ``model`` says its layout takes its own boxes;
    any other takes whole weights.

    Args:
        bucket_bytes: weights that are on their way at once, at least two; the smallest limit of any rank holds. Half of them go between the
            ranks while the other half is taken.
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
        self._under_way: deque[_UnderWay] = deque()

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
        while self._under_way:
            # Of a call whose weights were not taken to the end.
            self._finish(self._under_way.popleft(), world)
        named: dict[str, list[_Part]] = {}
        for part in parts:
            named.setdefault(part.name, []).append(part)
        # What is gathered first goes over other communicators than the messages: one after the other.
        num_ahead = 0 if any(is_divided(part.tensor) for part in parts) else 1
        for bucket in schedule.buckets:
            self._under_way.append(self._begin(bucket, named, world))
            if len(self._under_way) > num_ahead:
                yield from self._take(schedule, self._under_way.popleft(), world)
        while self._under_way:
            yield from self._take(schedule, self._under_way.popleft(), world)

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
        sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in shapes.items()}
        own = layouts[rank][1]
        return _Schedule(
            plan=plan,
            buckets=_buckets(plan, sizes, bucket_bytes // 2, dtypes, rank),
            shapes=shapes,
            dtypes=dtypes,
            taken=shapes.keys() if own is None else {name for name, _, _ in own},
        )

    def _begin(self, bucket: _Bucket, parts: Mapping[str, Sequence[_Part]], world: Group) -> _UnderWay:
        """Send what other ranks take of a bucket, and receive what this one takes; waits for nobody."""
        held = {(name, part.box): undivided(part.tensor) for name in bucket.names for part in parts.get(name, ())}
        device = next(iter(held.values())).device if held else device_of(world)
        transfers = [(peer, message.empty(device), True) for peer, message in bucket.incoming.items()]
        transfers += [(peer, message.pack(held), False) for peer, message in bucket.outgoing.items()]
        try:
            works = _start(transfers, world)
        except RuntimeError as error:
            peers = sorted({peer for peer, _, _ in transfers})
            why = absence(world, peers, "did not exchange weights", f"{bucket.where}: {error}", waited_s=0.0, timeout_s=self.timeout_s)
            raise RefitTimeoutError(why) from error
        return _UnderWay(bucket=bucket, held=held, device=device, transfers=transfers, works=works)

    def _take(self, schedule: _Schedule, under_way: _UnderWay, world: Group) -> Iterator[tuple[str, Tensor]]:
        """The weights of a bucket."""
        bucket, held = under_way.bucket, under_way.held
        full: dict[str, Tensor] = {}
        for name in bucket.names:
            if name in schedule.taken:
                # A tensor that is all of the weight needs no copy.
                shape, whole = schedule.shapes[name], held.get((name, Box.whole(schedule.shapes[name])))
                full[name] = torch.empty(shape, dtype=schedule.dtypes[name], device=under_way.device) if whole is None else whole
        for copy in bucket.own:
            if full[copy.name] is not (source := held[copy.name, copy.source]):
                full[copy.name][copy.box.slices()] = source[copy.source_slices]
        self._finish(under_way, world)
        for peer, buffer, arrives in under_way.transfers:
            if arrives:
                bucket.incoming[peer].unpack(buffer, full)
        # The memory of the messages is free for the next ones while this bucket is taken.
        under_way.transfers.clear()
        yield from full.items()

    def _finish(self, under_way: _UnderWay, world: Group) -> None:
        _finish(under_way.works, under_way.transfers, world, self.timeout_s, under_way.bucket.where)


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


def _buckets(plan: RefitPlan, sizes: Mapping[str, int], limit: int, dtypes: Mapping[str, torch.dtype], rank: int) -> list[_Bucket]:
    """All weights in buckets of at most ``limit`` bytes, or of one weight."""
    listed: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if size > room or not listed:
            listed.append([])
            room = limit
        listed[-1].append(name)
        room -= size
    copies: dict[str, list[WeightCopy]] = {name: [] for name in sizes}
    for copy in plan.copies:
        copies[copy.name].append(copy)
    buckets = []
    for number, names in enumerate(listed, 1):
        own: list[WeightCopy] = []
        incoming: dict[int, list[WeightCopy]] = {}
        outgoing: dict[int, list[WeightCopy]] = {}
        for copy in chain.from_iterable(copies[name] for name in names):
            if copy.source_rank == copy.destination_rank == rank:
                own.append(copy)
            elif copy.destination_rank == rank:
                incoming.setdefault(copy.source_rank, []).append(copy)
            elif copy.source_rank == rank:
                outgoing.setdefault(copy.destination_rank, []).append(copy)
        buckets.append(
            _Bucket(
                names=names,
                where=f"bucket {number} of {len(listed)}, from {names[0]} on",
                own=own,
                incoming={peer: _Message.of(incoming[peer], dtypes) for peer in sorted(incoming)},
                outgoing={peer: _Message.of(outgoing[peer], dtypes) for peer in sorted(outgoing)},
            )
        )
    return buckets


@dataclass(frozen=True)
class _Message:
    """What goes from one rank to another in one bucket: boxes one behind the other, as bytes."""

    places: list[tuple[WeightCopy, torch.dtype, slice]]
    """Bytes of each box."""
    num_bytes: int

    @classmethod
    def of(cls, copies: Sequence[WeightCopy], dtypes: Mapping[str, torch.dtype]) -> "_Message":
        places, end = [], 0
        for copy in copies:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + copy.box.num_elements * dtypes[copy.name].itemsize
            places.append((copy, dtypes[copy.name], slice(begin, end)))
        return cls(places, end)

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def pack(self, held: Mapping[tuple[str, Box], Tensor]) -> Tensor:
        sources = [held[copy.name, copy.source][copy.source_slices] for copy, _, _ in self.places]
        buffer = self.empty(sources[0].device)
        for (copy, dtype, span), source in zip(self.places, sources, strict=True):
            buffer[span].view(dtype).view(copy.box.shape).copy_(source)
        return buffer

    def unpack(self, buffer: Tensor, full: Mapping[str, Tensor]) -> None:
        for copy, dtype, span in self.places:
            full[copy.name][copy.box.slices()] = buffer[span].view(dtype).view(copy.box.shape)


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
    begin = time.monotonic()
    for number, work in enumerate(works):
        # One handle a transfer, or one for the whole batch.
        waited = transfers[number : number + 1] if len(works) == len(transfers) else transfers
        try:
            _wait(work, begin + timeout_s, waited[0][1].device)
        except (RuntimeError, TimeoutError) as error:
            peers = sorted({peer for peer, _, _ in waited})
            what = f"did not {'send' if waited[0][2] else 'take'} weights"
            waited_s = time.monotonic() - begin
            raise RefitTimeoutError(absence(world, peers, what, f"{where}: {error}", waited_s=waited_s, timeout_s=timeout_s)) from error


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
