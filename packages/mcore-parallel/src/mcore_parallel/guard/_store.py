# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A store whose calls end whatever becomes of the network, and what the ranks of a watched run tell each other through it."""

import json
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from mcore_parallel.guard._report import RankStatus


class StoreSilentError(RuntimeError):
    """The store did not answer in time: its host is gone, or the network between is cut."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"the store gave no answer within {timeout_s:g} s; its host is gone, or the network to it")


class _Request:
    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name, self.arguments = name, arguments
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None


class TimedStore:
    """Requests to a store, each waited for no longer than ``timeout_s``, from any thread.

    A request over a connection that was cut without a word never returns, whatever time-out the store has. So a thread of its own
    makes them, over a connection of its own, and whoever asks waits with a limit. A request that comes back late is forgotten; until
    it does, each further one has ``timeout_s``, so that a network that heals is used again.

    Args:
        store: reached by all ranks.
        prefix: of the keys.
        timeout_s: limit of one request.
    """

    def __init__(self, store: Store, prefix: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._last: _Request | None = None
        arguments = (store, prefix, timeout_s, self._requests)
        threading.Thread(target=_serve, args=arguments, name="mcore-store", daemon=True).start()
        weakref.finalize(self, self._requests.put, None)

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._ask("get", key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that are there."""
        return self._ask("multi_get", list(keys)) if keys else []

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._ask("check", list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def _ask(self, name: str, *arguments: Any) -> Any:
        deadline = time.monotonic() + self._timeout_s
        if not self._lock.acquire(timeout=self._timeout_s):
            raise StoreSilentError(self._timeout_s)
        try:
            if self._last is not None and not self._last.done.wait(max(0.0, deadline - time.monotonic())):
                raise StoreSilentError(self._timeout_s)
            request = self._last = _Request(name, arguments)
            self._requests.put(request)
            if not request.done.wait(max(0.0, deadline - time.monotonic())):
                raise StoreSilentError(self._timeout_s)
        finally:
            self._lock.release()
        if request.error is not None:
            raise request.error
        return request.value


def _serve(store: Any, prefix: str, timeout_s: float, requests: "queue.SimpleQueue[_Request | None]") -> None:
    """Make the requests, one after the other; a connection that failed is opened again by the next one."""
    connection: Any = None
    while (request := requests.get()) is not None:
        try:
            if connection is None:
                opened = PrefixStore(prefix, store.clone())
                opened.set_timeout(timedelta(seconds=timeout_s))
                connection = opened
            request.value = getattr(connection, request.name)(*request.arguments)
        except Exception as error:
            request.error = error if isinstance(error, RuntimeError) else RuntimeError(f"{type(error).__name__}: {error}")
            connection = None
        request.done.set()


class StatusStore:
    """Alarms, statuses and verdicts of one run; no call waits for another rank.

    Args:
        store: of the run.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, store: TimedStore, rank: int, world_size: int) -> None:
        self._store, self.rank, self.world_size = store, rank, world_size

    def alarmed(self, incident: int) -> bool:
        return self._store.check([f"{incident}/alarm"])

    def tell(self, incident: int, status: RankStatus) -> None:
        """Give this rank's status and call for those of the others."""
        self._store.set(f"{incident}/status/{self.rank}", json.dumps(status.to_json()))
        self._store.set(f"{incident}/alarm", "1")

    def claim(self, duty: str) -> bool:
        """True for the first rank that asks."""
        return self._store.add(f"claim/{duty}", 1) == 1

    def status(self, incident: int, rank: int) -> RankStatus | None:
        key = f"{incident}/status/{rank}"
        return RankStatus.from_json(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def decide(self, incident: int, report: str) -> None:
        """Close an incident for all ranks: with the report that ends the run, or with an empty one when it gets on again."""
        self._store.set(f"{incident}/verdict", json.dumps(report))

    def verdict(self, incident: int) -> str | None:
        key = f"{incident}/verdict"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
