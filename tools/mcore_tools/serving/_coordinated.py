# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines of a command in processes of their own, behind a coordinator of this process."""

import contextlib
import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq

from mcore_inference import EngineDeadError
from mcore_inference.coordinator import CoordinatedRunner, CoordinatorConfig, CoordinatorSecurity, DataParallelInferenceCoordinator
from mcore_tools.serving._job import Job
from mcore_tools.serving._layout import EngineLayout
from mcore_tools.serving._replicas import Replicas

_POLL_S = 0.05
_VARIABLE = "USE_COORDINATOR"


def uses_coordinator(*, default: bool = False) -> bool:
    """Whether one engine works for a coordinator: as ``USE_COORDINATOR`` in the environment says, 0 or 1, else the default; never under
    torchrun, whose processes are there already.

    Raises:
        ValueError: the variable is neither 0 nor 1, or asks for it under torchrun.
    """
    value, under_torchrun = os.environ.get(_VARIABLE), int(os.environ.get("WORLD_SIZE", "1")) > 1
    if value not in (None, "0", "1"):
        raise ValueError(f"{_VARIABLE}={value} must be 0 or 1: whether requests go through a coordinator")
    if value == "1" and under_torchrun:
        raise ValueError(f"{_VARIABLE}=1 starts the processes of its engines itself; leave torchrun out")
    return default and not under_torchrun if value is None else value == "1"


class CoordinatedEngines:
    """The engines of a command; called, it makes a runner over all of them, which fails when no engine is left for good, nor a coordinator.

    Args:
        address: of their coordinator.
        security: its secrets and public key.
    """

    def __init__(self, address: str, security: CoordinatorSecurity) -> None:
        self.address, self.security = address, security
        self._made: list[CoordinatedRunner] = []
        self.failure: str | None = None
        """Why no engine is left for good; None while there may be one."""
        self._lock = threading.Lock()

    def __call__(self) -> CoordinatedRunner:
        runner = CoordinatedRunner(self.address, security=self.security)
        with self._lock:
            self._made.append(runner)
            reason = self.failure
        if reason is not None:
            runner.fail(EngineDeadError(reason))
        return runner

    def fail(self, reason: str) -> None:
        """From any thread; runners that are made later fail at once."""
        with self._lock:
            self.failure = reason
            made = list(self._made)
        for runner in made:
            runner.fail(EngineDeadError(reason))


@contextlib.contextmanager
def coordinated(
    command: Sequence[str],
    *,
    count: int,
    layout: EngineLayout,
    host: str = "127.0.0.1",
    job_file: Path | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[CoordinatedEngines | None]:
    """Start engines and a coordinator for them.

    Engines may join it, and nobody else has the secret by which the runner loads weights. When all engines of this host were given up and
    none of another is there, or the coordinator failed, the runner fails (``CoordinatedRunner.failure``).

    Args:
        command: of a process, as of ``Replicas``.
        count: engines.
        layout: of each engine, or of all that share experts.
        host: address at which the coordinator listens.
        job_file: gets what engines of other hosts need to join; with it all is encrypted.
        is_stopped: asked while the engines start.

    Returns:
        What makes a runner over all of them, and what processes need to make their own; None once it was stopped.

    Raises:
        ValueError: there are too few GPUs, or an engine ended at its start.
        OSError: the file cannot be written.
        RuntimeError: the coordinator ended while the engines started.
    """
    # On loopback nobody listens who could not read this process.
    public_key, secret_key = (None, None) if job_file is None else (key.decode() for key in zmq.curve_keypair())
    security = CoordinatorSecurity(secret=secrets.token_hex(32), public_key=public_key)
    control = dataclasses.replace(security, control_secret=secrets.token_hex(32))
    own = dataclasses.replace(control, secret_key=secret_key)
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(host=host, security=own)))
        job = Job(address=coordinator.address, security=security)
        if job_file is not None:
            job.write(job_file)
            stack.callback(job_file.unlink, missing_ok=True)
        engines = CoordinatedEngines(job.address, control)
        replicas = stack.enter_context(Replicas(command, count=count, coordinator=coordinator, job=job, layout=layout, on_end=engines.fail))
        while coordinator.num_engines < count and not is_stopped():
            if replicas.num_given_up:
                raise ValueError("an engine ended at its start; the reason stands above")
            if coordinator.failure is not None:
                raise RuntimeError("the coordinator ended") from coordinator.failure
            time.sleep(_POLL_S)
        yield None if coordinator.num_engines < count else engines
