# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a coordinator does, without sockets: engines and clients that come, go, hang and lie."""

from typing import Any

import pytest

pytest.importorskip("zmq")

from mcore_inference.coordinator import CoordinatorConfig, CoordinatorSecurity, GroupState, Status
from mcore_inference.coordinator._core import CoordinatorCore
from mcore_inference.coordinator._messages import (
    MAX_FIGURES,
    Abort,
    AskStatus,
    ConnectAck,
    Disconnect,
    EngineReply,
    Failure,
    Heartbeat,
    Refusal,
    RegisterAck,
    SignalAck,
    Stop,
    SubmitRequest,
)
from mcore_inference.coordinator._runner import _STATUS_S, _STATUS_TIMEOUT_S
from mcore_inference.engine._runner import _WARM_STALL_S
from tests.support.coordinator_core import Group, connect, register, reply, report, submit


def test_requests_go_to_the_engine_with_the_fewest_open_tokens() -> None:
    group = Group(engines=3, clients=1)
    group.send(b"c0", submit(0, [1] * 100))
    for number in range(1, 5):
        group.send(b"c0", submit(number, [1] * 10))
    counts = sorted(len(group.got(b"e%d" % index, SubmitRequest)) for index in range(3))
    assert counts == [1, 2, 2]


def test_equal_engines_take_turns() -> None:
    group = Group(engines=4, clients=1)
    for number in range(400):
        group.send(b"c0", submit(number))
    assert [len(group.got(b"e%d" % index, SubmitRequest)) for index in range(4)] == [100] * 4


def test_a_request_without_a_seed_gets_one_and_keeps_it_when_its_engine_is_lost() -> None:
    group = Group(engines=2, clients=2)
    for number in range(4):
        group.send(b"c%d" % (number % 2), submit(number))
    group.send(b"c0", submit(4))
    own = submit(5)
    own.sampling_params["seed"] = 7
    group.send(b"c0", own)
    full = submit(6)
    # One more than a message may have.
    full.sampling_params |= {f"field {index}": 0 for index in range(MAX_FIGURES - 1)}
    group.send(b"c0", full)

    def seeds() -> list[Any]:
        return [message.sampling_params.get("seed") for engine in (b"e0", b"e1") for message in group.got(engine, SubmitRequest)]

    drawn = seeds()
    assert len(set(drawn)) == 7 and {7, None} < set(drawn)
    assert not set(drawn) - {7, None} & {*range(10)}
    group.inbox[b"e1"].clear()
    group.lose(b"e0")
    before = [message.sampling_params.get("seed") for message in group.got(b"e0", SubmitRequest)]
    assert before == [message.sampling_params.get("seed") for message in group.got(b"e1", SubmitRequest)]


def test_prompts_that_begin_alike_meet_while_the_load_allows() -> None:
    group = Group(clients=1)
    for index in range(4):
        group.send(b"e%d" % index, register(f"dp-{index}", max_requests=16))

    def counts() -> list[int]:
        return sorted(len(group.got(b"e%d" % index, SubmitRequest)) for index in range(4))

    for number in range(2):
        group.send(b"c0", submit(number, [7] * 64 + [number]))
    assert counts() == [0, 0, 0, 2]
    # An engine computes 16 at a time: an eighth of them is what the whole prompt is worth.
    for number in range(2, 40):
        group.send(b"c0", submit(number, [7] * 64 + [number]))
        assert counts()[-1] <= max(3, counts()[0] + 3)
    assert counts()[0] >= 9


def test_the_size_of_a_cache_bounds_what_an_engine_computes_at_a_time() -> None:
    group = Group(clients=1)
    for index, cache_tokens in enumerate((100, 300)):
        group.send(b"e%d" % index, register(f"dp-{index}", cache_tokens=cache_tokens))
    for number in range(8):
        group.send(b"c0", submit(number, [number] * 10, budget=40))
    counts = [len(group.got(b"e%d" % index, SubmitRequest)) for index in range(2)]
    assert counts == [2, 6]
    # A budget that no engine has counts as what it has.
    group.send(b"c0", submit(8, [8] * 10, budget=2**40))
    group.send(b"c0", AskStatus(call=1))
    assert sum(engine.open_tokens for engine in group.got(b"c0", Status)[-1].engines) == 8 * 50 + 64


def test_chats_that_name_no_length_weigh_little_and_meet_the_engine_that_has_their_past() -> None:
    """Their budgets are all that is left, and their answers are not."""
    group = Group(clients=1)
    for index in range(2):
        group.send(b"e%d" % index, register(f"dp-{index}", max_sequence_length=131_072, max_requests=64, cache_tokens=400_000))
    group.send(b"c0", submit(0, [7] * 640, budget=131_000))
    [home] = [peer for peer in (b"e0", b"e1") if group.got(peer, SubmitRequest)]
    group.send(b"c0", submit(1, [7] * 640 + [8] * 64, budget=130_000))
    assert len(group.got(home, SubmitRequest)) == 2


def full(number: int) -> Failure:
    return Failure(request_id=number, kind="QueueFullError", message="too many wait", is_transient=True)


def test_a_request_goes_round_the_engines_whose_queues_are_full() -> None:
    group = Group(engines=3, clients=1)
    # One behind another would meet the first again, by its beginning.
    group.send(b"c0", submit(5, [7] * 64, stream=True))
    refusing = []
    while not group.got(b"c0", Failure):
        [(engine, message)] = [(peer, each) for peer in (b"e0", b"e1", b"e2") for each in group.got(peer, SubmitRequest)]
        refusing.append(engine)
        group.inbox[engine].clear()
        group.send(engine, full(message.request_id))
        # Once only: it is at another one.
        group.send(engine, full(message.request_id))
    assert sorted(refusing) == [b"e0", b"e1", b"e2"]
    [failure] = group.got(b"c0", Failure)
    assert (failure.request_id, failure.kind, failure.is_transient) == (5, "QueueFullError", True)
    assert not group.core.num_open_requests
    group.send(b"c0", AskStatus(call=1))
    status = group.got(b"c0", Status)[-1]
    assert [engine.open_requests for engine in status.engines] == [0, 0, 0]
    # The number is free, and each engine is asked again.
    group.send(b"c0", submit(5, [7] * 64))
    [engine] = [peer for peer in (b"e0", b"e1", b"e2") if group.got(peer, SubmitRequest)]
    # One that is lost was asked by nobody else.
    group.send(engine, full(group.got(engine, SubmitRequest)[0].request_id))
    [second] = [peer for peer in (b"e0", b"e1", b"e2") if peer != engine and group.got(peer, SubmitRequest)]
    group.lose(second)
    assert sum(len(group.got(peer, SubmitRequest)) for peer in (b"e0", b"e1", b"e2")) == 3


def test_another_failure_of_an_engine_is_the_answer() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"c0", submit(5))
    [engine] = [peer for peer in (b"e0", b"e1") if group.got(peer, SubmitRequest)]
    group.send(engine, Failure(request_id=group.got(engine, SubmitRequest)[0].request_id, kind="X", message="", is_transient=True))
    assert [failure.kind for failure in group.got(b"c0", Failure)] == ["X"]


def test_two_clients_may_use_one_number() -> None:
    group = Group(engines=1, clients=2)
    for client in (b"c0", b"c1"):
        group.send(client, submit(5))
    first, second = (message.request_id for message in group.got(b"e0", SubmitRequest))
    group.send(b"e0", reply(second))
    assert not group.inbox[b"c0"] and [message.request_id for message in group.got(b"c1", EngineReply)] == [5]
    group.send(b"e0", reply(first))
    # Once only.
    group.send(b"e0", reply(first))
    assert [message.request_id for message in group.got(b"c0", EngineReply)] == [5]
    # The number is free again.
    group.send(b"c0", submit(5))
    assert len(group.got(b"e0", SubmitRequest)) == 3 and not group.got(b"c0", Refusal)


def test_clients_that_are_not_connected_are_told_and_served_nothing() -> None:
    group = Group(engines=1)
    group.send(b"early", submit(0))
    assert group.got(b"early", Refusal)[0].message == "you are not known here; connect or register first"
    assert not group.inbox[b"e0"] and group.core.num_engines == 1


def test_requests_wait_for_an_engine_and_not_for_ever() -> None:
    group = Group(clients=1)
    group.send(b"c0", submit(0))
    group.send(b"e0", register())
    assert len(group.got(b"e0", SubmitRequest)) == 1
    group.send(b"e0", Disconnect())
    group.send(b"c0", submit(1))
    for _ in range(61):
        group.send(b"c0", Heartbeat())
        group.wait(1)
    assert {(message.request_id, message.message) for message in group.got(b"c0", Failure)} == {
        (0, "there was no engine for 60 s"),
        (1, "there was no engine for 60 s"),
    }


def test_requests_that_wait_for_an_engine_go_by_priority_then_by_arrival() -> None:
    group = Group(clients=1)
    for number, priority in enumerate((1, 0, 5, -2, 0)):
        message = submit(number, [number])
        message.priority = priority
        group.send(b"c0", message)
    group.send(b"e0", register())
    assert [message.prompt for message in group.got(b"e0", SubmitRequest)] == [[3], [1], [4], [0], [2]]


def test_the_context_of_the_last_engines_holds_for_requests_that_wait_for_others() -> None:
    group = Group(clients=1)
    for peer, expected in ((b"c1", 0), (b"c2", 64), (b"c3", 64)):
        if peer == b"c2":
            group.send(b"e0", register())
        elif peer == b"c3":
            group.lose(b"e0")
        group.send(peer, connect())
        assert [ack.max_sequence_length for ack in group.got(peer, ConnectAck)] == [expected]


def test_a_request_that_ends_engines_ends_after_its_retries() -> None:
    group = Group(engines=3, clients=1)
    group.send(b"c0", submit(0))
    for _ in range(2):
        (peer,) = [peer for peer in (b"e0", b"e1", b"e2") if group.got(peer, SubmitRequest)]
        group.inbox[peer].clear()
        group.lose(peer)
    (failure,) = group.got(b"c0", Failure)
    assert failure.kind == "EngineLostError" and "max_retries=1" in failure.message and group.core.num_engines == 1


def test_a_form_that_may_have_ended_an_engine_goes_to_no_other() -> None:
    form = {"structured_output": {"regex": "a+"}}
    for is_ended in (True, False):
        group = Group(engines=2, clients=1)
        group.send(b"c0", SubmitRequest(request_id=0, prompt="x", sampling_params=form, stream=False))
        (peer,) = [peer for peer in (b"e0", b"e1") if group.got(peer, SubmitRequest)]
        other = b"e1" if peer == b"e0" else b"e0"
        if is_ended:
            group.lose(peer)
        else:
            group.send(peer, Disconnect())
        assert bool(group.got(other, SubmitRequest)) is not is_ended
        failures = group.got(b"c0", Failure)
        assert len(failures) == is_ended
        assert all(each.kind == "EngineLostError" and "structured_output" in each.message for each in failures)


def test_a_client_that_is_gone_leaves_nothing_behind() -> None:
    group = Group(engines=1, clients=2)
    for number in range(3):
        group.send(b"c0", submit(number))
    for _ in range(32):
        group.now += 1
        group.send(b"e0", Heartbeat())
        group.send(b"c1", Heartbeat())
        group.wait(0)
    assert len(group.got(b"e0", Abort)) == 3 and group.core.num_open_requests == 0
    group.send(b"e0", reply(group.got(b"e0", SubmitRequest)[0].request_id))
    assert not group.got(b"c0", EngineReply)


def test_the_limit_of_open_requests_is_a_transient_failure() -> None:
    group = Group(CoordinatorConfig(max_open_requests=2), engines=1, clients=1)
    for number in range(3):
        group.send(b"c0", submit(number))
    (failure,) = group.got(b"c0", Failure)
    assert (failure.request_id, failure.kind, failure.is_transient) == (2, "QueueFullError", True)


def status(group: Group) -> Status:
    group.send(b"c0", AskStatus(call=1))
    return group.got(b"c0", Status)[-1]


def test_a_second_engine_of_a_name_is_refused_while_the_first_is_there() -> None:
    group = Group(engines=1, clients=1)
    group.send(b"e1", register("dp-0"))
    assert "name='dp-0' is that of an engine that is here; give each engine a name of its own" in group.got(b"e1", Refusal)[0].message
    assert not group.got(b"e1", RegisterAck) and group.core.num_engines == 1
    # The first hears of it, by which the socket finds out whether its connection is gone.
    assert group.got(b"e0", Heartbeat)
    group.lose(b"e0")
    group.send(b"e1", register("dp-0"))
    assert group.got(b"e1", RegisterAck)
    for length in (0, 65):
        group.send(b"e2", register("x" * length))
        assert f"has {length} characters; give a name of 1 to 64" in group.got(b"e2", Refusal)[-1].message


def test_an_engine_that_comes_back_by_another_connection_takes_its_own_place() -> None:
    group = Group(clients=1)
    group.send(b"e0", register("dp-0", worker="a"))
    group.send(b"c0", submit(0))
    group.send(b"e1", register("dp-0", worker="a"))
    assert group.got(b"e1", RegisterAck) and not group.got(b"e1", Refusal) and group.core.num_engines == 1
    # It knows nothing of what the connection before had brought.
    assert len(group.got(b"e1", SubmitRequest)) == 1
    group.send(b"e2", register("dp-0", worker="b"))
    assert group.got(b"e2", Refusal)


def test_a_name_is_free_as_soon_as_its_engine_is_known_to_have_ended() -> None:
    group = Group(engines=1)
    group._take(group.core.lose("dp-0", "its process was killed", group.now))
    group.send(b"e1", register("dp-0"))
    assert group.got(b"e1", RegisterAck)


def test_counters_of_engines_that_are_gone_come_back_or_are_replaced_never_fall() -> None:
    group = Group(clients=1)
    lowest = 0.0

    def check(expected: float) -> None:
        nonlocal lowest
        now = status(group)
        total = sum(engine.stats["generated_tokens"] for engine in now.engines) + now.past.get("generated_tokens", 0.0)
        assert total == expected >= lowest
        lowest = total

    group.send(b"e0", register("dp-0", worker="a", stats={"generated_tokens": 5.0, "used_blocks": 3.0}))
    group.send(b"e1", register("dp-1", worker="b", stats={"generated_tokens": 0.0}))
    check(5)
    group.send(b"e0", report(100))
    group.send(b"e1", report(40))
    check(140)
    group.lose(b"e0")
    check(140)
    assert "used_blocks" not in status(group).past
    # The same process, with what it drew meanwhile.
    group.send(b"e2", register("dp-0", worker="a", stats={"generated_tokens": 110.0}))
    check(150)
    # Another process of the name.
    group.send(b"e2", Disconnect())
    group.send(b"e3", register("dp-0", worker="c", stats={"generated_tokens": 0.0}))
    check(150)
    group.send(b"e3", report(1))
    check(151)
    # One that begins anew without a word.
    group.send(b"e1", report(3))
    check(154)
    assert status(group).past["lost_engines"] == 2
    group.send(b"c0", Stop(call=9))
    for peer in (b"e1", b"e3"):
        group.send(peer, SignalAck(call=group.got(peer, Stop)[-1].call))
    assert group.core.state is GroupState.STOPPED
    check(154)


def test_an_engine_that_says_that_it_is_stuck_is_lost_at_once() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"e0", report(1, age=2.5))
    assert [engine.last_step_age_s for engine in status(group).engines] == [2.5, None]
    group.send(b"c0", submit(0))
    group.send(b"c0", submit(1))
    group.send(b"e0", report(1, is_alive=False, age=61.0))
    assert group.core.num_engines == 1 and len(group.got(b"e1", SubmitRequest)) == 2
    assert "it makes no progress for 61.0 s" in group.got(b"e0", Refusal)[0].message


def test_by_default_health_is_red_within_five_seconds_of_a_hung_step_a_stopped_engine_and_a_stopped_coordinator() -> None:
    config = CoordinatorConfig()
    core, now = CoordinatorCore(config, seed=0), 0.0
    core.receive(b"e", register(worker="w"), now)
    while core.num_engines:
        # As the coordinator's thread does.
        now += config.heartbeat_s / 4
        core.tick(now)
    hung = _WARM_STALL_S + config.heartbeat_s
    assert max(hung, now) + _STATUS_S <= 4.75 and _STATUS_S + _STATUS_TIMEOUT_S <= 4.75


def test_one_that_asked_several_times_before_it_was_heard_is_one_engine() -> None:
    core = CoordinatorCore(CoordinatorConfig(engine_timeout_s=10.0), seed=0)
    core.receive(b"c", connect(), 0.0)
    core.receive(b"c", submit(1), 0.0)
    first = core.receive(b"e", register(worker="w"), 0.0)
    assert [type(message) for _, message in first] == [RegisterAck, SubmitRequest]
    for _ in range(5):
        assert core.receive(b"e", register(worker="w"), 1.0) == [(b"e", RegisterAck())]
    assert core.num_engines == 1 and core.engine_names == {"dp"} and core._group.num_lost == 0
    # It was given up meanwhile, and says so by another number: what it had is lost.
    again = core.receive(b"e", register(worker="w", registration=1), 2.0)
    assert core._group.num_lost == 1 and [type(message) for _, message in again] == [RegisterAck, SubmitRequest]


def test_peers_that_are_refused_are_counted() -> None:
    group = Group(CoordinatorConfig(security=CoordinatorSecurity(secret="s")))
    group.send(b"c0", connect())
    group.send(b"e0", register())
    assert group.core._status(0, 0.0).past["refused_peers"] == 2
