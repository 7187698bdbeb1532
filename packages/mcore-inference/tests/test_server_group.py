# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The address that servers of several processes share, and what they count together; tools/tests has processes that serve at one."""

import contextlib
import socket
import time

import pytest

pytest.importorskip("fastapi")

from mcore_inference import PortInUseError
from mcore_inference.server import ServerGroup, _group


def test_nobody_connects_before_the_group_listens_and_then_the_address_is_taken() -> None:
    with contextlib.closing(ServerGroup("127.0.0.1", 0, 2)) as group, contextlib.closing(ServerGroup("127.0.0.1", group.port, 2)) as late:
        for index in (-1, 2):
            with pytest.raises(ValueError, match=f"index={index} must be"):
                group.member(index)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", group.port))
        group.listen()
        socket.create_connection(("127.0.0.1", group.port)).close()
        with pytest.raises(PortInUseError, match=str(group.port)):
            late.listen()
        with pytest.raises(PortInUseError, match=str(group.port)):
            ServerGroup("127.0.0.1", group.port, 1)
    with pytest.raises(ValueError, match="port=65536 must lie in"):
        ServerGroup("127.0.0.1", 65536, 1)
    with pytest.raises(ValueError, match="num_servers=0 must be"):
        ServerGroup("127.0.0.1", 0, 0)
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        ServerGroup("192.0.2.1", 0, 1)


def test_the_queue_of_connections_stays_long_where_servers_accept_one_a_turn() -> None:
    group = ServerGroup("127.0.0.1", 0, 2)
    group.listen()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(group.listener(1))
        # As asyncio does at the start of a server.
        listener.listen(group.accepts)
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", group.port), timeout=1))


def test_counts_are_of_all_servers_and_outlive_one_that_ended() -> None:
    with contextlib.closing(ServerGroup("127.0.0.1", 0, 3)) as group:
        first, second, last = (group.counts(index) for index in range(3))
        for counts, statuses in ((first, (200, 200, 404)), (last, (200, 599, 100))):
            for status in statuses:
                counts.count_response(status)
        first.change_connections(1)
        last.change_connections(2)
        last.change_connections(-1)
        last.beat()
        assert second.responses() == {100: 1, 200: 3, 404: 1, 599: 1} and second.connections == 2
        assert [counts.num_beats for counts in (first, second, last)] == [0, 0, 1]
        last.forget()
        assert first.connections == 1 and first.responses()[599] == 1 and last.num_beats == 0


def test_a_connection_is_left_to_servers_with_fewer_for_a_moment() -> None:
    group = ServerGroup("127.0.0.1", 0, 2)
    group.listen()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(group.listener(0))
        listener.setblocking(False)
        own, other = group.counts(0), group.counts(1)
        own.change_connections(1)

        def seconds_until_taken() -> float:
            stack.enter_context(socket.create_connection(("127.0.0.1", group.port)))
            begin = time.monotonic()
            while time.monotonic() < begin + 10:
                with contextlib.suppress(BlockingIOError):
                    stack.enter_context(listener.accept()[0])
                    return time.monotonic() - begin
            raise AssertionError("it was never taken")

        # The other does not serve yet.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_group, "_LEFT_S", 5.0)
            assert seconds_until_taken() < 5
        other.beat()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_group, "_LEFT_S", 0.2)
            assert [seconds_until_taken() >= 0.2 for _ in range(2)] == [True, True]
            other.change_connections(1)
            # Equally many.
            patch.setattr(_group, "_LEFT_S", 5.0)
            assert seconds_until_taken() < 5
