# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""API servers in processes of their own: they answer HTTP at one address, each as a client of one coordinator."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from mcore_inference import EngineDeadError
from mcore_inference.coordinator import CoordinatedRunner
from mcore_parallel.guard import STALLED_EXIT_CODE
from mcore_tools.exit_code import REFUSED
from mcore_tools.serving._coordinated import CoordinatedEngines
from mcore_tools.serving._engine import frozen_heap, short_turns

if TYPE_CHECKING:
    from mcore_inference.server import GroupMember, InferenceServer, ServerGroup, StopSignals

ServeMember = Callable[[Callable[[], CoordinatedRunner], "GroupMember"], "InferenceServer"]
"""Starts a server of this process over engines. It is sent to the process, so it is a function of a module, or a partial of one."""

_LOG = logging.getLogger("mcore_tools.serving")
_SPAWNED = multiprocessing.get_context("spawn")
_POLL_S = 0.1
_START_S = 120.0
"""That a process may take to load its libraries and tokenizer."""
_HUNG_S = 10.0
"""Without a sign of life of a server's event loop, after which its process is killed."""
_LAST_ANSWERS_S = 5.0
"""That processes get to answer what is open, beyond the time to drain, or once the engines failed."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""That a process gets for the first and for the second of those that came: two of one kind may reach it as one."""
_MAX_EARLY_ENDS = 3
_EARLY_S = 60.0


class ApiServersError(RuntimeError):
    """API servers ended again and again, so that nothing is served any more."""


class _ApiServer:
    """One process.

    Args:
        serve: as of ``ApiServers``.
        member: its place in the group.
        drain_s: as there.
    """

    def __init__(self, serve: ServeMember, member: "GroupMember", drain_s: float) -> None:
        self._serve, self._member, self._drain_s = serve, member, drain_s
        self.name = f"API server {member.index}"
        self._counts = member.group.counts(member.index)
        self.early_ends = 0
        self._has_served = False

    def start(self) -> None:
        self._pipe, theirs = _SPAWNED.Pipe()
        self.process = _SPAWNED.Process(target=_run, args=(self._serve, self._member, self._drain_s, theirs), name=self.name, daemon=True)
        self.process.start()
        theirs.close()
        self.is_ready = False

    def open(self, engines: CoordinatedEngines) -> None:
        """Let it serve, once its libraries are loaded."""
        self.opened = time.monotonic()
        self._num_beats, self._num_silent = self._counts.num_beats, 0
        self._send((engines.address, engines.security))

    def fail(self, reason: str) -> None:
        """Let it answer what is open with an error, and end."""
        self._send(reason)

    def _send(self, message: object) -> None:
        # One that ended is seen by its exit code.
        with contextlib.suppress(OSError):
            self._pipe.send(message)

    def look(self) -> str | None:
        """Why it serves no more; None while it does, or may. To be called every ``_POLL_S``.

        Raises:
            ValueError: what it was asked for cannot be; it said why.
        """
        if not self.is_ready and self._pipe.poll():
            # Where nothing can be read it has ended.
            with contextlib.suppress(EOFError, OSError):
                refusal: str | None = self._pipe.recv()
                if refusal is None:
                    self.is_ready = self._has_served = True
                elif self._has_served:
                    _LOG.error("%s: %s", self.name, refusal)
                else:
                    raise ValueError(refusal)
        if self.process.exitcode is not None:
            return f"{self.name} (process {self.process.pid}) ended with exit code {self.process.exitcode}"
        # Counted by looks, not by a clock: where all processes were frozen for a while, none of them hangs.
        num_beats, patience_s = self._counts.num_beats, _HUNG_S if self.is_ready else _START_S
        self._num_silent = self._num_silent + 1 if num_beats == self._num_beats else 0
        self._num_beats = num_beats
        if self._num_silent * _POLL_S > patience_s:
            return f"{self.name} (process {self.process.pid}) gave no sign of life for {patience_s:g} s"
        return None

    def send_signal(self, number: signal.Signals) -> None:
        """Let it drain; at the second, hurry."""
        pid = self.process.pid
        if self.process.exitcode is None and pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()
        self._counts.forget()


class ApiServers:
    """A context manager that runs processes which answer HTTP at one address.

    They load their libraries from the start on, and serve while ``wait`` is called with engines. One that ends, or whose event loop gives
    no sign of life for ten seconds, is started again; its open connections break, new ones go to the others meanwhile, and the coordinator
    aborts its requests. When that happened ``3`` times to one, each within a minute of its start, all end.

    Args:
        serve: starts the server of a process; its exit code is that of ``InferenceServer.wait``.
        group: the address; its socket is closed here when the servers are to end.
        drain_s: that open requests get to end at a signal.
    """

    def __init__(self, serve: ServeMember, group: "ServerGroup", *, drain_s: float) -> None:
        self._group, self._drain_s = group, drain_s
        self._servers = [_ApiServer(serve, group.member(index), drain_s) for index in range(group.num_servers)]

    def __enter__(self) -> "ApiServers":
        for server in self._servers:
            server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._group.close()
        for server in self._servers:
            server.kill()

    def wait(self, engines: CoordinatedEngines, signals: "StopSignals", *, on_open: Callable[[], object] = lambda: None) -> None:
        """Serve until a signal, and let open requests end; or until the engines are given up.

        Args:
            engines: that the servers are clients of.
            signals: a second one cuts open requests off.
            on_open: called once all serve.

        Raises:
            ValueError: what the servers were asked for cannot be.
            PortInUseError: another process listens meanwhile.
            EngineDeadError: the engines are given up; what was open was answered so.
            ApiServersError: a server ended too often.
        """
        try:
            self._serve(engines, signals, on_open)
            # Nobody is to come any more, also where a server hangs.
            self._group.close()
            self._drain(engines, signals)
        finally:
            self._close()

    def _serve(self, engines: CoordinatedEngines, signals: "StopSignals", on_open: Callable[[], object]) -> None:
        self._group.listen()
        for server in self._servers:
            server.open(engines)
        is_open = False
        while not signals.count and engines.failure is None:
            for server in self._servers:
                self._look_after(server, engines)
            if not is_open and all(server.is_ready for server in self._servers):
                is_open = True
                on_open()
            time.sleep(_POLL_S)

    def _look_after(self, server: _ApiServer, engines: CoordinatedEngines) -> None:
        if (end := server.look()) is None:
            return
        server.kill()
        server.early_ends = server.early_ends + 1 if time.monotonic() - server.opened < _EARLY_S else 0
        if server.early_ends >= _MAX_EARLY_ENDS:
            raise ApiServersError(f"{end}, {_MAX_EARLY_ENDS} times within a minute of its start; nothing is served any more")
        _LOG.error("%s and is started again; its open requests are lost", end)
        server.start()
        server.open(engines)

    def _drain(self, engines: CoordinatedEngines, signals: "StopSignals") -> None:
        deadline, num_sent = time.monotonic() + self._drain_s + _LAST_ANSWERS_S, 0
        while any(server.process.exitcode is None for server in self._servers) and time.monotonic() < deadline:
            if engines.failure is not None or signals.count > 1:
                deadline = min(deadline, time.monotonic() + _LAST_ANSWERS_S)
            if engines.failure is not None:
                for server in self._servers:
                    server.fail(engines.failure)
            for number in _SIGNALS[num_sent : signals.count]:
                num_sent += 1
                for server in self._servers:
                    server.send_signal(number)
            time.sleep(_POLL_S)
        if engines.failure is not None:
            raise EngineDeadError(engines.failure)


def _run(serve: ServeMember, member: "GroupMember", drain_s: float, pipe: Connection) -> None:
    """The process of a server."""
    # Slow to import, and only for who serves.
    from mcore_inference.server import StopSignals

    # Ctrl-C is for the process that started this one, which lets open requests end.
    os.setsid()
    with StopSignals() as signals, short_turns():
        try:
            address, security = pipe.recv()
        except EOFError:
            return
        try:
            server = serve(lambda: CoordinatedRunner(address, security=security), member)
        except (ValueError, OSError) as error:
            pipe.send(str(error))
            raise SystemExit(REFUSED) from None
        pipe.send(None)
        runner = server.runner
        assert isinstance(runner, CoordinatedRunner), "made here"
        threading.Thread(target=_obey, args=(pipe, runner), name="mcore-parent", daemon=True).start()
        try:
            with frozen_heap():
                server.wait(signals, drain_s=drain_s)
        except EngineDeadError:
            raise SystemExit(STALLED_EXIT_CODE) from None


def _obey(pipe: Connection, runner: CoordinatedRunner) -> None:
    """End the server when the process that started it says so, or ended."""
    try:
        reason = str(pipe.recv())
    except (EOFError, OSError):
        reason = "the process of the coordinator ended"
    runner.fail(EngineDeadError(reason))
