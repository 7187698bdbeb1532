# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines in processes of their own, one a device, which work for a coordinator and are started again when one ends."""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import TCPStore

from mcore_inference import DynamicInferenceEngine, EngineRunner
from mcore_inference.coordinator import DataParallelInferenceCoordinator, EngineWorker
from mcore_parallel.guard import STALLED_EXIT_CODE
from mcore_tools.exit_code import FAILED, REFUSED
from mcore_tools.serving._hang import given_up_when_hung
from mcore_tools.serving._job import Job
from mcore_tools.serving._layout import EngineLayout
from mcore_tools.serving._ranks import start_rank

if TYPE_CHECKING:
    from mcore_inference.server import ServerLimits

_LOG = logging.getLogger("mcore_tools.serving")
_POLL_S = 0.2
_STOP_S = 30.0
_HUNG_S = 10.0
"""That an engine whose process lives may be missing at the coordinator, beyond its time-out there, before the process is ended."""
_TERMINATE_S = 5.0
"""From SIGTERM to SIGKILL of such a process."""
_MAX_EARLY_ENDS = 3
_EARLY_S = 60.0
_REFUSED_CODES = (FAILED, REFUSED)
"""Of a process that was asked for what cannot be; it has said why."""
# Rank 0 would open a store of its own, unless torch takes the one here for that of an agent.
_AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


class _World:
    """The processes of one engine, or of all that share experts: they start and end together."""

    def __init__(self, first: int) -> None:
        self.first = first
        """Number of its first engine."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self.store: TCPStore | None = None
        """Where they meet."""
        self.up_since: float | None = None
        """When its engines were first seen at the coordinator; None while they load."""
        self.missing_since: float | None = None
        """When one of these engines was seen no more, though no process ended; None while all are there."""
        self.hung: str | None = None
        """Why the processes are being ended."""
        self.kill_at = 0.0
        """When those that are being ended and did not are killed."""
        self.num_starts = 0
        self.early_ends = 0
        self.was_refused = False

    @property
    def is_given_up(self) -> bool:
        return self.was_refused or self.early_ends >= _MAX_EARLY_ENDS

    def ended(self) -> int | None:
        """A rank that ended, rather by a signal than because it lost another one; None while all run."""
        codes = {rank: code for rank, process in enumerate(self.processes) if (code := process.poll()) is not None}
        return min(codes, key=lambda rank: (codes[rank] == STALLED_EXIT_CODE, codes[rank]), default=None)

    def terminate(self) -> None:
        """Ask the processes to end without draining, as they do at a second signal; two of one kind may come as one."""
        for process in self.processes:
            process.terminate()
            process.send_signal(signal.SIGINT)

    def end_hung(self, why: str) -> None:
        """Let the processes end by themselves for a while; a stopped one cannot."""
        self.hung, self.kill_at = why, time.monotonic() + _TERMINATE_S
        self.terminate()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


class Replicas:
    """A context manager that runs processes ``mcore serve CHECKPOINT --join ADDRESS --name NAME``, one a device.

    When a process ends, those of its engine do, and of all engines that share experts with it. One that lives and whose engine the
    coordinator has lost, by silence or because it makes no progress, gets ten seconds to come back; then it is ended, by SIGTERM and
    five seconds later by SIGKILL. They are started again together, unless that happened ``3`` times, each before they took requests for
    a minute, or the first start was refused or failed (exit code 2 or 1). The coordinator hears of it at once, and gives the requests to
    other engines. One that gets SIGTERM by itself drains before it ends. When all are given up, and no engine of another host is left,
    ``on_end`` hears of it, and so it does when the coordinator failed.

    Args:
        command: of a process, ``mcore serve CHECKPOINT`` or another that takes ``--join ADDRESS --name NAME``, which are added.
        count: engines.
        coordinator: of this process.
        job: what the engines know of it.
        layout: of each engine, or of all that share experts.
        on_end: called once, with the reason, from a thread: nothing is served any more.

    Raises:
        ValueError: there are too few GPUs.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        count: int,
        coordinator: DataParallelInferenceCoordinator,
        job: Job,
        layout: EngineLayout,
        on_end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        gpus, num_ranks = torch.cuda.device_count(), count * layout.ranks_each
        if gpus and num_ranks > gpus:
            raise ValueError(
                f"--data-parallel {count} of {layout.ranks_each} GPUs each (--tp, --pp) needs {num_ranks} and {gpus} are visible; lower one"
            )
        self._command, self._coordinator, self._job, self._layout = command, coordinator, job, layout
        self._gpus, self._num_ranks, self._on_end = gpus, num_ranks, on_end
        self._worlds = [_World(first) for first in range(0, count, layout.num_sharing)]
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mcore-replicas", daemon=True)

    def __enter__(self) -> "Replicas":
        for world in self._worlds:
            self._start(world)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        running = [process for world in self._worlds for process in world.processes]
        for world in self._worlds:
            world.terminate()
        deadline = time.monotonic() + _STOP_S
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def num_given_up(self) -> int:
        """Engines that ended too often, or share experts with one that did."""
        return sum(world.is_given_up for world in self._worlds) * self._layout.num_sharing

    def _start(self, world: _World) -> None:
        layout = self._layout
        environment = {**os.environ, **_AGENT, **self._job.environment()}
        if self._gpus:
            visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            names = visible or [str(number) for number in range(self._gpus)]
            place = world.first * layout.ranks_each
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[place : place + layout.num_ranks])
        else:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._num_ranks)))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        words = [*self._command, "--join", self._job.address, "--name"]
        world.up_since, world.missing_since, world.hung, world.store = None, None, None, store
        world.num_starts += 1
        world.processes = [
            start_rank([*words, self._name_of(world, rank)], rank, layout.num_ranks, store.port, environment)
            for rank in range(layout.num_ranks)
        ]

    def _name_of(self, world: _World, rank: int) -> str:
        """Of a rank's engine, for the coordinator."""
        return f"dp-{world.first + self._layout.engine_of(rank)}"

    def _engines_of(self, world: _World) -> list[str]:
        """Names of its engines, for the coordinator."""
        return [f"dp-{world.first + number}" for number in range(self._layout.num_sharing)]

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            if (failure := self._coordinator.failure) is not None:
                self._on_end(f"the coordinator ended: {type(failure).__name__}: {failure}")
                return
            here = self._coordinator.engine_names
            for world in self._worlds:
                if not world.is_given_up:
                    self._look_after(world, here)
            if all(world.is_given_up for world in self._worlds) and not self._coordinator.engine_names:
                self._on_end("all engines are given up; the reasons stand above")
                return

    def _look_after(self, world: _World, here: frozenset[str]) -> None:
        """Replace what ended, and end what hangs, given the engines that the coordinator has."""
        missing, now = [name for name in self._engines_of(world) if name not in here], time.monotonic()
        if not missing:
            world.up_since = now if world.up_since is None else world.up_since
            world.missing_since = None
        elif world.up_since is not None and world.missing_since is None:
            world.missing_since = now
        if (rank := world.ended()) is not None:
            self._replace(world, rank)
        elif world.hung is not None:
            if now > world.kill_at:
                world.kill()
                self._replace(world, 0)
        elif world.missing_since is not None and now - world.missing_since > _HUNG_S:
            hung = f"{', '.join(missing)} did not come back within {_HUNG_S:g} s of being lost, though its process lives, and was ended"
            _LOG.error("%s is lost and its process lives: it is ended", ", ".join(missing))
            world.end_hung(hung)

    def _replace(self, world: _World, rank: int) -> None:
        """End what cannot go on without a rank that ended, tell the coordinator, and start it again."""
        name, place = self._name_of(world, rank), self._layout.describe(rank)
        code = world.processes[rank].returncode
        what = world.hung or f"{name}{place and f' ({place})'} ended with exit code {code}"
        engines = self._engines_of(world)
        # First: one that is told that it is lost would come back, and get requests.
        world.kill()
        for engine in engines:
            self._coordinator.lose_engine(engine, what)
        early = world.up_since is None or time.monotonic() - world.up_since < _EARLY_S
        world.early_ends = world.early_ends + 1 if early else 0
        # Nothing changes when it is asked again.
        world.was_refused = world.up_since is None and code in _REFUSED_CODES and world.num_starts == 1
        others = ", ".join(engine for engine in engines if engine != name)
        beside = others and f", and with it {others} of the same experts"
        if world.was_refused:
            _LOG.critical("%s at its first start, and is given up%s", what, beside)
        elif world.is_given_up:
            _LOG.critical("%s, %d times before it took requests for a minute, and is given up%s", what, _MAX_EARLY_ENDS, beside)
        else:
            _LOG.error("%s and is started again%s", what, beside)
            self._start(world)


def work_for(engine: DynamicInferenceEngine, job: Job, name: str, limits: "ServerLimits", *, drain_s: float = 30.0) -> int:
    """Serve the requests of a coordinator until a signal, a stop of all engines, the end of the engine or of the parent process.

    Args:
        engine: of the first rank.
        job: whose coordinator it is.
        name: of the engine, for the coordinator.
        limits: on the queue and the engine.
        drain_s: seconds that open requests get to end at a signal, with those of engines that share the experts; a second signal ends at
            once.

    Returns:
        Exit code: 0, or 75 when the engine was given up: it failed, or a step hangs, or what worked for the coordinator failed.
    """
    # Slow to import, and only for who serves.
    from mcore_inference.server import StopSignals

    parent = os.getppid()
    with (
        StopSignals() as signals,
        EngineRunner(
            engine,
            stall_timeout_s=limits.stall_timeout_s,
            max_failed_steps=limits.max_failed_steps,
            max_waiting_requests=limits.max_waiting_requests,
        ) as runner,
        given_up_when_hung(runner),
        EngineWorker(runner, job.address, name=name, security=job.security) as worker,
    ):
        while not signals.count and os.getppid() == parent and not worker.join(_POLL_S):
            if runner.failure is not None:
                break
        if signals.count:
            deadline = time.monotonic() + drain_s

            def hurries() -> bool:
                return signals.count > 1 or runner.failure is not None or os.getppid() != parent

            worker.close(drain_s, hurry=hurries)
            # Of an engine that the coordinator had not taken yet.
            while runner.others_have_work and not hurries() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        return 0 if runner.failure is None and worker.failure is None else STALLED_EXIT_CODE
