# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a coordinator does, without sockets: engines and clients that come, go, hang and lie in any order."""

from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("zmq")

from mcore_inference.coordinator import CoordinatorConfig, CoordinatorSecurity, GroupState, Status
from mcore_inference.coordinator._core import CoordinatorCore
from mcore_inference.coordinator._messages import (
    GREETING_BYTES,
    MAX_FIGURES,
    PROTOCOL,
    SHORT_BYTES,
    Abort,
    AskStatus,
    Connect,
    ConnectAck,
    Disconnect,
    EngineReply,
    Failure,
    Heartbeat,
    LoadWeights,
    Message,
    Partial,
    Partials,
    Pause,
    Refusal,
    Register,
    RegisterAck,
    Report,
    Resume,
    Signal,
    SignalAck,
    Stop,
    SubmitRequest,
    Suspend,
    Unpause,
    WeightAck,
    WeightBucket,
    WireChunk,
    decode_incoming,
    encode,
    is_greeting,
    is_too_long,
)
from mcore_inference.coordinator._states import signals_between, state_after

CONFIG = CoordinatorConfig(prefix_slack_tokens=0)


def submit(number: int, prompt: str | list[int] = "x", budget: int = 8, *, stream: bool = False) -> SubmitRequest:
    return SubmitRequest(request_id=number, prompt=prompt, sampling_params={"num_tokens_to_generate": budget}, stream=stream)


def register(name: str = "dp", state: str = "running", **more: Any) -> Register:
    return Register(protocol=PROTOCOL, secret="", name=name, state=state, max_sequence_length=64, **more)


def connect(control_secret: str = "") -> Connect:
    return Connect(protocol=PROTOCOL, secret="", control_secret=control_secret)


def report(tokens: float, *, is_alive: bool = True, age: float | None = None) -> Report:
    return Report(is_alive=is_alive, last_step_age_s=age, stats={"generated_tokens": tokens, "used_blocks": 1.0})


def reply(number: int) -> EngineReply:
    return EngineReply(request_id=number, record={})


def partials(*numbers: int) -> Partials:
    """A token each."""
    return Partials(items=[Partial(request_id=number, tokens=[number], log_probs=[], top_n_logprobs=[], text="") for number in numbers])


class Group:
    """A core with the messages that each peer got."""

    def __init__(self, config: CoordinatorConfig = CONFIG, engines: int = 0, clients: int = 0) -> None:
        self.core, self.now = CoordinatorCore(config), 0.0
        self.inbox: dict[bytes, list[Message]] = defaultdict(list)
        for index in range(engines):
            self.send(b"e%d" % index, register(f"dp-{index}"))
        for index in range(clients):
            self.send(b"c%d" % index, connect())
        self.inbox.clear()

    def send(self, peer: bytes, message: Any) -> None:
        self._take(self.core.receive(peer, decode_incoming(encode(message)), self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.core.tick(self.now))

    def lose(self, peer: bytes) -> None:
        self._take(self.core.unreachable(peer, self.now))

    def _take(self, outbox: list[tuple[bytes, Message]]) -> None:
        for peer, message in outbox:
            self.inbox[peer].append(message)

    def got(self, peer: bytes, kind: type[Message]) -> list[Any]:
        return [message for message in self.inbox[peer] if isinstance(message, kind)]


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


def test_prompts_that_begin_alike_meet_while_the_load_allows() -> None:
    group = Group(CoordinatorConfig(prefix_slack_tokens=1000), engines=4, clients=1)
    for number in range(4):
        group.send(b"c0", submit(number, [7] * 64 + [number]))
    assert sorted(len(group.got(b"e%d" % index, SubmitRequest)) for index in range(4)) == [0, 0, 0, 4]
    for number in range(4, 44):
        group.send(b"c0", submit(number, [7] * 64 + [number]))
    counts = [len(group.got(b"e%d" % index, SubmitRequest)) for index in range(4)]
    assert min(counts) > 0 and max(counts) <= 18


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


def test_tokens_of_a_step_reach_each_client_in_one_message_under_its_numbers() -> None:
    group = Group(engines=2, clients=2)
    for client, number in ((b"c0", 7), (b"c1", 5), (b"c0", 5), (b"c1", 9)):
        group.send(client, submit(number, stream=True))
    # Round about: an engine has one request of each client, or both of one.
    group.send(b"c0", submit(8))
    held = {engine: [message.request_id for message in group.got(engine, SubmitRequest)] for engine in (b"e0", b"e1")}
    # Those of another engine, those that nobody knows, and those that are not streamed, are dropped.
    for engine in held:
        group.send(engine, partials(*(number for numbers in held.values() for number in numbers), 1000))
    got = {client: group.got(client, Partials) for client in (b"c0", b"c1")}
    assert all(len(messages) <= 2 for messages in got.values())
    numbers = {client: sorted(part.request_id for message in messages for part in message.items) for client, messages in got.items()}
    assert numbers == {b"c0": [5, 7], b"c1": [5, 9]}
    tokens = [part.tokens[0] for messages in got.values() for message in messages for part in message.items]
    assert len(set(tokens)) == 4 and set(tokens) < {number for numbers in held.values() for number in numbers}


def test_clients_that_are_not_connected_are_told_and_served_nothing() -> None:
    group = Group(engines=1)
    group.send(b"early", submit(0))
    assert group.got(b"early", Refusal)[0].message == "you are not known here; connect or register first"
    assert not group.inbox[b"e0"] and group.core.num_engines == 1


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


def load(call: int = 1, version: int = -1) -> LoadWeights:
    return LoadWeights(call=call, version=version, in_flight="recompute")


def bucket(index: int, end: Any = "", call: int = 1) -> WeightBucket:
    data = WireChunk(name="w", dtype="float32", shape=[1], offsets=None, data=b"abcd")
    return WeightBucket(call=call, index=index, chunks=[] if end == "aborted" else [data], end=end)


def acknowledge(group: Group, *peers: bytes, error: str = "") -> None:
    """What these engines got last of a load."""
    for peer in peers:
        last = (group.got(peer, LoadWeights) + group.got(peer, WeightBucket))[-1]
        index, end = getattr(last, "index", 0), getattr(last, "end", "")
        version = group.got(peer, LoadWeights)[-1].version if end == "whole" and not error else -1
        group.send(peer, WeightAck(call=last.call, index=index, error=error, version=version))


def test_a_bucket_follows_when_every_engine_has_the_one_before() -> None:
    group = Group(engines=2, clients=2)
    group.send(b"c0", load(call=5))
    group.send(b"c1", Pause(call=9))
    assert {message.version for peer in (b"e0", b"e1") for message in group.got(peer, LoadWeights)} == {1}
    acknowledge(group, b"e0")
    assert not group.got(b"c0", WeightAck)
    # Too early, of a stranger, and out of order.
    group.send(b"c0", bucket(1, call=5))
    group.send(b"c1", bucket(1, call=5))
    acknowledge(group, b"e1")
    assert group.got(b"c0", WeightAck)[-1].bucket_bytes == 16 * 2**20
    group.send(b"c0", bucket(2, call=5))
    assert len(group.got(b"c0", Refusal)) == 2 and len(group.got(b"c1", Refusal)) == 1
    for index, end in ((1, ""), (2, "whole")):
        group.send(b"c0", bucket(index, end, call=5))
        acknowledge(group, b"e0")
        assert group.got(b"c0", WeightAck)[-1].index == index - 1 and not group.got(b"e0", Pause)
        acknowledge(group, b"e1")
    last = group.got(b"c0", WeightAck)[-1]
    assert (last.call, last.index, last.version, last.is_over, last.error) == (5, 2, 1, True, "")
    # What waited for the load goes on.
    assert group.got(b"e0", Pause) and group.core.num_engines == 2


def test_a_load_that_an_engine_refuses_is_given_up_everywhere() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"c0", load())
    acknowledge(group, b"e0", b"e1")
    group.send(b"c0", bucket(1))
    acknowledge(group, b"e0")
    acknowledge(group, b"e1", error="WeightLoadError: w has shape [1]")
    assert group.got(b"e0", WeightBucket)[-1].end == group.got(b"e1", WeightBucket)[-1].end == "aborted"
    acknowledge(group, b"e0", b"e1", error="it was given up")
    last = group.got(b"c0", WeightAck)[-1]
    assert last.is_over and last.error == "dp-1: WeightLoadError: w has shape [1]"
    # Nobody has the version of that load: all engines are served from.
    for number in range(2):
        group.send(b"c0", submit(number))
    assert [len(group.got(peer, SubmitRequest)) for peer in (b"e0", b"e1")] == [1, 1]


@pytest.mark.parametrize("silent", [b"e1", b"c0"])
def test_who_is_late_in_a_load_is_named(silent: bytes) -> None:
    group = Group(CoordinatorConfig(load_timeout_s=20), engines=2, clients=1)
    group.send(b"c0", load())
    acknowledge(group, b"e0", *((b"e1",) if silent == b"c0" else ()))
    for _ in range(21):
        group.now += 1.0
        for peer in (b"e0", b"e1", b"c0"):
            group.send(peer, Heartbeat())
        group.wait(0)
    if silent == b"e1":
        assert group.core.num_engines == 1
        assert group.got(b"c0", WeightAck)[-1].index == 0
        group.send(b"c0", bucket(1, "whole"))
        acknowledge(group, b"e0")
        (refusal,) = group.got(b"c0", Refusal)
        assert "dp-1: it did not answer load_weights within 20 s" in refusal.message and refusal.call == 1
        # It missed the load and is back: it gets nothing.
        group.send(b"e1", register("dp-1"))
        for number in range(4):
            group.send(b"c0", submit(number))
        assert len(group.got(b"e0", SubmitRequest)) == 4 and not group.got(b"e1", SubmitRequest)
    else:
        assert group.got(b"e0", WeightBucket)[-1].end == "aborted"
        acknowledge(group, b"e0", b"e1", error="it was given up")
        assert group.got(b"c0", WeightAck)[-1].error == "the client sent no weights for 20 s"


@pytest.mark.parametrize("waits_for_engines", [True, False])
@pytest.mark.parametrize("leaves", [True, False])
def test_a_load_whose_client_is_gone_or_has_enough_is_given_up(leaves: bool, waits_for_engines: bool) -> None:
    group = Group(engines=2, clients=2)
    group.send(b"c0", load())
    acknowledge(group, b"e0", *(() if waits_for_engines else (b"e1",)))
    group.send(b"c0", Disconnect() if leaves else bucket(0, "aborted"))
    if waits_for_engines:
        acknowledge(group, b"e1")
    for peer in (b"e0", b"e1"):
        assert group.got(peer, WeightBucket)[-1].end == "aborted"
    group.send(b"c1", load(version=4))
    acknowledge(group, b"e0", b"e1", error="it was given up")
    assert [group.got(peer, LoadWeights)[-1].version for peer in (b"e0", b"e1")] == [4, 4]


def test_weights_need_an_engine() -> None:
    group = Group(clients=1)
    group.send(b"c0", load())
    assert "there is no engine" in group.got(b"c0", Refusal)[-1].message
    group.send(b"e0", register("dp-0"))
    group.send(b"c0", load(call=2))
    group.lose(b"e0")
    last = group.got(b"c0", Refusal)[-1]
    assert last.call == 2 and "dp-0: its connection is gone" in last.message


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


@pytest.mark.parametrize("begin", [GroupState.RUNNING, GroupState.PAUSED, GroupState.SUSPENDED])
@pytest.mark.parametrize("target", list(GroupState))
def test_signals_lead_from_every_state_to_every_other(begin: GroupState, target: GroupState) -> None:
    state = begin
    for signal in signals_between(begin, target):
        after = state_after(signal, state)
        assert after is not state
        state = after
    assert state is target


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


@pytest.mark.parametrize(
    "stats",
    [{"x" * 65: 1.0}, {f"x{index}": 1.0 for index in range(MAX_FIGURES + 1)}, {"x": float("nan")}, {"x": float("inf")}, {"x": 1e19}],
)
def test_figures_that_are_too_many_too_long_or_no_numbers_are_no_message(stats: dict[str, float]) -> None:
    for message in (Report(is_alive=True, last_step_age_s=None, stats=stats), register(stats=stats)):
        with pytest.raises(msgspec.ValidationError):
            decode_incoming(encode(message))
    most = {f"x{index}": 1.0 for index in range(MAX_FIGURES)}
    assert decode_incoming(encode(Report(is_alive=True, last_step_age_s=None, stats=most))).stats == most
    with pytest.raises(msgspec.ValidationError):
        decode_incoming(encode(Report(is_alive=True, last_step_age_s=float("nan"), stats={})))


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


def test_each_kind_of_message_has_its_longest() -> None:
    text = "x" * SHORT_BYTES
    long = [Failure(request_id=0, kind="", message=text, is_transient=False), connect(text), register(text)]
    assert all(is_too_long(encode(message)) for message in long) and is_too_long(b"x" + text.encode())
    allowed = [
        submit(0, text),
        reply(0),
        partials(*range(2**17)),
        WeightBucket(call=0, index=1, chunks=[WireChunk(name="w", dtype="uint8", shape=[2**20], offsets=None, data=bytes(2**20))]),
        connect("x" * 4096),
    ]
    assert not any(is_too_long(encode(message)) for message in allowed) and len(encode(allowed[2])) > SHORT_BYTES
    assert is_greeting(encode(connect("x" * 4096))) and is_greeting(encode(register()))
    assert not is_greeting(encode(connect("x" * GREETING_BYTES))) and not is_greeting(encode(submit(0)))


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


def test_one_that_asked_several_times_before_it_was_heard_is_one_engine() -> None:
    core = CoordinatorCore(CoordinatorConfig(engine_timeout_s=10.0))
    core.receive(b"c", connect(), 0.0)
    core.receive(b"c", submit(1), 0.0)
    first = core.receive(b"e", register(worker="w"), 0.0)
    assert [type(message) for _, message in first] == [RegisterAck, SubmitRequest]
    for _ in range(5):
        assert core.receive(b"e", register(worker="w"), 1.0) == [(b"e", RegisterAck())]
    assert core.num_engines == 1 and core.engine_names == {"dp"} and core._num_lost == 0
    # It was given up meanwhile, and says so by another number: what it had is lost.
    again = core.receive(b"e", register(worker="w", registration=1), 2.0)
    assert core._num_lost == 1 and [type(message) for _, message in again] == [RegisterAck, SubmitRequest]


def test_old_weights_behind_a_load_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    core = CoordinatorCore(CoordinatorConfig(engine_timeout_s=10.0))
    core.receive(b"e", register(worker="w"), 0.0)
    core._version = 3
    core._engines[b"e"].weight_version = 3
    core.lose("dp", "its process ended", 1.0)
    core.receive(b"f", register(worker="v"), 2.0)
    assert "dp has weights of version 0, and no engine those of version 3, which were loaded last" in caplog.text
    core.receive(b"g", register("other", worker="u", weight_version=3), 3.0)
    assert caplog.text.count("which were loaded last") == 1
