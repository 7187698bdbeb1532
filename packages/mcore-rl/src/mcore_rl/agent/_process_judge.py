# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Environments that judge in processes of their own, with limits of time and memory and without network."""

import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, cast

from mcore_rl import _confine
from mcore_rl._stability import experimental_api
from mcore_rl.agent._judged import Problem
from mcore_rl.agent._judged_elsewhere import JudgedElsewhere
from mcore_rl.agent._numbered import NumberedProblems

_MOST_REPLY_BYTES = 1 << 16
_spawn = multiprocessing.get_context("spawn")


@experimental_api
class JudgeProcessError(RuntimeError):
    """A process that judges did not start, died or took too long. The message names the environment."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class JudgeLimits:
    """How many processes judge, and what each may use.

    Raises:
        ValueError: a number that is out of its range; names it.
    """

    num_workers: int = 2
    """Processes, each of which judges one answer at a time."""
    time_s: float = 10.0
    """Limit of one judgement, from when a process begins with it; the process is ended after it, and another one takes its place."""
    memory_gb: float = 1.0
    """GiB of address space that judging may take beyond what the process has when it is ready."""
    network: bool = False
    """Whether the processes have a network."""
    start_timeout_s: float = 120.0
    """Limit of the start of the first process, which makes the environment, in seconds."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise ValueError(f"num_workers={self.num_workers} must be at least 1")
        for name in ("time_s", "memory_gb", "start_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number above 0")


@experimental_api
class ProcessJudge(JudgedElsewhere):
    """An environment whose problems are posed here, and whose answers are judged by copies of it in processes of this machine.

    Whatever an answer does to its judge, be it an endless loop, all memory or the end of the process, it loses itself alone: the process is
    ended, and another one takes its place within milliseconds. A judgement waits for a free process; ``judge_timeout_s`` of the environment
    covers that wait, too. Only numbers and text go between the processes, all of which end with this one. Linux only.

    Args:
        make: makes the environment, here and once in a process from which those that judge are forked; it must be importable there, and
            start no threads.
        limits: number of the processes, and what each may use.

    Raises:
        JudgeProcessError: no process started, or this machine has none without network; says why.

    Example:
        >>> environment = ProcessJudge(Countdown, JudgeLimits(num_workers=4, time_s=5))
    """

    def __init__(self, make: Callable[[], NumberedProblems], limits: JudgeLimits | None = None) -> None:
        super().__init__(make)
        self.limits = limits or JudgeLimits()
        self._make, self._lock = make, threading.Lock()
        self._threads = ThreadPoolExecutor(self.limits.num_workers, "mcore-judge")
        self._template = _Template(make, self.env_id, self.limits)
        self._idle: list[_Worker] = []
        self.num_restarts = 0
        """Processes that were ended or died, and were replaced."""
        try:
            self._template.wait_until_ready()
            self._idle += [self._template.worker() for _ in range(self.limits.num_workers)]
        except BaseException:
            self.close()
            raise

    async def get_reward(self, response: str, problem: Problem) -> float:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._judge, response, problem)

    def _judge(self, response: str, problem: Problem) -> float:
        """In a thread: there are as many as processes, so that one is idle."""
        with self._lock:
            worker = self._idle.pop()
        try:
            if not worker.is_alive:
                worker = self._replaced(worker)
            return worker.judge(response, problem)
        finally:
            with self._lock:
                self._idle.append(worker)

    def _replaced(self, worker: "_Worker") -> "_Worker":
        worker.end()
        with self._lock:
            if not self._template.is_alive:
                self._template.end()
                self._template = _Template(self._make, self.env_id, self.limits)
                self._template.wait_until_ready()
            fresh = self._template.worker()
            self.num_restarts += 1
        return fresh

    def close(self) -> None:
        """End the processes; may be called again."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            workers, self._idle = self._idle, []
            for worker in workers:
                worker.end()
            self._template.end()


class _Template:
    """The process that has the environment, and from which those that judge are forked.

    Args:
        make: makes the environment.
        env_id: of it, for messages.
        limits: of the processes.
    """

    def __init__(self, make: Callable[[], NumberedProblems], env_id: str, limits: JudgeLimits) -> None:
        self._env_id, self._limits = env_id, limits
        if multiprocessing.current_process().daemon:
            raise JudgeProcessError(f"no process for {env_id!r} starts in a daemon of multiprocessing; start this one by torchrun")
        self._pipe, theirs = _pipe()
        self._process: BaseProcess = _spawn.Process(target=_serve, args=(make, theirs, limits), name=f"judges of {env_id}", daemon=True)
        self._process.start()
        theirs.close()

    @property
    def is_alive(self) -> bool:
        return not self._pipe.closed and self._process.is_alive()

    def wait_until_ready(self) -> None:
        limit = self._limits.start_timeout_s
        reply = _reply(self._pipe, limit)
        if not isinstance(reply, dict) or "error" in reply:
            reason = f"not within start_timeout_s={limit:g}" if reply is None else str(reply)
            raise JudgeProcessError(f"no process for {self._env_id!r} started: {reply['error'] if isinstance(reply, dict) else reason}")

    def worker(self) -> "_Worker":
        """Another process that judges."""
        own, theirs = _pipe()
        try:
            send_handle(self._pipe, theirs.fileno(), self._process.pid)
        except OSError as error:
            own.close()
            raise JudgeProcessError(f"no process for {self._env_id!r} started: {error}") from error
        finally:
            theirs.close()
        reply = _reply(own, self._limits.start_timeout_s)
        if not isinstance(reply, dict) or type(reply.get("pid")) is not int:
            own.close()
            raise JudgeProcessError(f"no process for {self._env_id!r} started: {reply}")
        return _Worker(self._env_id, self._limits, own, reply["pid"])

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


class _Worker:
    """One process that judges."""

    def __init__(self, env_id: str, limits: JudgeLimits, pipe: Connection, pid: int) -> None:
        self._env_id, self._limits, self._pipe, self.pid = env_id, limits, pipe, pid

    @property
    def is_alive(self) -> bool:
        # It writes nothing of itself: what can be read is the end.
        return not self._pipe.closed and not self._pipe.poll(0)

    def judge(self, response: str, problem: Problem) -> float:
        where = f"the process that judges problem {problem.problem_id!r} of {self._env_id!r}"
        try:
            self._pipe.send_bytes(json.dumps([response, asdict(problem)]).encode())
        except OSError:
            self.end()
            raise JudgeProcessError(f"{where} died") from None
        reply = _reply(self._pipe, self._limits.time_s)
        if not isinstance(reply, dict):
            self.end()
            raise JudgeProcessError(f"{where} was ended after time_s={self._limits.time_s:g}" if reply is None else f"{where} {reply}")
        if "error" in reply or type(reply.get("reward")) not in (int, float):
            raise JudgeProcessError(f"the judge of {self._env_id!r} failed: {str(reply.get('error', reply))[:500]}")
        return float(reply["reward"])

    def end(self) -> None:
        if not self._pipe.closed:
            # Its number is its own as long as the pipe is open on the other side.
            if not self._pipe.poll(0):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            self._pipe.close()


def _pipe() -> tuple[Connection, Connection]:
    # Of a platform that is none of ours it would be of another type.
    return cast("tuple[Connection, Connection]", _spawn.Pipe())


def _reply(pipe: Connection, timeout_s: float) -> dict[str, Any] | str | None:
    """What a process writes; None for nothing in time, a text for what is none."""
    try:
        if not pipe.poll(timeout_s):
            return None
        value = json.loads(pipe.recv_bytes(_MOST_REPLY_BYTES))
    except (OSError, EOFError):
        return "died"
    except (ValueError, RecursionError):
        return "wrote what is no reply"
    return value if isinstance(value, dict) else "wrote what is no reply"


def _serve(make: Callable[[], NumberedProblems], pipe: Connection, limits: JudgeLimits) -> None:
    """In the first process: has the environment, and forks one that judges for each pipe that comes."""
    # Signals to the group, as of Ctrl-C or a launcher, are for the process that judges are for.
    os.setsid()
    try:
        _confine.die_with_parent()
        if not limits.network:
            _confine.leave_network()
        environment = make()
    except Exception as error:
        pipe.send_bytes(json.dumps({"error": f"{error!r}"[:1000]}).encode())
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    pipe.send_bytes(b"{}")
    while True:
        try:
            handle = recv_handle(pipe)
        except (EOFError, OSError):
            return
        if os.fork():
            os.close(handle)
            continue
        try:
            _confine.die_with_parent()
            # Here, environments learn how processes of their own ended.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pipe.close()
            _judge_all(environment, Connection(handle), limits)
        finally:
            os._exit(0)


def _judge_all(environment: NumberedProblems, pipe: Connection, limits: JudgeLimits) -> None:
    """In a process that judges: until nobody is there."""
    _confine.limit_memory(int(limits.memory_gb * 2**30))
    pipe.send_bytes(json.dumps({"pid": os.getpid()}).encode())
    while True:
        try:
            response, fields = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            data = json.dumps({"reward": asyncio.run(environment.get_reward(response, Problem(**fields)))}).encode()
        except Exception as error:
            data = json.dumps({"error": f"{error!r}"[:1000]}).encode()
        pipe.send_bytes(data)
