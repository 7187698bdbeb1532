# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights from the ranks of a trained model to engines on the same ranks or on others, by a plan, in buckets."""

import contextlib
import functools
import inspect
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_ckpt.chunks import Box
from mcore_parallel import Group, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import uses_nccl
from mcore_parallel.training import model_state
from mcore_rl._ranks._ended import absence, ended
from mcore_rl._ranks._exchange import all_gather_json, device_of
from mcore_rl._ranks._placement import Placement, RankTimeoutError, half_names, hang_up
from mcore_rl._ranks._rendezvous import meet, withdraw
from mcore_rl._refit._ipc import NeighbourError, Neighbours, listening
from mcore_rl._refit._message import WeightMessage
from mcore_rl._refit._plan import RefitPlan
from mcore_rl._refit._refit import WeightSink, check_formats, is_divided, undivided
from mcore_rl._refit._schedule import Bucket, Schedule
from mcore_rl._refit._shared_memory import place_of
from mcore_rl._refit._whole_weights import WholeWeights
from mcore_rl._stability import experimental_api

_Result = TypeVar("_Result")

_POLL_S = 2e-4
_LOOK_S = 1.0
"""Between two looks whether those who are waited for live."""
_DISCONNECTED = "mcore_rl disconnected"
"""In the store of a world: two or more ranks between which no further transfer goes."""


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
class _UnderWay:
    """A bucket whose messages are between the ranks."""

    bucket: Bucket
    held: Mapping[tuple[str, Box], Tensor]
    """What this rank has of its weights."""
    is_gathered: bool
    """Whether some of that was gathered for it, and goes with it."""
    transfers: list[tuple[int, Tensor, bool]]
    """Rank, buffer, and whether that is received; they are nobody else's until the works are done. None of neighbours."""
    works: list[dist.Work]


@experimental_api
class WeightTransfer:
    """Carries weights between two layouts on the same or on disjoint ranks: each sends the boxes that others take, and none it need not.

    The plan is made at the first call, and again when a layout has changed. An engine whose ``model`` says its layout takes slices of its
    own boxes, which it copies as they come; any other takes whole weights.

    Processes of one machine and one device hand weights over in memory that both map (CUDA IPC on a GPU), others by the world's
    collectives. NCCL has no two ranks of one GPU: their world has the backend "cpu:gloo,cuda:nccl".

    Args:
        bucket_bytes: memory of weights that are on their way, on each rank; the smallest limit of any rank holds. Half of them go between
            the ranks while the other half is taken, and larger weights go in several buckets. Whole weights take their own memory beside
            it, and so do those that are gathered from shards: the ones with a part in two buckets that follow each other, at most.
        timeout_s: limit of waiting for all ranks to come, and of each bucket; after it the rank that is waited for is named.

    Raises:
        ValueError: a number that is not positive and finite.
    """

    def __init__(self, *, bucket_bytes: int = 1 << 28, timeout_s: float = 600.0) -> None:
        if bucket_bytes < 1 or not 0 < timeout_s < math.inf:
            raise ValueError(f"bucket_bytes={bucket_bytes} and timeout_s={timeout_s} must be positive and finite")
        self.bucket_bytes, self.timeout_s = bucket_bytes, timeout_s
        self._layout: list[Any] | None = None
        self._schedule: Schedule | None = None
        self._under_way: deque[_UnderWay] = deque()
        self._neighbours: Neighbours | None = None
        self._wire = torch.device("cpu")

    @property
    def plan(self) -> RefitPlan | None:
        """Of the last call; None before the first."""
        return None if self._schedule is None else self._schedule.plan

    @property
    def ipc_peers(self) -> frozenset[int]:
        """Ranks of the world with which the last call exchanged weights in memory that both map."""
        return frozenset() if self._neighbours is None else self._neighbours.peers

    def weights(
        self, model: nn.Module | None, groups: ProcessGroups | None, engine: object, *, placement: Placement | None = None
    ) -> Iterator[tuple[str, Any]]:
        """Every weight that this rank's engine takes, by its name: a tensor of the global shape, or `mcore_inference.WeightSlice`s where
        the engine's ``model`` says its layout.

        The engine copies slices up to one that ends a buffer before it asks for the next one. All ranks of ``groups.world``, or of
        ``placement.world``, consume it together.

        Args:
            model: the trained model; parameters may be DTensors, between two steps. None on a rank that only serves.
            groups: its layout; None with the model.
            engine: what takes the weights; None on a rank that only trains, on which nothing comes.
            placement: where trainer and engines have ranks of their own; None when each rank has both.

        Raises:
            ValueError: a rank without a model or an engine, and no placement; a weight of the model is kept in eight bits with scales.
            RefitPlanError: the model and the engine have not the same weights; on every rank.
            RefitTimeoutError: a rank did not come within ``timeout_s``.
        """
        if placement is None and (model is None or groups is None or engine is None):
            raise ValueError("model, groups and engine may be None only where ranks train or serve; pass placement=Placement.split(plan)")
        try:
            yield from self._weights(model, groups, engine, placement)
        except Exception:
            # Ranks may have come unequally far: they begin anew.
            self._layout = None
            raise

    def _weights(
        self, model: nn.Module | None, groups: ProcessGroups | None, engine: object, placement: Placement | None
    ) -> Iterator[tuple[str, Any]]:
        world = placement.world if placement is not None else cast(ProcessGroups, groups).world
        try:
            _check_connected(world)
            parts = [] if model is None or groups is None else _parts(model, groups)
            check_formats((part.name, part.tensor.dtype) for part in parts)
            device, taken = _device(parts, engine, world), _taken(engine)
        except Exception as error:
            _withdraw(world, placement, error, self.timeout_s)
            raise
        self._meet(world, placement)
        try:
            schedule, neighbours = self._agreed(parts, taken, world, device)
        except RuntimeError as error:
            # All have come: what fails among them is a connection.
            gone = ended(world, range(world.size), wait_s=1.0)
            names = " and ".join(f"rank {world.ranks[place]}" for place in gone)
            lost = f"{names} died, no process is left" if gone else "ranks lost each other"
            raise RefitTimeoutError(f"{lost} (weights: {error})") from error
        while self._under_way:
            # Of a call whose weights were not taken to the end.
            self._finish(world)
        named: dict[str, list[_Part]] = {}
        for part in parts:
            named.setdefault(part.name, []).append(part)
        turn = neighbours.next_turn()
        try:
            self._with_neighbours(world, "the first bucket", neighbours.open, schedule.largest, schedule.limit, self.timeout_s)
            yield from self._carry(schedule, named, world, device, neighbours)
            self._with_neighbours(world, "the last bucket", neighbours.close, self.timeout_s)
        finally:
            neighbours.give_up(turn)

    def _carry(
        self, schedule: Schedule, named: Mapping[str, Sequence[_Part]], world: Group, device: torch.device, neighbours: Neighbours
    ) -> Iterator[tuple[str, Any]]:
        """All buckets, one ahead of the other."""
        # What is gathered first goes over other communicators than the messages: one after the other.
        divided = {name for name, parts in named.items() if any(is_divided(part.tensor) for part in parts)}
        num_ahead = 0 if divided else 1
        whole = None if schedule.takes_slices else WholeWeights(schedule, device)
        held: Mapping[tuple[str, Box], Tensor] = {}
        for bucket in schedule.buckets:
            held = _held(bucket, named, held)
            self._under_way.append(self._begin(bucket, held, not divided.isdisjoint(bucket.names), world, neighbours))
            if len(self._under_way) > num_ahead:
                yield from self._take(whole, self._under_way[0], world, neighbours)
        while self._under_way:
            yield from self._take(whole, self._under_way[0], world, neighbours)

    def _meet(self, world: Group, placement: Placement | None) -> None:
        """All ranks are there on all ranks, or on none."""
        names = _names(placement)
        try:
            if placement is not None:
                try:
                    # It tells of ranks of other machines that died.
                    placement.gather(None, self.timeout_s, "weights")
                except Exception as error:
                    withdraw(world, "weights", error, names=names)
                    raise
            meet(world, self.timeout_s, "weights", names=names)
        except RankTimeoutError as error:
            raise RefitTimeoutError(str(error)) from error

    def _agreed(self, parts: Sequence[_Part], taken: list[Any] | None, world: Group, device: torch.device) -> tuple[Schedule, Neighbours]:
        """The schedule of these layouts and who is beside this rank, made anew where any rank's layout or device has changed."""
        listing = [[part.name, part.shape, part.box.to_json(), str(part.tensor.dtype).removeprefix("torch.")] for part in parts]
        place = place_of(device)
        layout = [listing, taken, place]
        # In a world of two backends the layouts go over the host's.
        control_device = device if device.type == device_of(world).type else device_of(world)
        changed = all_reduce(torch.tensor([float(layout != self._layout)], device=control_device), world, op="max")
        if self._schedule is None or self._neighbours is None or changed.item():
            if self._neighbours is not None:
                self._neighbours.disconnect()
                self._neighbours = None
            with listening(place if world.size > 1 else None) as listener:
                # Ranks that cut their buckets otherwise would wait for messages that nobody sends.
                gathered = all_gather_json([layout, self.bucket_bytes, listener.address], world, control_device)
                layouts, limits, addresses = zip(*gathered, strict=True)
                self._schedule = Schedule.of(layouts, world.rank, min(limits) // 2)
                self._wire = _wire(world, device, [place for _, _, place in layouts])
                buckets = self._schedule.buckets
                where: dict[str, Any] = {"world": world, "device": device, "control_device": control_device, "timeout_s": self.timeout_s}
                self._neighbours = self._with_neighbours(
                    world,
                    "weights",
                    functools.partial(listener.connect, **where),
                    addresses,
                    {rank for bucket in buckets for rank in bucket.outgoing},
                    {rank for bucket in buckets for rank in bucket.incoming},
                )
            self._layout = layout
        return self._schedule, self._neighbours

    def _begin(
        self, bucket: Bucket, held: Mapping[tuple[str, Box], Tensor], is_gathered: bool, world: Group, neighbours: Neighbours
    ) -> _UnderWay:
        """Send what ranks of other devices take of a bucket, and receive what this one takes of them; waits for nobody."""
        transfers = [(peer, message.empty(self._wire), True) for peer, message in bucket.incoming.items() if peer not in neighbours.sources]
        for peer, message in bucket.outgoing.items():
            if peer not in neighbours.destinations:
                buffer = message.empty(next(iter(held.values())).device)
                message.pack(held, buffer)
                transfers.append((peer, buffer.to(self._wire), False))
        try:
            works = _start(transfers, world)
        except RuntimeError as error:
            peers = sorted({peer for peer, _, _ in transfers})
            why = absence(world, peers, "did not exchange weights", f"{bucket.where}: {error}", waited_s=0.0, timeout_s=self.timeout_s)
            _disconnected(world, peers, self._wire)
            raise RefitTimeoutError(why) from error
        return _UnderWay(bucket=bucket, held=held, is_gathered=is_gathered, transfers=transfers, works=works)

    def _take(self, whole: WholeWeights | None, under_way: _UnderWay, world: Group, neighbours: Neighbours) -> Iterator[tuple[str, Any]]:
        """The weights of a bucket: slices where they are, or those that are whole with it."""
        if whole is not None:
            boxes = ((name, box, tensor) for name, box, tensor, _ in self._arrivals(under_way, world, neighbours))
            yield from whole.take(under_way.bucket.names, under_way.held, boxes)
            return
        # Engines that take no slices need not be of this project.
        from mcore_inference import WeightSlice

        for name, box, tensor, ends_buffer in self._arrivals(under_way, world, neighbours):
            yield name, WeightSlice(tensor=tensor, offsets=box.offset, ends_buffer=ends_buffer)
            if ends_buffer:
                # Who still has the slice, as a loop has its last item, keeps no memory of others mapped by it.
                cast(Any, tensor).set_()

    def _arrivals(self, under_way: _UnderWay, world: Group, neighbours: Neighbours) -> Iterator[tuple[str, Box, Tensor, bool]]:
        """Name, box and value of what this rank takes of a bucket, and whether its memory and that of those before it is another's, or let
        go, once the next one is asked for."""
        bucket, held = under_way.bucket, under_way.held
        for number, copy in enumerate(bucket.own, 1):
            # An engine that kept slices of gathered weights would hold all of these.
            ends_buffer = under_way.is_gathered and number == len(bucket.own)
            yield copy.name, copy.box, held[copy.name, copy.source][copy.source_slices], ends_buffer
        # Who stops before leaves it to the next call.
        self._finish(world)
        while under_way.transfers:
            # Its memory is free for the next messages.
            peer, buffer, arrives = under_way.transfers.pop()
            if arrives:
                yield from _boxes(bucket.incoming[peer], buffer)
        outgoing = {peer: message for peer, message in bucket.outgoing.items() if peer in neighbours.destinations}
        incoming = {peer: message for peer, message in bucket.incoming.items() if peer in neighbours.sources}
        parts = neighbours.exchange(outgoing, incoming, held, self.timeout_s)
        while (part := self._with_neighbours(world, bucket.where, cast(Any, next), parts, None)) is not None:
            yield from _boxes(*part)

    def _finish(self, world: Group) -> None:
        """Wait for the messages of the eldest bucket that is under way, which then is not."""
        under_way = self._under_way.popleft()
        _finish(under_way.works, under_way.transfers, world, self.timeout_s, under_way.bucket.where)

    def _with_neighbours(self, world: Group, where: str, work: Callable[..., _Result], *inputs: Any) -> _Result:
        """What they do together; that one did not do its part is an error of a refit. (A context manager would keep the error in a cycle,
        and the bucket with it.)"""
        try:
            return work(*inputs)
        except NeighbourError as error:
            if error.gave_up:
                raise RefitTimeoutError(_gave_up(world, error.ranks, where)) from error
            why = absence(world, error.ranks, error.what, where, waited_s=error.waited_s, timeout_s=self.timeout_s)
            raise RefitTimeoutError(why) from error


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

    Raises:
        RefitPlanError, RefitTimeoutError: as of ``WeightTransfer.weights``. Of unequal limits the shortest holds on all ranks until all are
            there; the engines keep their weights then, and the next call begins anew. Who gives up between two buckets ends the call of its
            neighbours at once, and of others within their limit; engines are left as they leave a load that raised (see their
            ``load_weights``). Where that closed a connection, every later call of these ranks is refused: start them anew.
    """
    transfer = transfer or WeightTransfer()
    weights = transfer.weights(model, groups, engine, placement=placement)
    if engine is None:
        for _ in weights:
            raise AssertionError("weights came to a rank without an engine")
    elif placement is None and groups is None:
        engine.load_weights(weights)
    else:
        world = placement.world if placement is not None else cast(ProcessGroups, groups).world
        take_over(engine.load_weights, weights, world, placement, transfer.timeout_s)


def take_over(
    load: Callable[[Iterator[tuple[str, Any]]], None],
    weights: Iterator[tuple[str, Any]],
    world: Group,
    placement: Placement | None,
    timeout_s: float,
) -> None:
    """Load weights of a `WeightTransfer`; where that fails, tell those who wait for this rank.

    Args:
        load: takes them.
        weights: of ``WeightTransfer.weights``.
        world: all ranks that consume them together.
        placement: as of ``WeightTransfer.weights``.
        timeout_s: that of the transfer.
    """
    stream = cast(Any, weights)
    try:
        load(weights)
    except BaseException as error:
        if inspect.getgeneratorstate(stream) == inspect.GEN_CREATED:
            # It was refused before any was asked for.
            _withdraw(world, placement, error, timeout_s)
        # The error may keep it, and those who are in the middle of it with this rank hear only then that it is given up. One that another
        # thread is in the middle of cannot be closed here.
        if inspect.getgeneratorstate(stream) != inspect.GEN_RUNNING:
            stream.close()
        raise


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


def _held(bucket: Bucket, parts: Mapping[str, Sequence[_Part]], before: Mapping[tuple[str, Box], Tensor]) -> dict[tuple[str, Box], Tensor]:
    """What this rank has of the weights of a bucket; a weight that goes in several is gathered once.

    Args:
        bucket: the next one.
        parts: of this rank, by weight.
        before: of the bucket before.
    """
    keys = {(name, part.box): part.tensor for name in bucket.names for part in parts.get(name, ())}
    return {key: before[key] if key in before else undivided(tensor) for key, tensor in keys.items()}


def _device(parts: Sequence[_Part], engine: object, world: Group) -> torch.device:
    """Of the weights on this rank."""
    if parts:
        return parts[0].tensor.device
    model = getattr(engine, "model", None)
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return device_of(world) if first is None else first.device


def _wire(world: Group, device: torch.device, places: Sequence[list[str] | None]) -> torch.device:
    """Where tensors must be to go over a world: on the GPUs where NCCL can connect them, which it cannot where ranks share one."""
    gpus = {place[1] for place in places if place is not None and place[1] != "cpu"}
    connected = device.type == "cuda" and len(gpus) == world.size > 1 and uses_nccl(world.pg)
    return device if connected else device_of(world)


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


def _boxes(message: WeightMessage, buffer: Tensor) -> Iterator[tuple[str, Box, Tensor, bool]]:
    """What is in a buffer, and whether it is the last of it."""
    for number, (name, box, tensor) in enumerate(message.unpack(buffer), 1):
        yield name, box, tensor, number == len(message.places)


def _start(transfers: Sequence[tuple[int, Tensor, bool]], world: Group) -> list[dist.Work]:
    operations = [
        dist.P2POp(dist.irecv if arrives else dist.isend, buffer, world.ranks[peer], world.pg) for peer, buffer, arrives in transfers
    ]
    return list(dist.batch_isend_irecv(operations)) if operations else []


def _names(placement: Placement | None) -> Sequence[str]:
    return () if placement is None else half_names(placement)


def _withdraw(world: Group, placement: Placement | None, error: BaseException, timeout_s: float) -> None:
    withdraw(world, "weights", error, names=_names(placement))
    if placement is not None and isinstance(error, Exception):
        # They wait for this rank there before they look at what it withdrew from.
        with contextlib.suppress(RankTimeoutError):
            placement.gather(None, timeout_s, "weights")


def _gave_up(world: Group, places: Sequence[int], where: str) -> str:
    names = " and ".join(f"rank {world.ranks[place]}" for place in places)
    return f"{names} gave up ({where}); look at the log of that rank"


def _disconnected(world: Group, peers: Sequence[int], wire: torch.device) -> None:
    """For all ranks of the world: between this one and its peers a transfer was given up, and what comes next might take its bytes."""
    if world.pg is not None:
        # The store may be gone with the rank that kept it.
        with contextlib.suppress(RuntimeError):
            world.pg.get_group_store().compare_set(_DISCONNECTED, "", json.dumps([world.rank, *peers]))
        if wire.type == "cpu":
            # The others would wait for this rank in a transfer, or a collective, that it does not come to.
            hang_up(world, [peer for peer in range(world.size) if peer != world.rank and peer not in peers])


def _check_connected(world: Group) -> None:
    """Raises:
    RefitTimeoutError: a transfer between ranks of this world was given up.
    """
    if world.pg is None:
        return
    try:
        if not (store := world.pg.get_group_store()).check([_DISCONNECTED]):
            return
        places = json.loads(store.get(_DISCONNECTED))
    except dist.DistError:
        # It is gone with the rank that kept it, which those who wait for it name.
        return
    first, *peers = (f"rank {world.ranks[place]}" for place in places)
    raise RefitTimeoutError(
        f"{first} gave up a transfer with {' and '.join(peers)} and with it the connection between them; start the ranks anew, with a "
        "longer timeout_s"
    )


def _finish(works: Sequence[dist.Work], transfers: Sequence[tuple[int, Tensor, bool]], world: Group, timeout_s: float, where: str) -> None:
    """Wait for all, within one limit.

    Raises:
        RefitTimeoutError: names those that were waited for.
    """
    begin = time.monotonic()
    for number, work in enumerate(works):
        # One handle a transfer, or one for the whole batch.
        waited = transfers[number : number + 1] if len(works) == len(transfers) else transfers
        peers = sorted({peer for peer, _, _ in waited})
        what = f"did not {'send' if waited[0][2] else 'take'} weights"
        try:
            gone = _wait(work, begin + timeout_s, waited[0][1].device, world, peers)
        except RefitTimeoutError:
            raise
        except (RuntimeError, TimeoutError) as error:
            waited_s = time.monotonic() - begin
            _disconnected(world, peers, waited[0][1].device)
            raise RefitTimeoutError(absence(world, peers, what, f"{where}: {error}", waited_s=waited_s, timeout_s=timeout_s)) from error
        if gone:
            waited_s = time.monotonic() - begin
            raise RefitTimeoutError(absence(world, gone, what, where, waited_s=waited_s, timeout_s=timeout_s))


def _wait(work: dist.Work, end: float, device: torch.device, world: Group, peers: Sequence[int]) -> Sequence[int]:
    """Until the work is done, or ``peers`` that it is of died: those that did."""
    if device.type == "cpu":
        # A host transfer tells that it is over only to who waits, and fails when a connection is closed.
        work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
        return ()
    look = time.monotonic() + _LOOK_S
    while not work.is_completed():
        now = time.monotonic()
        if now > end:
            raise TimeoutError("the transfer is still under way")
        if now > look:
            # A device goes on waiting for a process that is gone, or gave up.
            _check_connected(world)
            if gone := ended(world, peers):
                return gone
            look = now + _LOOK_S
        time.sleep(_POLL_S)
    work.wait()
    return ()
