# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines and clients of a coordinator in any order: every request has one end."""

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zmq")

from mcore_inference.coordinator import GroupState
from mcore_inference.coordinator._messages import (
    Abort,
    ConnectAck,
    Disconnect,
    EngineReply,
    Failure,
    Heartbeat,
    LoadWeights,
    Partials,
    Pause,
    Refusal,
    Resume,
    Signal,
    SignalAck,
    Stop,
    SubmitRequest,
    Suspend,
    Unpause,
    WeightAck,
    WeightBucket,
)
from tests.support.coordinator_core import Group, bucket, connect, load, partials, register, reply, submit

KINDS = [
    "submit",
    "stream",
    "abort",
    "answer",
    "partial",
    "fail",
    "lost",
    "join",
    "again",
    "leave",
    "gone",
    "back",
    "signal",
    "load",
    "wait",
    "lie",
]
EVENTS = st.tuples(st.sampled_from(KINDS), st.integers(0, 2), st.integers(0, 5))


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=80))
def test_every_request_has_one_end_whatever_happens(events: list[tuple[str, int, int]]) -> None:
    group, number = Group(engines=2, clients=2), 0
    open_by_client: dict[bytes, set[int]] = {b"c0": set(), b"c1": set()}
    connected = {b"c0", b"c1"}
    ends: Counter[tuple[bytes, int]] = Counter()
    held: dict[bytes, list[int]] = defaultdict(list)
    engines = {b"e0", b"e1"}
    loads: Counter[int] = Counter()

    def settle() -> None:
        """Read what was sent, as peers that keep the rules do; engines acknowledge signals at once."""
        while any(group.inbox.values()):
            inbox, group.inbox = group.inbox, defaultdict(list)
            for peer, messages in inbox.items():
                for message in messages:
                    if isinstance(message, SubmitRequest):
                        held[peer].append(message.request_id)
                    elif isinstance(message, Abort):
                        held[peer].remove(message.request_id)
                    elif isinstance(message, LoadWeights | WeightBucket) and peer in engines:
                        # Some engines refuse what some clients send.
                        error = "refused" if message.call % 7 == 0 and peer == b"e1" else ""
                        group.send(peer, WeightAck(call=message.call, index=getattr(message, "index", 0), error=error))
                    elif isinstance(message, WeightAck) and peer in connected:
                        if message.is_over:
                            loads[message.call] += 1
                        else:
                            end = ("", "", "whole", "whole")[message.index] if message.call % 3 else ("", "aborted")[message.index]
                            group.send(peer, bucket(message.index + 1, end, call=message.call))
                    elif isinstance(message, Refusal) and peer in connected and message.call >= 100:
                        loads[message.call] += 1
                    elif isinstance(message, Signal) and peer in engines:
                        group.send(peer, SignalAck(call=message.call))
                    elif isinstance(message, EngineReply | Failure):
                        assert message.request_id in open_by_client[peer]
                        open_by_client[peer].remove(message.request_id)
                        ends[peer, message.request_id] += 1
                    elif isinstance(message, Partials):
                        assert {part.request_id for part in message.items} <= open_by_client[peer]
                    elif isinstance(message, Refusal) and peer in engines and message.call == -1:
                        engines.discard(peer)
                        held.pop(peer, None)

    for event, which, amount in events:
        engine, client = b"e%d" % which, b"c%d" % (which % 2)
        some = held[engine][amount % len(held[engine])] if held[engine] else None
        if event in ("submit", "stream") and client in connected and group.core.state is not GroupState.STOPPED:
            open_by_client[client].add(number)
            group.send(client, submit(number, stream=event == "stream"))
            number += 1
        elif event == "abort" and open_by_client[client] and client in connected:
            group.send(client, Abort(request_id=open_by_client[client].pop()))
        elif event == "answer" and some is not None:
            held[engine].remove(some)
            group.send(engine, reply(some))
        elif event == "fail" and some is not None:
            held[engine].remove(some)
            group.send(engine, Failure(request_id=some, kind="X", message="", is_transient=False))
        elif event == "partial" and some is not None:
            group.send(engine, partials(some))
        elif event == "lost" and engine in engines:
            engines.discard(engine)
            held.pop(engine, None)
            group.lose(engine)
        elif event in ("join", "again") and (event == "again" or engine not in engines):
            engines.add(engine)
            held.pop(engine, None)
            group.send(engine, register(engine.decode()))
        elif event == "leave" and engine in engines:
            engines.discard(engine)
            held.pop(engine, None)
            group.send(engine, Disconnect())
        elif event == "gone" and client in connected:
            connected.discard(client)
            open_by_client[client].clear()
            group.lose(client)
        elif event == "back":
            connected.add(client)
            group.send(client, connect())
        elif event == "signal" and client in connected:
            group.send(client, [Pause, Unpause, Suspend, Resume, Pause, Unpause][amount](call=1))
        elif event == "load" and client in connected:
            loads[100 + len(loads)] = 0
            group.send(client, load(call=99 + len(loads)))
        elif event == "wait":
            for peer in (*engines, *connected):
                group.send(peer, Heartbeat())
            group.wait(1.0)
        elif event == "lie" and engine in engines:
            # An answer to what it never had, and to what it had once.
            group.send(engine, reply(10**6))
            group.send(engine, reply(amount))
            if amount in held[engine]:
                held[engine].remove(amount)
        settle()

    group.send(b"e9", register("last"))
    engines.add(b"e9")
    settle()
    for _ in range(3):
        for engine in list(held):
            while held.get(engine):
                group.send(engine, reply(held[engine].pop()))
                settle()
    assert not any(open_by_client[client] for client in connected)
    assert group.core.num_open_requests == 0 and set(ends.values()) <= {1}
    group.send(b"c9", connect())
    group.send(b"c9", Stop(call=1))
    settle()
    assert group.core.state is GroupState.STOPPED
    assert set(loads.values()) <= {1}, loads
    assert isinstance(group.core.receive(b"c8", connect(), group.now)[0][1], ConnectAck)
