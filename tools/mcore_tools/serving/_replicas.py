# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines in processes of their own, one a device, which work for a coordinator and are started again when they end."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch._C._distributed_c10d import Store

from mcore_inference import DynamicInferenceEngine, EngineRunner
from mcore_inference.coordinator import CoordinatorSecurity, DataParallelInferenceCoordinator, EngineWorker
from mcore_inference.server import ServerLimits, StopSignals
from mcore_parallel.guard import STALLED_EXIT_CODE
from mcore_tools.serving._expert_ranks import open_store

SECRET_VARIABLE = "MCORE_COORDINATOR_SECRET"
"""Holds the job's secret for the processes of a server."""
_LOG = logging.getLogger("mcore_tools.serving")
_POLL_S = 0.2
_STOP_S = 30.0
_MAX_EARLY_ENDS = 3
_EARLY_S = 60.0


class Replicas:
    """A context manager that runs processes ``mcore serve CHECKPOINT --join ADDRESS``, one a device.

    A process that ends is started again; one that ended ``3`` times, each time within a minute, is given up.

    The coordinator hears of an end at once, and gives the requests to other engines. Those that share experts end and start together.

    Args:
        command: words behind ``mcore serve``, without those that the coordinator adds.
        count: processes.
        coordinator: of this process.
        gpus_each: GPUs of one process, and of those that it starts in turn.
        share_experts: whether they are the ranks of one mixture, each with a part of its experts (``ExpertRanks``).

    Raises:
        ValueError: there are too few GPUs.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        count: int,
        coordinator: DataParallelInferenceCoordinator,
        gpus_each: int = 1,
        share_experts: bool = False,
    ) -> None:
        gpus = torch.cuda.device_count()
        if gpus and count * gpus_each > gpus:
            raise ValueError(
                f"--data-parallel {count} of {gpus_each} GPUs each (--tp, --pp) needs {count * gpus_each} and {gpus} are visible; lower one"
            )
        self._gpus_each, self._share_experts = gpus_each, share_experts
        self._store: Store | None = None
        self._command, self._count, self._coordinator, self._gpus = command, count, coordinator, gpus
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        self._begins, self._early_ends = [0.0] * count, [0] * count
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mcore-replicas", daemon=True)

    def __enter__(self) -> "Replicas":
        self._start_all(range(self._count))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        running = [process for process in self._processes if process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + _STOP_S
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def num_given_up(self) -> int:
        """Processes that ended too often."""
        return sum(ends >= _MAX_EARLY_ENDS for ends in self._early_ends)

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [process.pid for process in self._processes if process is not None and process.poll() is None]

    def _start_all(self, indices: Iterable[int]) -> None:
        meeting: Mapping[str, str] = {}
        if self._share_experts:
            self._store, meeting = open_store()
        for index in indices:
            self._start(index, meeting)

    def _start(self, index: int, meeting: Mapping[str, str]) -> None:
        environment = {**os.environ, SECRET_VARIABLE: self._coordinator.config.security.secret, **meeting}
        if meeting:
            environment.update(RANK=str(index), WORLD_SIZE=str(self._count))
        if self._gpus:
            visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            names = visible or [str(number) for number in range(self._gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[index * self._gpus_each : (index + 1) * self._gpus_each])
        else:
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self._count)))
        words = [sys.executable, "-m", "mcore_tools", "serve", *self._command, "--join", self._coordinator.address, "--name", f"dp-{index}"]
        self._begins[index] = time.monotonic()
        # In a session of its own: Ctrl-C is for the server, which lets open requests end first.
        self._processes[index] = subprocess.Popen(words, env=environment, start_new_session=True)

    def _watch(self) -> None:
        while not self._closing.wait(_POLL_S):
            ended = [index for index, process in enumerate(self._processes) if process is not None and process.poll() is not None]
            if self._share_experts and ended:
                self._end_others(ended)
            for index in ended:
                self._note_end(index)
            again = [index for index in ended if self._processes[index] is not None]
            if again:
                self._start_all(again)

    def _end_others(self, ended: list[int]) -> None:
        """None of those that share experts can go on without the others."""
        first = ended[0]
        for index, process in enumerate(self._processes):
            if process is not None and index not in ended:
                self._coordinator.lose_engine(f"dp-{index}", f"dp-{first} ended, which has some of its experts")
                process.kill()
                process.wait()
                ended.append(index)

    def _note_end(self, index: int) -> None:
        """Tell the coordinator, and give up one that ends too often."""
        process = self._processes[index]
        assert process is not None, "it ran"
        self._coordinator.lose_engine(f"dp-{index}", f"its process ended with exit code {process.returncode}")
        early = time.monotonic() - self._begins[index] < _EARLY_S
        self._early_ends[index] = self._early_ends[index] + 1 if early else 0
        if self._early_ends[index] >= _MAX_EARLY_ENDS:
            self._processes[index] = None
            _LOG.critical("dp-%d ended %d times within a minute of its start and is given up", index, _MAX_EARLY_ENDS)
        else:
            _LOG.error("dp-%d ended with exit code %s and is started again", index, process.returncode)


def work_for(engine: DynamicInferenceEngine, address: str, name: str, limits: ServerLimits) -> int:
    """Serve the requests of a coordinator until a signal, a stop of all engines, the end of the engine or of the parent process.

    Returns:
        Exit code: 0, or 75 when the engine was given up.
    """
    security, parent = CoordinatorSecurity(secret=os.environ.get(SECRET_VARIABLE, "")), os.getppid()
    with (
        StopSignals() as signals,
        EngineRunner(
            engine,
            stall_timeout_s=limits.stall_timeout_s,
            max_failed_steps=limits.max_failed_steps,
            max_waiting_requests=limits.max_waiting_requests,
        ) as runner,
        EngineWorker(runner, address, name=name, security=security) as worker,
    ):
        while not signals.count and os.getppid() == parent and not worker.join(_POLL_S):
            if runner.failure is not None:
                break
        return 0 if runner.failure is None else STALLED_EXIT_CODE
