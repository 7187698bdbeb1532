# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Messages of a coordinator, without sockets: what one may hold, and what reaches whom in one."""

import contextlib
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq")

from mcore_inference.coordinator import Status
from mcore_inference.coordinator._messages import (
    GREETING_BYTES,
    MAX_FIGURES,
    MAX_NUMBER,
    MAX_REQUEST_BYTES,
    MAX_TOKENS,
    SHORT_BYTES,
    AskStatus,
    EngineReply,
    Failure,
    Heartbeat,
    LoadWeights,
    Partials,
    Refusal,
    Report,
    Stop,
    SubmitRequest,
    WeightBucket,
    WireChunk,
    decode_for_client,
    decode_for_engine,
    decode_incoming,
    encode,
    is_greeting,
    is_too_long,
)
from tests.support.coordinator_core import Group, connect, load, partials, register, reply, submit


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
    # A request has less than what carries records and weights.
    most = "x" * (MAX_REQUEST_BYTES - len(encode(submit(0, "x" * 2**20))) + 2**20)
    assert len(encode(submit(0, most))) == MAX_REQUEST_BYTES == 8 * 2**20
    assert not is_too_long(encode(submit(0, most))) and is_too_long(encode(submit(0, most + "x")))
    assert is_greeting(encode(connect("x" * 4096))) and is_greeting(encode(register()))
    assert not is_greeting(encode(connect("x" * GREETING_BYTES))) and not is_greeting(encode(submit(0)))


def test_no_integer_of_a_message_is_too_large_to_be_counted_on_or_sent() -> None:
    group = Group(engines=2, clients=1)
    for message in (register(weight_version=2**64 - 1), load(version=2**63), submit(2**63), Stop(call=2**63), register(weight_version=-1)):
        with pytest.raises(msgspec.ValidationError):
            decode_incoming(encode(message))
    group.send(b"e2", register("last", weight_version=MAX_NUMBER))
    group.send(b"c0", load())
    (refusal,) = group.got(b"c0", Refusal)
    assert refusal.call == 1 and str(MAX_NUMBER) in refusal.message and not group.got(b"e0", LoadWeights)
    for number in range(8):
        group.send(b"c0", submit(number, budget=2**63))
    group.send(b"c0", AskStatus(call=2))
    encode(group.got(b"c0", Status)[-1])


def test_settings_and_prompts_of_a_request_are_bounded() -> None:
    many = SubmitRequest(request_id=0, prompt="x", sampling_params={f"x{at}": 1 for at in range(MAX_FIGURES + 1)}, stream=False)
    long = SubmitRequest(request_id=0, prompt=[0] * (MAX_TOKENS + 1), sampling_params={}, stream=False)
    for message in (many, long):
        with pytest.raises(msgspec.ValidationError):
            decode_incoming(encode(message))


def deep(levels: int, value: Any = 1) -> Any:
    return deep(levels - 1, [value] if levels % 2 else {"a": value}) if levels else value


@pytest.mark.parametrize("levels", [6, 7, 100])
def test_no_message_is_nested_deeper_than_eight_levels(levels: int) -> None:
    settings = msgspec.msgpack.encode([3, 1, "x", {"new": deep(levels)}, True])
    record = msgspec.msgpack.encode([4, 1, {"new": deep(levels)}])
    for frame, decode in (
        (settings, decode_incoming),
        (settings, decode_for_engine),
        (record, decode_incoming),
        (record, decode_for_client),
    ):
        with contextlib.nullcontext() if levels == 6 else pytest.raises(msgspec.ValidationError, match="got `"):
            decode(frame)


def test_what_cannot_be_sent_ends_its_request_alone() -> None:
    group = Group(engines=1, clients=1)
    group.send(b"c0", submit(3))
    (sent,) = group.got(b"e0", SubmitRequest)
    group._take(group.core.unsendable(b"e0", sent))
    (failure,) = group.got(b"c0", Failure)
    assert failure.request_id == 3 and not failure.is_transient and group.core.num_open_requests == 0
    group._take(group.core.unsendable(b"c0", reply(4)))
    assert group.got(b"c0", Failure)[-1].request_id == 4
    group._take(group.core.unsendable(b"c0", Heartbeat()))


def test_ends_of_a_step_reach_each_client_with_its_tokens_and_once() -> None:
    group = Group(engines=1, clients=2)
    for client, number in ((b"c0", 1), (b"c0", 2), (b"c1", 1)):
        group.send(client, submit(number, stream=True))
    a, b, c = (message.request_id for message in group.got(b"e0", SubmitRequest))
    group.send(b"e0", partials(a, ended=[b, c, 99]))
    ((first,), (second,)) = (group.got(client, Partials) for client in (b"c0", b"c1"))
    assert [part.request_id for part in first.items] == [1] and [end.request_id for end in first.replies] == [2]
    assert not second.items and [end.request_id for end in second.replies] == [1]
    # An end may come with the tokens before it, and comes once.
    group.send(b"e0", partials(a, ended=[a, a, b]))
    last = group.got(b"c0", Partials)[-1]
    assert [part.request_id for part in last.items] == [end.request_id for end in last.replies] == [1]
    assert group.core.num_open_requests == 0
    (engine,) = group.core._status(0, 0.0).engines
    assert engine.finished_requests == 3 and engine.open_tokens == 0


def test_of_a_step_that_cannot_be_sent_only_what_is_the_matter_fails() -> None:
    group = Group(engines=1, clients=1)
    whole = partials(1, ended=[2, 3])
    group._take(group.core.unsendable(b"c0", whole))
    tokens, *ends = group.inbox[b"c0"]
    assert isinstance(tokens, Partials) and tokens.items == whole.items and not tokens.replies
    assert [(type(end), end.request_id) for end in ends] == [(EngineReply, 2), (EngineReply, 3)]  # type: ignore[attr-defined]
    group._take(group.core.unsendable(b"c0", ends[0]))
    assert group.got(b"c0", Failure)[-1].request_id == 2
