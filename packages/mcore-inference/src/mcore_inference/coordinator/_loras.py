# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters of all engines: a load or its opposite takes effect on all of them or on none, and engines that come later catch up."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from mcore_inference.coordinator._config import CoordinatorConfig
from mcore_inference.coordinator._entries import Engine, Lora, LoraChange, drop_load
from mcore_inference.coordinator._group import Group
from mcore_inference.coordinator._lora_answers import LoraFault, fault
from mcore_inference.coordinator._messages import (
    GREETING_BYTES,
    MAX_LORAS,
    LoadLora,
    Refusal,
    SignalAck,
    UnloadLora,
    WeightAck,
    WeightBucket,
    WireChunk,
)
from mcore_inference.coordinator._open_requests import OpenRequests
from mcore_inference.coordinator._operations import BUCKET_BYTES
from mcore_inference.coordinator._states import GroupState, MemberState

_MAX_WAITING = 1024
"""Calls that wait for the one in progress."""
_MAX_BYTES = 64 * 2**30
"""Of all adapters, which are kept for engines that come later."""
_CHUNK_BYTES, _INDEX_BYTES = 512, 32
"""Of host memory that a chunk takes beside its texts and data, and a number of its shape or offsets."""
_LOAD_BYTES = 64
"""Of the name of a load, at most."""
_IN_USE = fault("LoraInUseError", "")
"""Begins the error of an engine whose requests use an adapter."""
_NO_ENGINE = "there is no engine that could have adapters"
_MAX_UNFIT = 256
"""Workers that are remembered to lack an adapter."""


@dataclass(kw_only=True)
class _Call:
    """Of a client, in progress."""

    client: bytes
    call: int
    lora: Lora
    loads: bool
    """Else it unloads."""
    deadline: float
    """Of the client, while its buckets come."""
    is_whole: bool = False
    """Whether engines have begun."""
    index: int = 0
    waiting: set[bytes] = field(default_factory=set)
    failed: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    """Engines that refused, with their names and errors."""
    lost: list[str] = field(default_factory=list)

    @property
    def reasons(self) -> str:
        return "; ".join(sorted([*(f"{name}: {error}" for name, error in self.failed.values()), *self.lost]))


class Loras:
    """Leads every engine to the adapters of the group, one change at a time, and answers clients that change these.

    Adapters are kept here, by buckets as they came, so that an engine that is started again gets them. Requests may name an adapter once
    all engines have it, and an engine gets requests once it has all adapters.

    Args:
        group: whose engines have them.
        requests: that use them.
        config: time-outs and sizes.
        seed: begins the names of loads, which no other coordinator has given.
    """

    def __init__(self, group: Group, requests: OpenRequests, config: CoordinatorConfig, *, seed: int) -> None:
        self._group, self._requests, self._config, self._seed = group, requests, config, seed
        self._call: _Call | None = None
        self._waiting: deque[tuple[bytes, LoadLora | UnloadLora]] = deque()
        self._is_beginning = False
        """Whether one of those that waited is looked at: the next comes behind it, not within it."""
        self._unfit: OrderedDict[str, tuple[str, str]] = OrderedDict()
        """By worker: the load that it could not take, and why."""

    # -- clients -----------------------------------------------------------------------------------------------------

    def add(self, client: bytes, message: LoadLora | UnloadLora, now: float) -> None:
        """What a client asks for, behind what was asked for before."""
        if len(self._waiting) >= _MAX_WAITING:
            self._group.send(client, Refusal(call=message.call, message=f"{_MAX_WAITING} changes of adapters wait already"))
            return
        self._waiting.append((client, message))
        self._begin_next(now)

    def takes(self, client: bytes, number: int) -> bool:
        """Whether a bucket is of the adapter that a client sends."""
        call = self._call
        return call is not None and call.loads and (call.client, call.call) == (client, number)

    def drop_waiting(self, client: bytes, number: int) -> bool:
        """Whether a load whose client has given it up waited, and waits no more."""
        return drop_load(self._waiting, LoadLora, client, number)

    def take_bucket(self, bucket: WeightBucket, now: float) -> None:
        """A part of the adapter whose client ``takes`` knows."""
        group, call = self._group, self._call
        assert call is not None, "the bucket is of it"
        lora = call.lora
        if call.is_whole or (bucket.end != "aborted" and bucket.index != call.index + 1):
            text = f"bucket {bucket.index} came instead of {call.index + 1}, or behind the last one"
            group.send(call.client, Refusal(call=call.call, message=text))
            return
        if bucket.end == "aborted":
            self._end(now)
            return
        is_empty = not bucket.chunks and bucket.end != "whole"
        if is_empty or not all(chunk.data for chunk in bucket.chunks):
            # Such would take memory here, and bring nothing.
            self._refuse(f"bucket {bucket.index} or a chunk of it is empty", now)
            return
        call.index = bucket.index
        lora.buckets.append(bucket.chunks)
        lora.num_bytes += sum(map(_size, bucket.chunks))
        if (size := lora.num_bytes + sum(other.num_bytes for other in group.loras.values())) > _MAX_BYTES:
            self._refuse(f"adapters of {size} bytes are more than the {_MAX_BYTES} that are kept; unload one", now)
        elif bucket.end != "whole":
            call.deadline = now + self._config.load_timeout_s
            group.send(call.client, WeightAck(call=call.call, index=call.index, bucket_bytes=self._bucket_bytes))
        else:
            self._reach_engines(call, now)

    def forget_client(self, peer: bytes, now: float) -> None:
        """A client is gone, and with it the adapter of which it had not sent everything; what engines have begun they end."""
        if self._call is not None and self._call.client == peer and not self._call.is_whole:
            self._end(now)

    def late(self, now: float) -> list[tuple[bytes, str]]:
        """Engines that did not answer in time, each with what is to be said of it; a client that is late is given up."""
        call = self._call
        if call is not None and not call.is_whole and now > call.deadline:
            self._refuse(f"the client sent no weights for {self._config.load_timeout_s:g} s", now)
        elif call is not None and (stopped := call.waiting - self._group.engines.keys()):
            call.waiting -= stopped
            call.lost.append("the engines were stopped")
        self._settle(now)
        self._put_off(now)
        return [
            (peer, f"it did not answer {change.call} of {change.name!r} within {self._timeout_s(change):g} s")
            for peer, engine in sorted(self._group.engines.items())
            if (change := engine.change) is not None and now > change.deadline
        ]

    def _put_off(self, now: float) -> None:
        """Engines that take weights, which is one call of their threads, change adapters behind them: their time begins then."""
        operation = self._group.operation
        for peer in () if operation is None or operation.load is None else operation.load.engines:
            if (change := self._group.engines[peer].change) is not None:
                change.deadline = now + self._timeout_s(change)

    def _begin_next(self, now: float) -> None:
        """Begin what waits until something has to wait for buckets or engines."""
        if self._is_beginning:
            return
        self._is_beginning = True
        while self._waiting and self._call is None:
            client, message = self._waiting.popleft()
            if client not in self._group.clients:
                continue
            if self._group.state is GroupState.STOPPED:
                self._group.send(client, Refusal(call=message.call, message="the engines are stopped"))
            elif not self._group.serving:
                self._group.send(client, Refusal(call=message.call, message=_NO_ENGINE))
            elif isinstance(message, LoadLora):
                self._begin_load(client, message, now)
            else:
                self._begin_unload(client, message, now)
        self._is_beginning = False

    def _begin_load(self, client: bytes, message: LoadLora, now: float) -> None:
        loras, number = self._group.loras, self._group.next_number()
        if message.name in loras:
            self._answer(client, message, "LoraLoadError", "is loaded; unload it first, or load under another name")
        elif len(loras) >= MAX_LORAS:
            self._answer(client, message, "LoraLoadError", f"is one more than the {MAX_LORAS} that a coordinator has; unload one")
        elif sum(len(name.encode()) + _LOAD_BYTES for name in (*loras, message.name)) > GREETING_BYTES // 2:
            # Engines that register name all of theirs.
            text = f"is the last of {len(loras) + 1} names that are too long together; give shorter ones"
            self._answer(client, message, "LoraLoadError", text)
        else:
            lora = Lora(name=message.name, load=f"{self._seed:x}-{number:x}", rank=message.rank, alpha=message.alpha)
            self._call = _Call(client=client, call=message.call, lora=lora, loads=True, deadline=now + self._config.load_timeout_s)
            self._group.send(client, WeightAck(call=message.call, index=0, bucket_bytes=self._bucket_bytes))

    def _begin_unload(self, client: bytes, message: UnloadLora, now: float) -> None:
        lora = self._group.loras.get(message.name)
        if lora is None:
            self._answer(client, message, "UnknownLoraError", f"is not loaded; {self._group.loaded_loras}")
        elif (count := self._requests.num_using(message.name)) > 0:
            self._answer(client, message, "LoraInUseError", f"is used by {count} requests; unload it when they have ended")
        else:
            # From here on no request may name it.
            del self._group.loras[message.name]
            self._call = _Call(client=client, call=message.call, lora=lora, loads=False, deadline=now)
            self._reach_engines(self._call, now)

    def _answer(self, client: bytes, message: LoadLora | UnloadLora, kind: LoraFault, text: str) -> None:
        """Refuse what cannot begin."""
        error = fault(kind, f"lora={message.name!r} {text}")
        self._group.send(client, WeightAck(call=message.call, index=0, error=error, is_over=True))

    def _reach_engines(self, call: _Call, now: float) -> None:
        call.is_whole = True
        call.waiting = set(self._group.serving)
        if not call.waiting:
            self._group.send(call.client, Refusal(call=call.call, message=_NO_ENGINE))
            self._end(now)
        else:
            self._lead_all(now)

    # -- engines -----------------------------------------------------------------------------------------------------

    def refusal(self, worker: str) -> str | None:
        """Why the engine of a worker may not join: it could not take an adapter of the group; None when it may."""
        load, reason = self._unfit.get(worker, ("", ""))
        return reason if any(lora.load == load for lora in self._group.loras.values()) else None

    def add_engine(self, peer: bytes, now: float) -> None:
        """One has joined, with the adapters that it says."""
        self._lead(peer, now)
        self._settle(now)

    def weights_taken(self, peer: bytes, engine: Engine, message: WeightAck, now: float) -> str | None:
        """An engine has a bucket of an adapter, or all of it, or says why not.

        Returns:
            Why it cannot go on; None while it can.
        """
        change = engine.change
        if change is None or change.lora is None or (change.number, change.index) != (message.call, message.index):
            return None
        if not message.error and change.index < len(change.lora.buckets):
            change.index += 1
            change.deadline = now + self._timeout_s(change)
            end = "whole" if change.index == len(change.lora.buckets) else ""
            chunks = change.lora.buckets[change.index - 1]
            self._group.send(peer, WeightBucket(call=change.number, index=change.index, chunks=chunks, end=end))
            return None
        return self._changed(peer, engine, message.error, now)

    def acknowledge(self, peer: bytes, engine: Engine, message: SignalAck, now: float) -> tuple[bool, str | None]:
        """Whether it is of an adapter that an engine was to forget, and why the engine cannot go on."""
        change = engine.change
        if change is None or change.lora is not None or change.number != message.call:
            return False, None
        return True, self._changed(peer, engine, message.error, now)

    def lose(self, peer: bytes, engine: Engine, reason: str, now: float, *, is_drained: bool) -> None:
        """An engine is gone, and nobody waits for it."""
        call = self._call
        if call is not None and peer in call.waiting:
            call.waiting.discard(peer)
            if not is_drained:
                call.lost.append(f"{engine.name}: {reason}")
        self._settle(now)

    def _changed(self, peer: bytes, engine: Engine, error: str, now: float) -> str | None:
        """The change of an engine is over."""
        change, call = engine.change, self._call
        assert change is not None, "it is acknowledged"
        engine.change = None
        if not error:
            if change.lora is None:
                engine.loras.pop(change.name, None)
            else:
                engine.loras[change.name] = change.load
        is_of_call = call is not None and peer in call.waiting and (call.lora.load, call.loads) == (change.load, change.lora is not None)
        if call is not None and is_of_call:
            call.waiting.discard(peer)
            if error:
                call.failed[peer] = engine.name, error
        elif error and engine.state is MemberState.SERVING:
            if change.lora is not None and engine.worker:
                self._unfit[engine.worker] = change.load, f"it cannot take the adapter {change.name!r} that other engines have: {error}"
                if len(self._unfit) > _MAX_UNFIT:
                    self._unfit.popitem(last=False)
            return f"{change.call} of {change.name!r} failed there: {error}"
        if call is None or peer not in call.failed:
            self._lead(peer, now)
        self._settle(now)
        # An engine that has all adapters now takes requests that waited for one.
        self._requests.route_homeless(now)
        return None

    def _lead_all(self, now: float) -> None:
        for peer in list(self._group.serving):
            self._lead(peer, now)
        self._settle(now)

    def _lead(self, peer: bytes, now: float) -> None:
        """Begin the next change that brings an engine to the adapters that it is to have: first what it is to forget."""
        engine, call = self._group.engines[peer], self._call
        if engine.change is not None or engine.state is not MemberState.SERVING:
            return
        wanted = dict(self._group.loras)
        if call is not None and call.loads and call.is_whole and peer not in call.failed:
            wanted[call.lora.name] = call.lora
        for name, load in engine.loras.items():
            if name not in wanted or wanted[name].load != load:
                number = self._group.next_number()
                engine.change = LoraChange(name=name, load=load, lora=None, number=number, deadline=now + self._config.signal_timeout_s)
                self._group.send(peer, UnloadLora(call=number, name=name, load=load))
                return
        for name, lora in wanted.items():
            if name not in engine.loras:
                number = self._group.next_number()
                engine.change = LoraChange(name=name, load=lora.load, lora=lora, number=number, deadline=now + self._config.load_timeout_s)
                self._group.send(peer, LoadLora(call=number, name=name, rank=lora.rank, alpha=lora.alpha, load=lora.load))
                return
        if call is not None and call.is_whole and not call.loads:
            # It had nothing to forget.
            call.waiting.discard(peer)

    def _settle(self, now: float) -> None:
        """End the call in progress once no engine is waited for; one that drains is told nothing more."""
        group, call = self._group, self._call
        if call is None or not call.is_whole:
            return
        engines = group.engines
        call.waiting -= {peer for peer in call.waiting & engines.keys() if engines[peer].change is None and peer not in group.serving}
        if call.waiting:
            return
        name, number = call.lora.name, call.call
        if (call.loads and not call.reasons) or (not call.loads and call.failed):
            group.loras[name] = call.lora
        if call.loads and call.failed:
            error = fault("LoraLoadError", f"no engine has lora={name!r} ({call.reasons})")
            group.send(call.client, WeightAck(call=number, index=call.index, error=error, is_over=True))
        elif call.loads and call.lost:
            # The adapter is not to blame, and may be loaded when they are back.
            group.send(call.client, Refusal(call=number, message=f"no engine has lora={name!r} ({call.reasons})"))
        elif call.failed:
            text = f"all engines keep lora={name!r} ({call.reasons})"
            if all(error.startswith(_IN_USE) for _, error in call.failed.values()):
                group.send(call.client, WeightAck(call=number, index=0, error=fault("LoraInUseError", text), is_over=True))
            else:
                group.send(call.client, Refusal(call=number, message=f"unload_lora failed, and {text}"))
        elif call.lost:
            text = f"unload_lora took effect without engines that were lost ({call.reasons})"
            group.send(call.client, Refusal(call=number, message=text))
        else:
            group.send(call.client, WeightAck(call=number, index=call.index, is_over=True))
        self._end(now)

    def _refuse(self, reason: str, now: float) -> None:
        """End a load that no engine has begun."""
        call = self._call
        assert call is not None, "it is in progress"
        error = fault("LoraLoadError", reason)
        self._group.send(call.client, WeightAck(call=call.call, index=call.index, error=error, is_over=True))
        self._end(now)

    def _end(self, now: float) -> None:
        """Of the call; engines that are not what the group is by it are led back."""
        self._call = None
        self._lead_all(now)
        # Some engines may lack an adapter that is no longer theirs to have.
        self._requests.route_homeless(now)
        self._begin_next(now)

    def _timeout_s(self, change: LoraChange) -> float:
        return self._config.signal_timeout_s if change.lora is None else self._config.load_timeout_s

    @property
    def _bucket_bytes(self) -> int:
        return min(BUCKET_BYTES, self._config.max_message_bytes // 2)


def _size(chunk: WireChunk) -> int:
    """Bytes of host memory, about."""
    indices = len(chunk.shape) + len(chunk.offsets or ())
    return len(chunk.data) + len(chunk.name) + len(chunk.dtype) + _CHUNK_BYTES + _INDEX_BYTES * indices
