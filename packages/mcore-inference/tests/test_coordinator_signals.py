# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Signals to the engines of a coordinator, without sockets: from state to state, refused, failed and overdue."""

import pytest

pytest.importorskip("zmq")

from mcore_inference.coordinator import CoordinatorConfig, CoordinatorSecurity, GroupState, Status
from mcore_inference.coordinator._messages import (
    AskStatus,
    Disconnect,
    Failure,
    Heartbeat,
    LoadWeights,
    Pause,
    Refusal,
    RegisterAck,
    Resume,
    SignalAck,
    Stop,
    SubmitRequest,
    Suspend,
    Unpause,
)
from mcore_inference.coordinator._states import signals_between, state_after
from tests.support.coordinator_core import Group, bucket, connect, load, partials, register, submit


def test_signals_are_acknowledged_when_every_engine_has() -> None:
    group = Group(engines=2, clients=2)
    group.send(b"c0", Pause(call=1))
    group.send(b"c1", Pause(call=9))
    (number,) = {message.call for index in (b"e0", b"e1") for message in group.got(index, Pause)}
    group.send(b"e0", SignalAck(call=number))
    assert not group.inbox[b"c0"] and group.core.state is GroupState.RUNNING
    group.send(b"e1", SignalAck(call=number))
    assert group.got(b"c0", SignalAck)[0].call == 1
    # The second one came in between: it has nothing to do any more.
    assert group.got(b"c1", SignalAck)[0].call == 9 and len(group.got(b"e0", Pause)) == 1


def test_a_signal_that_fails_on_one_engine_leaves_all_as_they_were() -> None:
    group = Group(engines=2, clients=1)
    for call, signal in enumerate((Pause, Suspend)):
        group.send(b"c0", signal(call=call))
        for peer in (b"e0", b"e1"):
            group.send(peer, SignalAck(call=group.got(peer, signal)[0].call))
    assert group.core.state is GroupState.SUSPENDED
    for _ in range(2):
        group.send(b"c0", Resume(call=7))
        group.send(b"e0", SignalAck(call=group.got(b"e0", Resume)[-1].call))
        group.send(b"e1", SignalAck(call=group.got(b"e1", Resume)[-1].call, error="OutOfMemoryError: no room"))
        refusal = group.got(b"c0", Refusal)[-1]
        assert refusal.call == 7
        assert refusal.message == "resume failed, and the engines stay suspended (dp-1: OutOfMemoryError: no room)"
        assert group.core.state is GroupState.SUSPENDED and group.core.num_engines == 2
        group.send(b"e0", SignalAck(call=group.got(b"e0", Suspend)[-1].call))
    assert [len(group.got(peer, Suspend)) for peer in (b"e0", b"e1")] == [3, 1]
    group.send(b"c0", Resume(call=8))
    for peer in (b"e0", b"e1"):
        group.send(peer, SignalAck(call=group.got(peer, Resume)[-1].call))
    assert group.got(b"c0", SignalAck)[-1].call == 8 and group.core.state is GroupState.PAUSED


def test_an_engine_that_fails_to_become_what_the_others_are_is_given_up() -> None:
    group = Group(engines=1, clients=1)
    group.send(b"e1", register("dp-1", state="suspended"))
    signals = [*group.got(b"e1", Resume), *group.got(b"e1", Unpause)]
    assert len(signals) == 2
    group.send(b"e1", SignalAck(call=signals[0].call, error="OutOfMemoryError: no room"))
    assert "a signal failed there: OutOfMemoryError: no room" in group.got(b"e1", Refusal)[0].message
    assert group.core.num_engines == 1
    # Of one that has another name, the second is of no engine any more.
    group.send(b"e1", SignalAck(call=signals[1].call, error="ValueError"))
    assert group.core.num_engines == 1


def test_a_stop_that_fails_on_an_engine_is_one_all_the_same() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"c0", Stop(call=1))
    group.send(b"e0", SignalAck(call=group.got(b"e0", Stop)[0].call, error="RuntimeError"))
    group.send(b"e1", SignalAck(call=group.got(b"e1", Stop)[0].call))
    assert group.core.state is GroupState.STOPPED and group.got(b"c0", SignalAck)[0].call == 1


def test_signals_that_do_not_fit_are_refused_with_the_state() -> None:
    group = Group(engines=1, clients=1)
    group.send(b"c0", Suspend(call=3))
    assert group.got(b"c0", Refusal)[0].message == "suspend is not possible while the engines are running; it is when they are paused"
    group.send(b"c0", Resume(call=4))
    assert group.got(b"c0", Refusal)[1].call == 4


def test_an_engine_without_an_answer_is_named_and_given_up() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"c0", Pause(call=1))
    group.send(b"e0", SignalAck(call=group.got(b"e0", Pause)[0].call))
    for _ in range(61):
        group.now += 1.0
        for peer in (b"e0", b"e1", b"c0"):
            group.send(peer, Heartbeat())
        group.wait(0)
    (refusal,) = group.got(b"c0", Refusal)
    assert "dp-1: it did not answer pause within 60 s" in refusal.message and refusal.call == 1
    assert group.core.num_engines == 1 and group.core.state is GroupState.PAUSED


def test_an_engine_that_joins_is_led_to_the_state_of_the_others() -> None:
    group = Group(clients=1)
    for signal in (Pause, Suspend):
        group.send(b"c0", signal(call=0))
    assert len(group.got(b"c0", SignalAck)) == 2
    group.send(b"e0", register())
    assert [type(message) for message in group.inbox[b"e0"]] == [RegisterAck, Pause, Suspend]
    group.send(b"c0", Resume(call=1))
    group.send(b"e1", register("other", state="suspended"))
    assert [type(message) for message in group.inbox[b"e1"]] == [RegisterAck, Resume]


def test_engines_that_are_silent_together_end_a_stop_and_not_the_coordinator() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"c0", Stop(call=7))
    group.send(b"e1", SignalAck(call=group.got(b"e1", Stop)[0].call))
    group.wait(6.0)
    (refusal,) = group.got(b"c0", Refusal)
    assert refusal.call == 7 and "dp-0" in refusal.message
    assert group.core.state is GroupState.STOPPED and not group.core.num_engines


@pytest.mark.parametrize("how", ["unreachable", "ended", "left"])
def test_an_engine_that_is_gone_during_a_stop_is_stopped_and_during_a_pause_is_lost(how: str) -> None:
    def end(engine: bytes, name: str) -> None:
        if how == "unreachable":
            # It acknowledged and closed, and neither was read before the answer to its heartbeat was sent.
            group.lose(engine)
        elif how == "ended":
            group._take(group.core.lose(name, "its process ended", group.now))
        else:
            group.send(engine, Disconnect())

    group = Group(engines=3, clients=1)
    group.send(b"c0", Pause(call=6))
    end(b"e2", "dp-2")
    for engine in (b"e0", b"e1"):
        group.send(engine, SignalAck(call=group.got(engine, Pause)[0].call))
    (refusal,) = group.got(b"c0", Refusal)
    assert refusal.call == 6 and "dp-2" in refusal.message
    for number in (1, 2):
        group.send(b"c0", submit(number, stream=True))
    group.send(b"e0", partials(group.got(b"e0", SubmitRequest)[0].request_id))
    group.send(b"c0", Stop(call=7))
    end(b"e0", "dp-0")
    assert group.core.state is GroupState.PAUSED and not group.got(b"c0", SignalAck)
    group.send(b"e1", SignalAck(call=group.got(b"e1", Stop)[0].call))
    assert group.core.state is GroupState.STOPPED and not group.core.num_engines and not group.core.num_open_requests
    assert [message.call for message in group.got(b"c0", SignalAck)] == [7] and len(group.got(b"c0", Refusal)) == 1
    failures = {(message.request_id, message.kind, message.message) for message in group.got(b"c0", Failure)}
    assert failures == {(number, "EngineDeadError", "the engines were stopped") for number in (1, 2)}


@pytest.mark.parametrize("begin", [GroupState.RUNNING, GroupState.PAUSED, GroupState.SUSPENDED])
@pytest.mark.parametrize("target", list(GroupState))
def test_signals_lead_from_every_state_to_every_other(begin: GroupState, target: GroupState) -> None:
    state = begin
    for signal in signals_between(begin, target):
        after = state_after(signal, state)
        assert after is not state
        state = after
    assert state is target


def test_signals_and_weights_need_the_control_secret_where_there_is_one() -> None:
    group = Group(CoordinatorConfig(security=CoordinatorSecurity(control_secret="key")), engines=1)
    for client, secret in ((b"c0", ""), (b"c1", "kex"), (b"c2", "key")):
        group.send(client, connect(secret))
    for client in (b"c0", b"c1"):
        for number, message in enumerate((Pause(call=0), Suspend(call=1), Resume(call=2), Unpause(call=3), Stop(call=4), load(5))):
            group.send(client, message)
            refusal = group.got(client, Refusal)[-1]
            name = "load_weights" if isinstance(message, LoadWeights) else type(message).__name__.lower()
            assert refusal.call == number and refusal.message.startswith(f"{name} needs control_secret")
        group.send(client, bucket(1))
        assert "no load waits" in group.got(client, Refusal)[-1].message
        # The rest is for all who have the job's secret.
        group.send(client, submit(0))
        group.send(client, AskStatus(call=9))
        assert group.got(client, Status)
    assert [type(message) for message in group.inbox[b"e0"]] == [SubmitRequest] * 2 and group.core.state is GroupState.RUNNING
    group.send(b"c2", Pause(call=0))
    assert group.got(b"e0", Pause) and not group.got(b"c2", Refusal)
    # A client that connects again has the rights that it brings then.
    group.send(b"c2", connect("kex"))
    group.send(b"c2", Unpause(call=1))
    assert "unpause needs control_secret" in group.got(b"c2", Refusal)[-1].message
