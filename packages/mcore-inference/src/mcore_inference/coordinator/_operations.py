# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Signals to all engines, one after the other; a load of weights is one that brings something."""

from collections import deque

from mcore_inference.coordinator._config import CoordinatorConfig
from mcore_inference.coordinator._entries import Engine, Load, Operation, drop_load
from mcore_inference.coordinator._group import Group
from mcore_inference.coordinator._messages import (
    MAX_NUMBER,
    LoadLora,
    LoadWeights,
    Refusal,
    Signal,
    SignalAck,
    Stop,
    UnloadLora,
    WeightAck,
    WeightBucket,
    WireChunk,
)
from mcore_inference.coordinator._open_requests import OpenRequests
from mcore_inference.coordinator._states import GroupState, signals_between, state_after

BUCKET_BYTES = 16 * 2**20
"""Of weights: what each engine and the coordinator hold of a load."""
_MAX_SIGNALS = 1024
"""Signals that wait for the one in progress."""


class Operations:
    """The signal in progress, which all engines are to acknowledge, and those that wait for it.

    Args:
        group: whose engines obey.
        requests: that wait for a load, or end by a stop.
        config: time-outs and sizes.
    """

    def __init__(self, group: Group, requests: OpenRequests, config: CoordinatorConfig) -> None:
        self._group, self._requests, self._config = group, requests, config
        self._signals: deque[tuple[bytes, Signal]] = deque()

    def add(self, client: bytes, signal: Signal, now: float) -> None:
        """What a client asks for, behind what was asked for before."""
        if len(self._signals) >= _MAX_SIGNALS:
            self._group.send(client, Refusal(call=signal.call, message=f"{_MAX_SIGNALS} signals wait already"))
        else:
            self._signals.append((client, signal))
            self._begin_next(now)

    def acknowledge(self, peer: bytes, engine: Engine, message: SignalAck, now: float) -> bool:
        """Whether it is of the signal in progress."""
        operation = self._group.operation
        if operation is None or operation.number != message.call:
            return False
        if message.error:
            operation.failed[peer] = f"{engine.name}: {message.error}"
        operation.waiting.discard(peer)
        self._finish(now)
        return True

    def late(self, now: float) -> list[tuple[bytes, str]]:
        """Engines that did not answer in time, each with what is to be said of it; where the client of a load is late, that is given up."""
        operation = self._group.operation
        if operation is None or now <= operation.deadline:
            return []
        timeout_s = self._config.signal_timeout_s if operation.load is None else self._config.load_timeout_s
        if operation.load is not None and not operation.waiting:
            self._give_load_up(operation.load, f"the client sent no weights for {timeout_s:g} s", now)
            return []
        return [(peer, f"it did not answer {name_of(operation.signal)} within {timeout_s:g} s") for peer in sorted(operation.waiting)]

    def lose(self, peer: bytes, engine: Engine, reason: str, now: float, *, has_ended: bool, is_drained: bool) -> None:
        """An engine is gone, and nobody waits for it; one that has ended is as stopped as one that said so, which may be on its way. One
        that drained is missed by nobody, but by a load that it was the last one for."""
        operation = self._group.operation
        if operation is None:
            return
        engines = {} if operation.load is None else operation.load.engines
        if peer in operation.waiting or peer in engines:
            engines.pop(peer, None)
            is_missed = not is_drained or (operation.load is not None and not engines)
            if is_missed and not (has_ended and self._group.is_stopping):
                operation.lost.append(f"{engine.name}: {reason}")
            if peer in operation.waiting or not engines:
                operation.waiting.discard(peer)
                self._finish(now)

    def forget_client(self, peer: bytes, now: float) -> None:
        """A client is gone, and with it the load that it had begun."""
        operation = self._group.operation
        if operation is not None and operation.load is not None and operation.client == peer:
            self._give_load_up(operation.load, "the client is gone", now)

    # -- signals -----------------------------------------------------------------------------------------------------

    def _begin_next(self, now: float) -> None:
        """Begin signals until one has to wait for engines."""
        group = self._group
        while self._signals and group.operation is None:
            client, signal = self._signals.popleft()
            if isinstance(signal, LoadWeights):
                self._begin_load(client, signal, now)
                continue
            try:
                target = state_after(type(signal), group.state)
            except ValueError as error:
                group.send(client, Refusal(call=signal.call, message=str(error)))
                continue
            if target is group.state:
                group.send(client, SignalAck(call=signal.call))
                continue
            operation = group.operation = Operation(
                signal=signal,
                client=client,
                number=group.next_number(),
                target=target,
                waiting=set(group.engines),
                deadline=now + self._config.signal_timeout_s,
            )
            for peer in group.engines:
                group.send(peer, type(signal)(call=operation.number))
            self._finish(now)

    def _finish(self, now: float) -> None:
        """Go on, once no engine is waited for."""
        group, operation = self._group, self._group.operation
        if operation is None or operation.waiting:
            return
        if operation.load is not None:
            self._advance_load(operation, operation.load, now)
            return
        group.operation = None
        if operation.failed and operation.target is not GroupState.STOPPED:
            self._undo(operation)
            self._begin_next(now)
            return
        group.state = operation.target
        if isinstance(operation.signal, Stop):
            self._requests.stop()
            for peer in list(group.engines):
                group.remove_engine(peer)
        if operation.lost:
            text = f"{name_of(operation.signal)} took effect without engines that were lost ({'; '.join(operation.lost)})"
            group.send(operation.client, Refusal(call=operation.signal.call, message=text))
        else:
            group.send(operation.client, SignalAck(call=operation.signal.call))
        self._begin_next(now)

    def _undo(self, operation: Operation) -> None:
        """Lead the engines back on which a signal took effect that failed on others."""
        group = self._group
        for peer in group.engines:
            if peer not in operation.failed:
                for signal in signals_between(operation.target, group.state):
                    group.send(peer, signal(call=group.next_number()))
        reasons = "; ".join(sorted([*operation.failed.values(), *operation.lost]))
        text = f"{name_of(operation.signal)} failed, and the engines stay {group.state} ({reasons})"
        group.send(operation.client, Refusal(call=operation.signal.call, message=text))

    # -- weights -----------------------------------------------------------------------------------------------------

    def take_bucket(self, client: bytes, bucket: WeightBucket, now: float) -> None:
        """Weights of a client, for all engines."""
        group, operation = self._group, self._group.operation
        load = None if operation is None else operation.load
        if bucket.end == "aborted" and drop_load(self._signals, LoadWeights, client, bucket.call):
            return
        if operation is None or load is None or operation.client != client or operation.signal.call != bucket.call or load.end:
            group.send(client, Refusal(call=bucket.call, message="no load waits for these weights"))
        elif bucket.end == "aborted":
            self._give_load_up(load, "the client gave it up", now)
        elif operation.waiting or bucket.index != load.index + 1:
            text = f"bucket {bucket.index} came instead of {load.index + 1}, or before that was asked for"
            group.send(client, Refusal(call=bucket.call, message=text))
        else:
            self._send_bucket(operation, load, bucket.chunks, bucket.end, now)

    def weights_taken(self, peer: bytes, engine: Engine, message: WeightAck, now: float) -> None:
        """An engine has a bucket, or says why not."""
        if message.version >= 0:
            engine.weight_version = message.version
        operation = self._group.operation
        load = None if operation is None else operation.load
        if operation is None or load is None or operation.number != message.call or load.index != message.index:
            return
        if peer in operation.waiting:
            # Those of a load that is given up only say so.
            if message.error and load.end != "aborted":
                load.errors.append(f"{engine.name}: {message.error}")
            operation.waiting.discard(peer)
            self._finish(now)

    def _begin_load(self, client: bytes, message: LoadWeights, now: float) -> None:
        group, timeout_s = self._group, self._config.load_timeout_s
        if group.state is GroupState.STOPPED or not group.serving:
            text = "the engines are stopped" if group.state is GroupState.STOPPED else "there is no engine to load weights into"
            group.send(client, Refusal(call=message.call, message=text))
            return
        # A load that failed had a number too: an engine that took it may be away, and come back.
        version = message.version if message.version >= 0 else group.newest + 1
        if version > MAX_NUMBER:
            text = f"no version follows {group.newest}, the largest; give the load a version"
            group.send(client, Refusal(call=message.call, message=text))
            return
        group.version, group.newest = version, max(version, group.newest)
        self._requests.forget_prefixes()
        operation = group.operation = Operation(
            signal=message,
            client=client,
            number=group.next_number(),
            target=group.state,
            waiting=set(group.engines),
            deadline=now + timeout_s,
            load=Load(version=version, engines={peer: engine.name for peer, engine in group.engines.items()}),
        )
        for peer in group.engines:
            group.send(peer, LoadWeights(call=operation.number, version=version, in_flight=message.in_flight, timeout_s=timeout_s))

    def _send_bucket(self, operation: Operation, load: Load, chunks: list[WireChunk], end: str, now: float) -> None:
        load.index, load.end = load.index + 1, end
        operation.waiting, operation.deadline = set(load.engines), now + self._config.load_timeout_s
        for peer in load.engines:
            self._group.send(peer, WeightBucket(call=operation.number, index=load.index, chunks=chunks, end=end))  # type: ignore[arg-type]

    def _give_load_up(self, load: Load, reason: str, now: float) -> None:
        """Let engines forget a load; those that have begun to copy wait for another."""
        if not load.end:
            load.errors.append(reason)
            self._finish(now)

    def _advance_load(self, operation: Operation, load: Load, now: float) -> None:
        """All engines have the last bucket: ask for the next, or end."""
        group, call = self._group, operation.signal.call
        if load.errors and not load.end and load.engines:
            self._send_bucket(operation, load, [], "aborted", now)
        elif load.end or not load.engines:
            group.operation = None
            if load.end == "whole" and load.engines and not load.errors:
                group.loaded = load.version
            if operation.lost and not load.errors:
                lost = "; ".join(operation.lost)
                group.send(operation.client, Refusal(call=call, message=f"engines were lost while weights were loaded ({lost})"))
            else:
                error = "; ".join(sorted([*load.errors, *operation.lost]))
                group.send(operation.client, WeightAck(call=call, index=load.index, version=load.version, error=error, is_over=True))
            self._begin_next(now)
            # Behind the next signal: where that is a load too, they wait for it.
            self._requests.route_homeless(now)
        else:
            operation.deadline = now + self._config.load_timeout_s
            size = min(BUCKET_BYTES, self._config.max_message_bytes // 2)
            group.send(operation.client, WeightAck(call=call, index=load.index, version=load.version, bucket_bytes=size))


def name_of(signal: Signal | LoadLora | UnloadLora) -> str:
    """What clients call it by."""
    named = {LoadWeights: "load_weights", LoadLora: "load_lora", UnloadLora: "unload_lora"}
    return named.get(type(signal), type(signal).__name__.lower())
