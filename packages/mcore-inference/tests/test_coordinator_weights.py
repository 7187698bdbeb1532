# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights that a coordinator passes on to its engines, and who is served by which."""

import pytest

pytest.importorskip("zmq")

from mcore_inference.coordinator import CoordinatorConfig
from mcore_inference.coordinator._messages import (
    Disconnect,
    EngineReply,
    Failure,
    Heartbeat,
    LoadWeights,
    Pause,
    Refusal,
    SignalAck,
    SubmitRequest,
    WeightAck,
    WeightBucket,
)
from tests.support.coordinator_core import Group, acknowledge, bucket, load, register, reply, submit


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


def test_a_load_that_waits_is_dropped_when_its_client_gives_it_up() -> None:
    group = Group(engines=1, clients=2)
    group.send(b"c1", load(call=1))
    group.send(b"c0", load(call=1))
    group.send(b"c0", Pause(call=2))
    group.send(b"c0", bucket(0, "aborted", call=1))
    group.send(b"c0", bucket(0, "aborted", call=2))
    assert [refusal.call for refusal in group.got(b"c0", Refusal)] == [2]
    acknowledge(group, b"e0")
    group.send(b"c1", bucket(1, "whole", call=1))
    acknowledge(group, b"e0")
    assert group.got(b"c1", WeightAck)[-1].is_over
    # What waited behind it begins, and no version was given to it.
    assert len(group.got(b"e0", LoadWeights)) == 1 and group.got(b"e0", Pause)
    group.send(b"c1", load(call=2))
    group.send(b"e0", SignalAck(call=group.got(b"e0", Pause)[-1].call))
    assert group.got(b"e0", LoadWeights)[-1].version == 2


def test_weights_need_an_engine() -> None:
    group = Group(clients=1)
    group.send(b"c0", load())
    assert "there is no engine" in group.got(b"c0", Refusal)[-1].message
    group.send(b"e0", register("dp-0"))
    group.send(b"c0", load(call=2))
    group.lose(b"e0")
    last = group.got(b"c0", Refusal)[-1]
    assert last.call == 2 and "dp-0: its connection is gone" in last.message


def load_all(group: Group, *peers: bytes, version: int = -1, call: int = 1) -> None:
    """A whole load of weights, which these engines take."""
    group.send(b"c0", load(call, version))
    acknowledge(group, *peers)
    group.send(b"c0", bucket(1, "whole", call))
    acknowledge(group, *peers)
    assert group.got(b"c0", WeightAck)[-1].is_over and not group.got(b"c0", WeightAck)[-1].error


def test_an_engine_that_started_again_serves_nothing_until_the_weights_are_loaded_again(caplog: pytest.LogCaptureFixture) -> None:
    group = Group(engines=1, clients=1)
    load_all(group, b"e0", version=7)
    group.send(b"c0", submit(1))
    group.lose(b"e0")
    assert group.core.num_open_requests == 1 and not group.got(b"c0", Failure)
    # The start weights of its successor would answer the request that waited, and every later one.
    group.send(b"e1", register("dp-0"))
    group.send(b"c0", submit(2))
    failures = group.got(b"c0", Failure)
    assert [failure.request_id for failure in failures] == [1, 2] and not group.got(b"e1", SubmitRequest)
    assert {(failure.kind, failure.is_transient) for failure in failures} == {("StaleWeightsError", True)}
    assert (
        "no engine has the weights of version 7, which were loaded last" in failures[0].message and "load them again" in failures[0].message
    )
    assert caplog.text.count("requests are refused until weights are loaded again") == 1
    # Requests wait for a load that is on its way; its number is beyond that of the lost weights.
    group.send(b"c0", load(call=2))
    group.send(b"c0", submit(3))
    acknowledge(group, b"e1")
    group.send(b"c0", bucket(1, "whole", call=2))
    assert not group.got(b"e1", SubmitRequest) and group.core.num_open_requests == 1
    acknowledge(group, b"e1")
    assert group.got(b"c0", WeightAck)[-1].version == 8
    (request,) = group.got(b"e1", SubmitRequest)
    group.send(b"e1", reply(request.request_id))
    assert [answer.request_id for answer in group.got(b"c0", EngineReply)] == [3] and group.core.num_open_requests == 0


def test_requests_that_wait_for_a_load_fail_when_it_does() -> None:
    group = Group(engines=1, clients=1)
    load_all(group, b"e0")
    group.lose(b"e0")
    group.send(b"e1", register("dp-0"))
    group.send(b"c0", load(call=2))
    group.send(b"c0", submit(1))
    acknowledge(group, b"e1", error="WeightLoadError: w has shape [1]")
    group.send(b"c0", bucket(1, "whole", call=2))
    acknowledge(group, b"e1", error="it was given up")
    assert group.got(b"c0", WeightAck)[-1].is_over
    assert [failure.kind for failure in group.got(b"c0", Failure)] == ["StaleWeightsError"] and not group.got(b"e1", SubmitRequest)


def test_requests_that_wait_for_a_load_wait_for_the_next_one_too() -> None:
    group = Group(engines=1, clients=2)
    load_all(group, b"e0")
    group.lose(b"e0")
    group.send(b"e1", register("dp-0"))
    group.send(b"c0", load(call=2))
    group.send(b"c0", submit(1))
    group.send(b"c1", load(call=1))
    acknowledge(group, b"e1", error="WeightLoadError: w has shape [1]")
    acknowledge(group, b"e1", error="it was given up")
    assert group.got(b"c0", WeightAck)[-1].is_over and not group.got(b"c0", Failure) and group.core.num_open_requests == 1
    acknowledge(group, b"e1")
    group.send(b"c1", bucket(1, "whole"))
    acknowledge(group, b"e1")
    assert group.got(b"c1", WeightAck)[-1].is_over and len(group.got(b"e1", SubmitRequest)) == 1


def load_one_of_two(group: Group) -> None:
    """The first engine has taken all weights of a load of both, the second has not said so."""
    group.send(b"c0", load(call=2))
    acknowledge(group, b"e0", b"e1")
    group.send(b"c0", bucket(1, "whole", call=2))
    acknowledge(group, b"e0")


def test_weights_that_only_some_engines_took_stay_the_ones_to_serve() -> None:
    group = Group(engines=2, clients=1)
    load_all(group, b"e0", b"e1", version=3)
    # One is lost with the next weights on their way, the other has them: the client is told, and they are what is served.
    load_one_of_two(group)
    group.lose(b"e1")
    assert "engines were lost while weights were loaded" in group.got(b"c0", Refusal)[-1].message
    group.send(b"e2", register("dp-1", weight_version=3))
    group.send(b"c0", submit(1))
    assert len(group.got(b"e0", SubmitRequest)) == 1 and not group.got(b"e2", SubmitRequest)
    group.lose(b"e0")
    assert [failure.kind for failure in group.got(b"c0", Failure)] == ["StaleWeightsError"]


def test_after_a_load_that_failed_everywhere_the_acknowledged_weights_serve() -> None:
    group = Group(engines=2, clients=1)
    load_all(group, b"e0", b"e1", version=3)
    group.send(b"c0", load(call=2))
    acknowledge(group, b"e0", b"e1", error="WeightLoadError: w has shape [1]")
    acknowledge(group, b"e0", b"e1", error="it was given up")
    assert group.got(b"c0", WeightAck)[-1].is_over and group.got(b"c0", WeightAck)[-1].error
    # One started again has those of the start; the other has the acknowledged ones.
    group.lose(b"e1")
    group.send(b"e2", register("dp-1"))
    for number in range(4):
        group.send(b"c0", submit(number))
    assert len(group.got(b"e0", SubmitRequest)) == 4 and not group.got(b"e2", SubmitRequest)


def test_weights_of_a_load_that_failed_are_never_taken_for_those_of_the_next() -> None:
    group = Group(engines=2, clients=1)
    load_all(group, b"e0", b"e1", version=3)
    # One engine takes them and is silent then, the other refuses them.
    load_one_of_two(group)
    acknowledge(group, b"e1", error="WeightLoadError: w has shape [1]")
    taken = group.got(b"e0", LoadWeights)[-1].version
    group.lose(b"e0")
    load_all(group, b"e1", call=3)
    group.send(b"e2", register("dp-0", weight_version=taken))
    for number in range(4):
        group.send(b"c0", submit(number))
    assert len(group.got(b"e1", SubmitRequest)) == 4 and not group.got(b"e2", SubmitRequest)


def test_a_load_without_a_version_never_gets_one_that_was_given() -> None:
    group = Group(engines=1, clients=1)

    def loaded(version: int = -1) -> int:
        group.send(b"c0", load(version=version))
        acknowledge(group, b"e0")
        group.send(b"c0", bucket(1, "whole"))
        acknowledge(group, b"e0")
        version = group.got(b"c0", WeightAck)[-1].version
        return version

    # Back to the weights of the third one, and on; and behind one that failed.
    assert [loaded(), loaded(7), loaded(3), loaded(), loaded(3)] == [1, 7, 3, 8, 3]
    group.send(b"c0", load(version=20))
    acknowledge(group, b"e0", error="broken")
    acknowledge(group, b"e0")
    assert [loaded(3), loaded()] == [3, 21]
