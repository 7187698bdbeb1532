# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters that a coordinator passes on to its engines: all have one or none has, and those that come later catch up."""

from typing import Any

import pytest

pytest.importorskip("zmq")

from mcore_inference.coordinator import CoordinatorConfig, CoordinatorSecurity, Status, _loras
from mcore_inference.coordinator._messages import (
    Abort,
    AskStatus,
    Disconnect,
    Failure,
    Heartbeat,
    Leave,
    LoadLora,
    Pause,
    Refusal,
    SignalAck,
    Stop,
    SubmitRequest,
    UnloadLora,
    WeightAck,
    WeightBucket,
    WireChunk,
    encode,
    is_greeting,
)
from tests.support.coordinator_core import Group, acknowledge, bucket, load, register, reply, submit


def load_lora(call: int = 1, name: str = "sql") -> LoadLora:
    return LoadLora(call=call, name=name, rank=2, alpha=4.0)


def last(group: Group, peer: bytes) -> Any:
    """What an engine got last of adapters."""
    return [message for message in group.inbox[peer] if isinstance(message, LoadLora | UnloadLora | WeightBucket)][-1]


def obey(group: Group, *peers: bytes, error: str = "") -> None:
    """Engines do all that they were told of adapters; an error is that of the end of it."""
    for peer in peers:
        while True:
            message = last(group, peer)
            is_end = isinstance(message, UnloadLora) or getattr(message, "end", "") == "whole"
            fault = error if is_end else ""
            if isinstance(message, UnloadLora):
                group.send(peer, SignalAck(call=message.call, error=fault))
            else:
                group.send(peer, WeightAck(call=message.call, index=getattr(message, "index", 0), error=fault))
            if last(group, peer) is message:
                break


def send_lora(group: Group, name: str = "sql", call: int = 1) -> None:
    """A client sends all of an adapter."""
    group.send(b"c0", load_lora(call, name))
    for index, end in ((1, ""), (2, "whole")):
        assert group.got(b"c0", WeightAck)[-1].index == index - 1
        group.send(b"c0", bucket(index, end, call))


def answer(group: Group) -> WeightAck:
    return group.got(b"c0", WeightAck)[-1]


def names(group: Group) -> list[str]:
    group.send(b"c0", AskStatus(call=99))
    return group.got(b"c0", Status)[-1].loras


def loaded(engines: int = 2, *adapters: str) -> Group:
    group = Group(engines=engines, clients=1)
    for number, name in enumerate(adapters or ("sql",)):
        send_lora(group, name, call=100 + number)
        obey(group, *(b"e%d" % index for index in range(engines)))
        assert answer(group).is_over and not answer(group).error
    return group


def test_an_adapter_can_be_named_once_all_engines_have_it() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"c0", submit(1, lora="sql"))
    (failure,) = group.got(b"c0", Failure)
    assert (failure.kind, failure.is_transient) == ("UnknownLoraError", False)
    assert failure.message == "lora='sql' is not loaded; no adapter is loaded"
    send_lora(group)
    (begin,) = group.got(b"e0", LoadLora)
    assert (begin.name, begin.rank, begin.alpha) == ("sql", 2, 4.0) and begin.load
    obey(group, b"e0")
    assert [len(part.chunks) for part in group.got(b"e0", WeightBucket)] == [1, 1]
    # Half of the engines is not all; the model alone is served meanwhile.
    assert not answer(group).is_over and names(group) == []
    group.send(b"c0", submit(2, lora="sql"))
    assert group.got(b"c0", Failure)[-1].request_id == 2
    group.send(b"c0", submit(3))
    assert len(group.got(b"e0", SubmitRequest) + group.got(b"e1", SubmitRequest)) == 1
    obey(group, b"e1")
    assert answer(group).is_over and not answer(group).error and names(group) == ["sql"]
    for number in range(4, 8):
        group.send(b"c0", submit(number, lora="sql"))
    assert {message.lora for peer in (b"e0", b"e1") for message in group.got(peer, SubmitRequest)[-2:]} == {"sql"}
    group.send(b"c0", submit(8, lora="chat"))
    assert group.got(b"c0", Failure)[-1].message == "lora='chat' is not loaded; loaded are 'sql'"


def test_an_adapter_that_one_engine_refuses_has_none() -> None:
    group = Group(engines=3, clients=1)
    send_lora(group)
    obey(group, b"e0")
    obey(group, b"e1", error="LoraLoadError: rank=2 is above 1")
    assert not answer(group).is_over
    obey(group, b"e2")
    assert answer(group).is_over and names(group) == []
    assert answer(group).error == "LoraLoadError: no engine has lora='sql' (dp-1: LoraLoadError: rank=2 is above 1)"
    # Those that had it forget it; the one that had not is told nothing.
    assert all(isinstance(last(group, peer), UnloadLora) for peer in (b"e0", b"e2"))
    assert not group.got(b"e1", UnloadLora) and group.core.num_engines == 3
    # The next load of the name waits on each engine for that, and has another number.
    send_lora(group, call=2)
    assert len(group.got(b"e0", LoadLora)) == 1 and len(group.got(b"e1", LoadLora)) == 2
    obey(group, b"e0", b"e1", b"e2")
    assert answer(group).is_over and not answer(group).error and names(group) == ["sql"]
    loads = [[message.load for message in group.got(peer, LoadLora)] for peer in (b"e0", b"e1", b"e2")]
    assert loads[0] == loads[1] == loads[2] and len(set(loads[0])) == 2


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_engine_that_is_late_or_lost_in_a_load_is_named_and_none_has_the_adapter(is_lost: bool) -> None:
    group = Group(CoordinatorConfig(load_timeout_s=20), engines=2, clients=1)
    send_lora(group)
    obey(group, b"e0")
    if is_lost:
        group.lose(b"e1")
        reason = "its connection is gone"
    else:
        for _ in range(21):
            group.now += 1.0
            for peer in (b"e0", b"e1", b"c0"):
                group.send(peer, Heartbeat())
            group.wait(0)
        reason = "it did not answer load_lora of 'sql' within 20 s"
    # The adapter may be as good as any.
    assert group.got(b"c0", Refusal)[-1].message == f"no engine has lora='sql' (dp-1: {reason})" and not answer(group).is_over
    assert group.core.num_engines == 1 and isinstance(last(group, b"e0"), UnloadLora) and names(group) == []


def test_a_client_that_sends_no_more_or_leaves_ends_its_load_before_an_engine_hears_of_it() -> None:
    group = Group(CoordinatorConfig(load_timeout_s=20), engines=1, clients=2)
    group.send(b"c0", load_lora())
    group.send(b"c1", load_lora(name="other"))
    # Of another client, and out of order.
    group.send(b"c1", bucket(1))
    group.send(b"c0", bucket(2))
    assert (
        "no load waits" in group.got(b"c1", Refusal)[-1].message and "bucket 2 came instead of 1" in group.got(b"c0", Refusal)[-1].message
    )
    for _ in range(21):
        group.now += 1.0
        for peer in (b"e0", b"c0", b"c1"):
            group.send(peer, Heartbeat())
        group.wait(0)
    assert answer(group).error == "LoraLoadError: the client sent no weights for 20 s" and answer(group).is_over
    # The one that waited goes on, and leaves.
    assert group.got(b"c1", WeightAck)[-1].bucket_bytes == 16 * 2**20
    group.send(b"c0", load_lora(call=3, name="third"))
    assert answer(group).call == 1
    group.send(b"c1", Disconnect())
    assert answer(group).call == 3 and not answer(group).is_over
    group.send(b"c0", bucket(0, "aborted", call=3))
    assert not group.got(b"e0", LoadLora)
    send_lora(group, call=4)
    assert group.got(b"e0", LoadLora)


def test_a_load_that_waits_is_dropped_when_its_client_gives_it_up() -> None:
    group = Group(engines=1, clients=2)
    group.send(b"c1", load_lora(call=1, name="first"))
    group.send(b"c0", load_lora(call=1, name="second"))
    group.send(b"c0", UnloadLora(call=2, name="nothing"))
    group.send(b"c1", load_lora(call=2, name="third"))
    # Of the call that waits, and of none.
    for number in (1, 7, 2):
        group.send(b"c0", bucket(0, "aborted", call=number))
    assert [refusal.call for refusal in group.got(b"c0", Refusal)] == [7, 2]
    assert not group.got(b"c0", WeightAck)
    group.send(b"c1", bucket(0, "aborted", call=1))
    # Nobody waits for buckets of it.
    assert [(message.call, message.is_over) for message in group.got(b"c0", WeightAck)] == [(2, True)]
    assert group.got(b"c1", WeightAck)[-1].call == 2 and not group.got(b"c1", WeightAck)[-1].is_over


def test_a_name_that_is_loaded_is_refused_until_it_is_unloaded() -> None:
    group = loaded()
    group.send(b"c0", load_lora(call=2))
    assert answer(group).is_over and answer(group).error.startswith("LoraLoadError: lora='sql' is loaded; unload it first")
    group.send(b"c0", UnloadLora(call=3, name="chat"))
    assert answer(group).error == "UnknownLoraError: lora='chat' is not loaded; loaded are 'sql'"
    group.send(b"c0", UnloadLora(call=4, name="sql"))
    # From the call on no request may name it.
    group.send(b"c0", submit(1, lora="sql"))
    assert group.got(b"c0", Failure)[-1].kind == "UnknownLoraError"
    obey(group, b"e0")
    assert answer(group).call == 3
    obey(group, b"e1")
    assert (answer(group).call, answer(group).error, answer(group).is_over) == (4, "", True) and names(group) == []


def test_an_adapter_that_requests_use_stays() -> None:
    group = loaded()
    group.send(b"c0", submit(1, lora="sql"))
    group.send(b"c0", submit(2))
    group.send(b"c0", UnloadLora(call=2, name="sql"))
    assert answer(group).error.startswith("LoraInUseError: lora='sql' is used by 1 requests")
    engine = b"e0" if group.got(b"e0", SubmitRequest) and group.got(b"e0", SubmitRequest)[0].lora else b"e1"
    group.send(b"c0", Abort(request_id=1))
    group.send(b"c0", UnloadLora(call=3, name="sql"))
    # Behind the end of the request.
    kinds = [type(message) for message in group.inbox[engine]]
    assert kinds.index(Abort) < kinds.index(UnloadLora)
    # An engine that others use too may refuse; then all keep it.
    obey(group, b"e0")
    obey(group, b"e1", error="LoraInUseError: 1 requests use the adapter sql")
    assert answer(group).error == "LoraInUseError: all engines keep lora='sql' (dp-1: LoraInUseError: 1 requests use the adapter sql)"
    assert names(group) == ["sql"]
    # The one that forgot it gets no request until it has it again.
    before = len(group.got(b"e0", SubmitRequest))
    for number in range(3, 7):
        group.send(b"c0", submit(number, lora="sql"))
    assert len(group.got(b"e0", SubmitRequest)) == before and isinstance(last(group, b"e0"), LoadLora)
    obey(group, b"e0")
    for number in range(7, 17):
        group.send(b"c0", submit(number, lora="sql"))
    assert len(group.got(b"e0", SubmitRequest)) > before


def test_an_unload_that_fails_otherwise_is_not_said_to_be_one_of_an_adapter_in_use() -> None:
    group = loaded()
    group.send(b"c0", UnloadLora(call=2, name="sql"))
    obey(group, b"e0", error="LoraInUseError: 1 requests use the adapter sql")
    obey(group, b"e1", error="RuntimeError: out of memory")
    (refusal,) = group.got(b"c0", Refusal)
    assert refusal.call == 2 and names(group) == ["sql"]
    reasons = "dp-0: LoraInUseError: 1 requests use the adapter sql; dp-1: RuntimeError: out of memory"
    assert refusal.message == f"unload_lora failed, and all engines keep lora='sql' ({reasons})"


def test_a_load_is_refused_as_one_without_engines_where_these_leave_before_its_last_bucket() -> None:
    group = Group(engines=1, clients=1)
    group.send(b"c0", load_lora())
    group.lose(b"e0")
    group.send(b"c0", bucket(1, "whole"))
    assert group.got(b"c0", Refusal)[-1].message == "there is no engine that could have adapters"
    group.send(b"e1", register("dp-1"))
    send_lora(group, call=2)
    obey(group, b"e1")
    assert answer(group).is_over and not answer(group).error


def test_an_engine_that_is_lost_in_an_unload_is_named_and_the_others_have_forgotten_it() -> None:
    group = loaded()
    group.send(b"c0", UnloadLora(call=2, name="sql"))
    obey(group, b"e0")
    group.lose(b"e1")
    (refusal,) = group.got(b"c0", Refusal)
    assert refusal.call == 2
    assert refusal.message == "unload_lora took effect without engines that were lost (dp-1: its connection is gone)"
    assert names(group) == []


def test_an_engine_that_comes_later_gets_all_adapters_before_its_first_request() -> None:
    group = loaded(1, "sql", "chat")
    group.send(b"e1", register("dp-1"))
    assert group.core.num_engines == 2
    for number in range(4):
        group.send(b"c0", submit(number))
    assert len(group.got(b"e0", SubmitRequest)) == 4 and not group.got(b"e1", SubmitRequest)
    obey(group, b"e1")
    assert [message.name for message in group.got(b"e1", LoadLora)] == ["sql", "chat"]
    group.send(b"c0", submit(4, lora="chat"))
    assert [message.lora for message in group.got(b"e1", SubmitRequest)] == ["chat"]
    # All others are lost: a successor is waited for, and its adapters.
    group.lose(b"e0")
    group.lose(b"e1")
    group.inbox[b"c0"].clear()
    group.send(b"c0", submit(5, lora="chat"))
    group.send(b"e2", register("dp-0", worker="two"))
    assert not group.got(b"e2", SubmitRequest) and not group.got(b"c0", Failure)
    obey(group, b"e2")
    assert group.got(b"e2", SubmitRequest)[-1].lora == "chat" and not group.got(b"c0", Failure)
    loads = {message.name: message.load for message in group.got(b"e2", LoadLora)}
    # One that was only away has them; what it has of others is forgotten.
    group.lose(b"e2")
    group.send(b"e2", register("dp-0", worker="two", registration=1, loras={**loads, "old": "another-coordinator"}))
    group.inbox[b"e2"].clear()
    group.send(b"c0", submit(50, lora="sql"))
    assert [message.request_id for message in group.got(b"e2", SubmitRequest)] and not group.got(b"e2", LoadLora)


def test_requests_wait_for_an_engine_that_is_given_its_adapters_however_long_that_takes() -> None:
    group = loaded(1)

    def pass_time(seconds: int) -> None:
        for _ in range(seconds):
            group.now += 1.0
            for peer in (b"e1", b"c0"):
                group.send(peer, Heartbeat())
            group.wait(0)

    group.lose(b"e0")
    group.send(b"c0", submit(1))
    pass_time(50)
    group.send(b"e1", register("dp-0", worker="w"))
    begin = group.got(b"e1", LoadLora)[-1]
    pass_time(100)
    assert not group.got(b"c0", Failure)
    group.send(b"e1", WeightAck(call=begin.call, index=0))
    pass_time(100)
    obey(group, b"e1")
    assert group.got(b"e1", SubmitRequest) and not group.got(b"c0", Failure)
    group.send(b"c0", Abort(request_id=1))
    # Without an engine the time counts, from when there was one.
    group.lose(b"e1")
    group.send(b"e1", register("dp-0", worker="w"))
    group.send(b"c0", submit(2))
    pass_time(100)
    group.lose(b"e1")
    pass_time(59)
    assert not group.got(b"c0", Failure)
    pass_time(2)
    assert group.got(b"c0", Failure)[-1].message == "there was no engine for 60 s"


def test_what_an_engine_brings_of_another_coordinator_is_forgotten() -> None:
    group = loaded(1)
    ours = group.got(b"e0", LoadLora)[-1].load
    group.send(b"e1", register("dp-1", loras={"sql": "other", "old": "more"}))
    obey(group, b"e1")
    commands = [(type(message), message.name, message.load) for message in group.inbox[b"e1"] if isinstance(message, LoadLora | UnloadLora)]
    assert commands == [(UnloadLora, "sql", "other"), (UnloadLora, "old", "more"), (LoadLora, "sql", ours)]


def test_an_engine_that_cannot_take_the_adapters_of_the_others_is_refused_by_name() -> None:
    group = loaded(1)
    hello = register("dp-1", worker="narrow")
    group.send(b"e1", hello)
    obey(group, b"e1", error="LoraLoadError: this engine has no slots for adapters")
    assert "you were given up: load_lora of 'sql' failed there" in group.got(b"e1", Refusal)[-1].message
    assert group.core.num_engines == 1
    group.send(b"e1", hello)
    text = "it cannot take the adapter 'sql' that other engines have: LoraLoadError: this engine has no slots for adapters"
    assert group.got(b"e1", Refusal)[-1].message == text and group.core.num_engines == 1
    group.send(b"c0", UnloadLora(call=7, name="sql"))
    obey(group, b"e0")
    group.send(b"e1", hello)
    assert group.core.num_engines == 2


def test_adapters_and_their_names_are_bounded() -> None:
    group = Group(engines=1, clients=1)
    for number in range(1, 41):
        send_lora(group, f"{number:03}" + "\N{SNOWMAN}" * 250, call=number)
        obey(group, b"e0")
    group.send(b"c0", load_lora(41, "x" * 256))
    assert answer(group).is_over and "is the last of 41 names that are too long together" in answer(group).error
    # All of them are in the greeting of an engine that comes back.
    engine = group.core._group.engines[b"e0"]
    assert is_greeting(encode(register("x" * 64, stats={f"{at:064}": 1e17 for at in range(128)}, loras=engine.loras)))


def test_what_takes_memory_and_brings_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = WireChunk(name="n" * 300, dtype="float32", shape=[0], offsets=None, data=b"")
    group = Group(engines=1, clients=1)
    for number, chunks in enumerate(([], [chunk])):
        group.send(b"c0", load_lora(call=number))
        group.send(b"c0", WeightBucket(call=number, index=1, chunks=chunks, end=""))
        assert answer(group).is_over and answer(group).error == "LoraLoadError: bucket 1 or a chunk of it is empty"
    # Names and shapes count, too.
    monkeypatch.setattr(_loras, "_MAX_BYTES", 2**20)
    one = WireChunk(name="n" * 300, dtype="uint8", shape=[1], offsets=[0], data=b"a")
    group.send(b"c0", load_lora(call=5))
    for index in range(1, 100):
        group.send(b"c0", WeightBucket(call=5, index=index, chunks=[one] * 50, end=""))
        if answer(group).is_over:
            break
    assert 10 < index < 50 and "are more than the 1048576 that are kept; unload one" in answer(group).error
    assert not group.got(b"e0", LoadLora)


def test_adapters_need_an_engine_and_a_client_that_may() -> None:
    group = Group(CoordinatorConfig(security=CoordinatorSecurity(control_secret="key")), engines=1, clients=1)
    for message in (load_lora(), UnloadLora(call=2, name="sql")):
        group.send(b"c0", message)
        refusal = group.got(b"c0", Refusal)[-1]
        assert refusal.call == message.call and "_lora needs control_secret" in refusal.message
    group = Group(clients=1)
    group.send(b"c0", load_lora())
    assert group.got(b"c0", Refusal)[-1].message == "there is no engine that could have adapters"


def test_draining_engines_are_not_waited_for_and_a_stop_ends_a_load() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"e1", Leave(call=1))
    send_lora(group)
    assert not group.got(b"e1", LoadLora)
    obey(group, b"e0")
    assert answer(group).is_over and not answer(group).error
    group.send(b"e1", Disconnect())
    group.send(b"e2", register("dp-2"))
    send_lora(group, "chat", call=2)
    obey(group, b"e0")
    # Its own adapter came first; it leaves with the second one open, and is missed by nobody.
    group.send(b"e2", Leave(call=1))
    group.send(b"e2", Disconnect())
    assert answer(group).call == 2 and answer(group).is_over and not answer(group).error
    send_lora(group, "third", call=3)
    group.send(b"c0", Stop(call=4))
    stop = group.got(b"e0", Stop)[-1]
    group.send(b"e0", SignalAck(call=stop.call))
    group.wait(1.0)
    refusal = group.got(b"c0", Refusal)[-1]
    assert refusal.call == 3 and "the engines were stopped" in refusal.message


def test_as_many_as_may_wait_are_refused_one_behind_the_other() -> None:
    group = loaded(1)
    group.send(b"c0", load_lora(2, "chat"))
    for call in range(3, 1027):
        group.send(b"c0", UnloadLora(call=call, name="nothing") if call % 2 else load_lora(call))
    group.send(b"c0", load_lora(2000, "one more"))
    assert "1024 changes of adapters wait already" in group.got(b"c0", Refusal)[-1].message
    assert answer(group).call == 2
    group.send(b"c0", bucket(0, "aborted", call=2))
    answers = group.got(b"c0", WeightAck)[-1024:]
    assert [message.call for message in answers] == list(range(3, 1027)) and all(message.error and message.is_over for message in answers)
    send_lora(group, "chat", call=3000)
    obey(group, b"e0")
    assert answer(group).call == 3000 and not answer(group).error


def test_an_engine_that_begins_to_drain_is_waited_for_no_longer_than_for_what_it_has_begun() -> None:
    group = loaded(1, "sql", "chat")
    group.send(b"e1", register("dp-1"))
    send_lora(group, "third", call=5)
    obey(group, b"e0")
    # It has yet to get the two of the others.
    assert not answer(group).is_over and group.got(b"e1", LoadLora)[-1].name == "sql"
    group.send(b"e1", Leave(call=1))
    group.wait(0.1)
    assert not answer(group).is_over
    obey(group, b"e1", error="LoraLoadError: it has no room")
    assert (answer(group).call, answer(group).is_over, answer(group).error) == (5, True, "")
    # Requests that it has go on.
    assert not group.got(b"e1", Refusal) and len(group.got(b"e1", LoadLora)) == 1


def test_weights_and_signals_go_on_beside_a_load_of_an_adapter() -> None:
    group = Group(engines=1, clients=2)
    send_lora(group)
    group.send(b"c1", load(call=5))
    acknowledge(group, b"e0")
    group.send(b"c1", bucket(1, "whole", call=5))
    # Each acknowledgement is of its own.
    ours = group.got(b"e0", LoadLora)[-1]
    group.send(b"e0", WeightAck(call=ours.call, index=0))
    acknowledged = [message for message in group.got(b"e0", WeightBucket) if message.call == ours.call]
    weights = [message for message in group.got(b"e0", WeightBucket) if message.call != ours.call]
    assert [message.index for message in acknowledged] == [1] and [message.end for message in weights] == ["whole"]
    group.send(b"e0", WeightAck(call=weights[0].call, index=1, version=1))
    assert group.got(b"c1", WeightAck)[-1].is_over and group.got(b"c1", WeightAck)[-1].version == 1
    group.send(b"c1", Pause(call=6))
    assert group.got(b"e0", Pause)
    group.send(b"e0", WeightAck(call=ours.call, index=1))
    obey(group, b"e0")
    assert answer(group).is_over and not answer(group).error


@pytest.mark.parametrize("is_weights_first", [True, False])
@pytest.mark.parametrize("kind", [LoadLora, UnloadLora])
def test_engines_that_take_weights_change_adapters_behind_them_and_are_not_late(kind: type, is_weights_first: bool) -> None:
    group = Group(CoordinatorConfig(load_timeout_s=20, signal_timeout_s=10), engines=2, clients=2)
    send_lora(group, call=100)
    obey(group, b"e0", b"e1")

    def begin_weights() -> None:
        group.send(b"c1", load(call=5))
        acknowledge(group, b"e0", b"e1")

    def pass_time(seconds: int) -> None:
        for _ in range(seconds):
            group.now += 1.0
            for peer in (b"e0", b"e1", b"c0", b"c1"):
                group.send(peer, Heartbeat())
            group.wait(0)

    if is_weights_first:
        begin_weights()
    if kind is LoadLora:
        send_lora(group, "chat")
    else:
        group.send(b"c0", UnloadLora(call=1, name="sql"))
    told = {peer: last(group, peer) for peer in (b"e0", b"e1")}
    if not is_weights_first:
        begin_weights()
    for index, end in ((1, ""), (2, ""), (3, ""), (4, "whole")):
        pass_time(9)
        group.send(b"c1", bucket(index, end, call=5))
        pass_time(9)
        acknowledge(group, b"e0", b"e1")
        assert group.core.num_engines == 2
    assert group.got(b"c1", WeightAck)[-1].is_over and not group.got(b"c1", WeightAck)[-1].error
    # From here on each has the time of the change, and not more.
    pass_time(9)
    group.inbox[b"e0"].append(told[b"e0"])
    obey(group, b"e0")
    assert group.core.num_engines == 2 and (answer(group).call, answer(group).is_over) != (1, True)
    pass_time(12)
    assert group.core.num_engines == 1


def test_a_beginning_belongs_to_the_load_of_the_adapter_that_computed_it() -> None:
    group = loaded(4)
    prompt = list(range(64))

    def served_by(number: int, lora: str | None) -> bytes:
        before = {peer: len(group.got(peer, SubmitRequest)) for peer in (b"e0", b"e1", b"e2", b"e3")}
        group.send(b"c0", submit(number, prompt, lora=lora))
        (peer,) = [peer for peer in before if len(group.got(peer, SubmitRequest)) > before[peer]]
        group.send(peer, reply(group.got(peer, SubmitRequest)[-1].request_id))
        return peer

    first = served_by(1, None)
    assert {served_by(number, None) for number in range(2, 6)} == {first}
    # Of four idle engines each is as good for another adapter; then it is the one that had it.
    second = served_by(6, "sql")
    assert {served_by(number, "sql") for number in range(7, 11)} == {second}
    blocks = group.core._requests._router._known
    assert not set(blocks[first]) & set(blocks[second]) or first == second
    assert sum(map(len, blocks.values())) == 8
    group.send(b"c0", UnloadLora(call=2, name="sql"))
    obey(group, b"e0", b"e1", b"e2", b"e3")
    send_lora(group, call=3)
    obey(group, b"e0", b"e1", b"e2", b"e3")
    served_by(11, "sql")
    assert sum(map(len, group.core._requests._router._known.values())) == 12
