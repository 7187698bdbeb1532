# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One try of a run, and the thread that ends it when another rank has failed."""

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _abort_process_group

from mcore_parallel.guard._activity import thread_stacks
from mcore_parallel.guard._liveness import Liveness
from mcore_parallel.guard._store import StoreSilentError, TimedStore

_POLL_S = 0.25
_REQUEST_S = 10.0
"""Limit of one request to the store."""
_HEARTBEAT_S, _DEAD_AFTER_S = 1.0, 6.0
"""A rank of another machine without a sign of life for this long is dead, once others wait for it to leave."""
_AGAIN_S = 5.0
"""Between two exceptions for a thread that goes on in spite of the first one."""


class AttemptAbortedError(BaseException):
    """Raised in the thread of a rank whose attempt ended because another rank failed; no ``Exception``, so that nobody handles it."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why an attempt failed: the first rank that said so."""

    rank: int
    reason: str
    is_final: bool
    """No other attempt would go better."""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.reason}"


def exit_stuck(text: str) -> None:
    """Say where this process is stuck, and end it."""
    print(text, file=sys.stderr, flush=True)
    os._exit(75)


class Attempt:
    """One try; given to the work, which makes its process groups over ``store``.

    Args:
        number: from 0.
        store: a part of its own of the run's store.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: a thread that has not ended its part this long after a fault is stuck.
        on_stuck: called in the thread of the watch, with the stacks of this process.
    """

    def __init__(
        self, number: int, store: Store, *, rank: int, world_size: int, timeout_s: float, on_stuck: Callable[[str], None] = exit_stuck
    ) -> None:
        self.number, self.rank, self.world_size, self.timeout_s = number, rank, world_size, timeout_s
        self.store: Store = PrefixStore(f"mcore/attempt{number}", store)
        # The work may be waiting on the other one.
        self._status_store = TimedStore(self.store, "board", min(timeout_s, _REQUEST_S))
        self._liveness = Liveness(self._status_store, rank, world_size, _DEAD_AFTER_S)
        self._on_stuck = on_stuck
        self._worker = threading.get_ident()
        self._lock = threading.Lock()
        self._works = True
        self._ended = threading.Event()

    def open(self) -> None:
        """The work of this rank begins; from now on another rank's fault is raised in this thread."""
        self._liveness.enter()
        threading.Thread(target=self._beat, name="mcore-heartbeat", daemon=True).start()
        threading.Thread(target=self._watch, name="mcore-attempt", daemon=True).start()

    def fail(self, reason: str, *, is_final: bool = False) -> None:
        """End the attempt on all ranks; of several reasons the first counts. From any thread.

        Raises:
            RuntimeError: the store is out of reach, so that nobody learns of it.
        """
        if self._status_store.add("claim", 1) == 1:
            self._status_store.set("fault", json.dumps([self.rank, reason, is_final]))

    def fault(self) -> Fault | None:
        """Why it ended, or None as long as nobody failed."""
        if not self._status_store.check(["fault"]):
            return None
        rank, reason, is_final = json.loads(self._status_store.get("fault"))
        return Fault(rank=rank, reason=reason, is_final=is_final)

    def close(self) -> None:
        """The work of this rank is over, one way or the other: nothing is raised any more."""
        while True:
            try:
                with self._lock:
                    self._works = False
                    _raise_in(self._worker, None)
                return
            except AttemptAbortedError:
                continue

    def end(self) -> None:
        """This rank gives no sign of life any more."""
        self._ended.set()

    def wait_for_end(self) -> Fault | None:
        """Wait until all ranks have done their work, or one has failed."""
        self._status_store.set(f"done/{self.rank}", "")
        while self._missing("done"):
            if (fault := self.fault()) is not None:
                return fault
            time.sleep(_POLL_S)
        # The first rank may be the one that keeps the store.
        self._status_store.set(f"seen/{self.rank}", "")
        if self.rank == 0:
            self._gather("seen")
        return None

    def wait_for_others(self) -> dict[int, str]:
        """Wait until all ranks have left the failed attempt; the ranks that did not within ``timeout_s``, with what became of them.

        It ends early when all ranks that are missing are dead.
        """
        self._status_store.set(f"left/{self.rank}", "")
        missing = self._gather("left")
        if missing:
            self._status_store.set("lost", json.dumps(list(missing.items())))
        elif self._status_store.check(["lost"]):
            # The others have given this rank up, and are gone.
            return dict(json.loads(self._status_store.get("lost")))
        return missing

    def _gather(self, what: str) -> dict[int, str]:
        """Wait for a mark of every rank; the ranks without one after ``timeout_s``, or once they are known to be dead."""
        deadline = time.monotonic() + self.timeout_s
        while missing := self._missing(what):
            gone = self._liveness.gone(missing)
            if len(gone) == len(missing) or time.monotonic() > deadline:
                return {rank: gone.get(rank, f"did not come back within {self.timeout_s:g} s") for rank in missing}
            time.sleep(_POLL_S)
        return {}

    def _missing(self, what: str) -> list[int]:
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        if self._status_store.check(keys):
            return []
        return [rank for rank, key in enumerate(keys) if not self._status_store.check([key])]

    def _beat(self) -> None:
        """Signs of life, whatever the main thread does."""
        while not self._ended.wait(_HEARTBEAT_S):
            # The store may come back.
            with contextlib.suppress(RuntimeError):
                self._liveness.beat()

    def _watch(self) -> None:
        try:
            while self._works and not self._failed():
                time.sleep(_POLL_S)
        except RuntimeError:
            # The store is gone, and with it the run; the work finds out by itself.
            return
        if not self._works:
            return
        _abort_devices()
        begin = raised = time.monotonic()
        self._interrupt()
        while self._works:
            time.sleep(_POLL_S)
            now = time.monotonic()
            if now - raised > _AGAIN_S:
                self._interrupt()
                raised = now
            if self._works and now - begin > self.timeout_s:
                stacks = "\n".join(f"{name}:\n  " + "\n  ".join(lines) for name, lines in thread_stacks().items())
                self._on_stuck(f"rank {self.rank} did not end attempt {self.number} within {self.timeout_s:g} s of a fault:\n{stacks}")
                return

    def _failed(self) -> bool:
        try:
            return self.fault() is not None
        except StoreSilentError:
            # A network that heals is used again; where it does not, the work ends by its own time-outs.
            return False

    def _interrupt(self) -> None:
        with self._lock:
            if self._works:
                _raise_in(self._worker, AttemptAbortedError)


def _abort_devices() -> None:
    """Let kernels that wait for other ranks end. Connections of hosts end with the process groups of the rank that failed."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        _abort_process_group()


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have an exception raised in a thread when it next runs Python; None takes one back that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None if kind is None else ctypes.py_object(kind))
