# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Environments that judge and reply in processes of their own, with limits of time and memory and without network."""

import asyncio
import contextlib
import gc
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, cast

from mcore_rl import _confine
from mcore_rl._stability import experimental_api
from mcore_rl.agent._conversation import Conversation
from mcore_rl.agent._conversation_memory import ConversationMemory
from mcore_rl.agent._environment_messages import (
    MessageError,
    conversation_fields,
    problem_fields,
    read_chat,
    read_conversation,
    read_problem,
)
from mcore_rl.agent._held_elsewhere import HeldElsewhere
from mcore_rl.agent._judged import Problem
from mcore_rl.agent._numbered import MOST_EPISODES, NumberedAgent, NumberedProblems, ignore_turn
from mcore_rl.agent._posed_here import PosedHere

_MOST_REPLY_BYTES = 1 << 20
_MOST_UNREAD_BYTES = 1 << 15
_REPLAYED = {"replayed": True}
"""What a process says of each turn that it replays: its time begins anew."""
_SHARE_OF_EPISODES = 0.25
"""Of ``memory_gb``, which the conversations of a process may take beside it between two turns."""
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
    """Limit of one judgement, or of one turn of a conversation, from when a process begins with it; the process is ended after it, and
    another one takes its place."""
    memory_gb: float = 1.0
    """GiB of address space that judging may take beyond what the process has when it is ready. Between two of their turns
    conversations may take a fourth of it beside; where they take more, the process keeps none of them."""
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
class ProcessJudge(HeldElsewhere, PosedHere):
    """An environment whose problems are posed here, and whose answers are judged by copies of it in processes of this machine. Where it
    holds conversations, these copies reply, too.

    Whatever an answer does to its judge, or to a tool, be it an endless loop, all memory or the end of the process, it loses itself alone,
    or its conversation: the process is ended, and another one takes its place within milliseconds. A conversation goes on in the process
    that has it. Each turn bears what was said before it, too, which is replayed (``MultiTurnAgent.resume``) where that process has ended or
    forgotten it. A judgement waits for a free process, and a turn for that of its conversation; ``judge_timeout_s`` of the environment
    covers that wait and the turns that are replayed, too. Only numbers and text go between the processes, all of which end with this one.
    Linux only.

    Args:
        make: makes the environment, here and once in a process from which those that judge are forked; it must be importable there, and
            start no threads.
        limits: number of the processes, and what each may use.

    Raises:
        JudgeProcessError: no process started, or this machine has none without network; says why.

    Example:
        >>> environment = ProcessJudge(Countdown, JudgeLimits(num_workers=4, time_s=5))
    """

    def __init__(self, make: Callable[[], NumberedAgent], limits: JudgeLimits | None = None) -> None:
        super().__init__(make)
        self.limits = limits or JudgeLimits()
        self._make, self._lock, self._is_closed = make, threading.Lock(), False
        self._starting = threading.Lock()
        """Of the first process; a start takes seconds, in which event loops want the other lock."""
        self._threads = ThreadPoolExecutor(self.limits.num_workers, "mcore-judge")
        self._template = _Template(make, self.env_id, self.limits)
        self._idle: list[_Worker] = []
        """The one that has had nothing to do for longest first."""
        self._waiting: list[_Request] = []
        self._places: ConversationMemory[int] = ConversationMemory(MOST_EPISODES * self.limits.num_workers)
        """Of the processes that have the conversations."""
        self.num_restarts = 0
        """Processes that were ended or died, and were replaced."""
        try:
            self._template.wait_until_ready()
            self._idle += [self._template.worker(place) for place in range(self.limits.num_workers)]
        except BaseException:
            self.close()
            raise

    async def _judged(self, response: str, problem: Problem) -> float:
        return await self._rewarded({"response": response, "problem": problem_fields(problem)}, problem)

    async def _opening(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        messages, place = await self._messages({"problem": problem_fields(problem)}, problem)
        self._places.put(Conversation(problem=problem, opening=messages), place)
        return messages

    async def _reply(
        self, conversation: Conversation, answer: str, on_turn: Callable[[], None] = ignore_turn
    ) -> Sequence[Mapping[str, Any]]:
        question = {"conversation": conversation_fields(conversation), "answer": answer}
        replies, place = await self._messages(question, conversation.problem, conversation)
        self._places.put(conversation.with_turn(answer, replies), place)
        return replies

    async def _outcome(self, conversation: Conversation, on_turn: Callable[[], None] = ignore_turn) -> float:
        question = {"conversation": conversation_fields(conversation)}
        return await self._rewarded(question, conversation.problem, conversation)

    def _forget(self, conversation: Conversation) -> None:
        self._places.take(conversation)

    async def _rewarded(self, question: Mapping[str, Any], problem: Problem, conversation: Conversation | None = None) -> float:
        return (await self._asked_there("reward", question, problem, conversation))[0]

    async def _messages(
        self, question: Mapping[str, Any], problem: Problem, conversation: Conversation | None = None
    ) -> tuple[Sequence[Mapping[str, Any]], int]:
        """And the place of the process that has the conversation now."""
        return await self._asked_there("messages", question, problem, conversation)

    async def _asked_there(
        self, name: str, question: Mapping[str, Any], problem: Problem, conversation: Conversation | None
    ) -> tuple[Any, int]:
        """A reply, and the place of the process that gave it."""
        place = None if conversation is None else self._places.take(conversation)
        num_turns = 0 if conversation is None else len(conversation.turns)
        request = _Request(question=question, problem=problem, num_turns=num_turns, name=name, place=place)
        with self._lock:
            self._threads.submit(self._ask_all)
            self._waiting.append(request)
        return await asyncio.wrap_future(request.future)

    def _ask_all(self) -> None:
        """In a thread, of which there are as many as processes: what waits for one that is idle."""
        while (taken := self._take()) is not None:
            request, worker = taken
            reply, failure = None, None
            try:
                if not worker.is_alive:
                    worker = self._replaced(worker)
                reply = worker.ask(request.question, request.problem, request.num_turns, request.name)
            except BaseException as error:
                failure = error
            with self._lock:
                self._idle.append(worker)
            # Its next turn finds the process idle.
            if failure is None:
                request.future.set_result((reply, worker.place))
            else:
                request.future.set_exception(failure)

    def _take(self) -> "tuple[_Request, _Worker] | None":
        """The first question for which a process is idle, and that process."""
        with self._lock:
            for request in list(self._waiting):
                worker = next((worker for worker in self._idle if request.place in (None, worker.place)), None)
                if worker is None:
                    continue
                self._waiting.remove(request)
                if request.future.set_running_or_notify_cancel():
                    self._idle.remove(worker)
                    return request, worker
        return None

    def _replaced(self, worker: "_Worker") -> "_Worker":
        worker.end()
        with self._starting:
            if self._is_closed:
                raise JudgeProcessError(f"the processes of {self.env_id!r} have ended")
            if not self._template.is_alive:
                self._template.end()
                self._template = _Template(self._make, self.env_id, self.limits)
                self._template.wait_until_ready()
            fresh = self._template.worker(worker.place)
            self.num_restarts += 1
        return fresh

    def close(self) -> None:
        """End the processes; may be called again."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            for request in self._waiting:
                request.future.cancel()
            self._waiting.clear()
            workers, self._idle = self._idle, []
        with self._starting:
            for worker in workers:
                worker.end()
            self._template.end()


@dataclass(frozen=True, kw_only=True, eq=False)
class _Request:
    """A question that waits for a process."""

    question: Mapping[str, Any]
    problem: Problem
    num_turns: int
    name: str
    """As of ``_Worker.ask``, and so are those before."""
    place: int | None
    """Of the process that has the conversation; None where any will do."""
    future: Future[tuple[Any, int]] = field(default_factory=Future)


class _Template:
    """The process that has the environment, and from which those that judge are forked.

    Args:
        make: makes the environment.
        env_id: of it, for messages.
        limits: of the processes.
    """

    def __init__(self, make: Callable[[], NumberedAgent], env_id: str, limits: JudgeLimits) -> None:
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

    def worker(self, place: int) -> "_Worker":
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
        return _Worker(self._env_id, self._limits, own, reply["pid"], place)

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()


class _Worker:
    """One process that judges; one that replaces it has the same place among them."""

    def __init__(self, env_id: str, limits: JudgeLimits, pipe: Connection, pid: int, place: int) -> None:
        self._env_id, self._limits, self._pipe, self.pid, self.place = env_id, limits, pipe, pid, place

    @property
    def is_alive(self) -> bool:
        # It writes nothing of itself: what can be read is the end.
        return not self._pipe.closed and not self._pipe.poll(0)

    def ask(self, question: Mapping[str, Any], problem: Problem, num_turns: int, name: str) -> Any:
        """What it replies.

        Args:
            question: of ``_answer``.
            problem: that it is about.
            num_turns: of its conversation so far; where they are replayed, the opening and each of them has the limit of time for itself.
            name: of what it has to give, reward or messages.

        Raises:
            JudgeProcessError: the process is lost, or what it was asked for failed; names environment and problem.
        """
        does, part = ("judges", "judge of") if "response" in question else ("holds the conversation about", "environment")
        where = f"the process that {does} problem {problem.problem_id!r} of {self._env_id!r}"
        late = f"{where} was ended after time_s={self._limits.time_s:g}"
        begin = time.monotonic()
        try:
            self._send(json.dumps(question).encode())
        except OSError:
            self.end()
            raise JudgeProcessError(late if time.monotonic() - begin >= self._limits.time_s else f"{where} died") from None
        reply = _reply(self._pipe, self._limits.time_s)
        for _ in range(num_turns + 1):
            if reply != _REPLAYED:
                break
            reply = _reply(self._pipe, self._limits.time_s)
        if not isinstance(reply, dict):
            self.end()
            raise JudgeProcessError(late if reply is None else f"{where} {reply}")
        try:
            return _read_reply(reply, name)
        except MessageError as error:
            raise JudgeProcessError(f"the {part} {self._env_id!r} failed: {str(error)[:500]}") from None

    def _send(self, content: bytes) -> None:
        """What no process reads, because something in it stopped it, ends with that process."""
        timer = threading.Timer(self._limits.time_s, self._kill)
        # Shorter ones stay in the pipe.
        if len(content) > _MOST_UNREAD_BYTES:
            timer.start()
        try:
            self._pipe.send_bytes(content)
        finally:
            timer.cancel()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> None:
        if not self._pipe.closed:
            # Its number is its own as long as the pipe is open on the other side.
            if not self._pipe.poll(0):
                self._kill()
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


def _read_reply(reply: dict[str, Any], name: str) -> Any:
    """The one field of a reply: a reward or messages.

    Raises:
        MessageError: the process wrote an error, or something else.
    """
    if isinstance(error := reply.get("error"), str):
        raise MessageError(error)
    value: Any = reply.get(name)
    # A reward that is no finite number is the agent's to name.
    if len(reply) != 1 or type(value) not in ((list,) if name == "messages" else (int, float)):
        raise MessageError(str(reply))
    return read_chat(value) if name == "messages" else float(value)


def _serve(make: Callable[[], NumberedAgent], pipe: Connection, limits: JudgeLimits) -> None:
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


def _judge_all(environment: NumberedAgent, pipe: Connection, limits: JudgeLimits) -> None:
    """In a process that judges: until nobody is there."""
    most_kept = int(limits.memory_gb * _SHARE_OF_EPISODES * 2**30) if environment.holds_conversations else 0
    _confine.limit_memory(int(limits.memory_gb * 2**30) + most_kept)
    num_ready_bytes = _confine.address_space_bytes()
    # One event loop, to which what episodes have between two turns belongs.
    conversations = asyncio.Runner()
    pipe.send_bytes(json.dumps({"pid": os.getpid()}).encode())

    def say_replayed() -> None:
        pipe.send_bytes(json.dumps(_REPLAYED).encode())

    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        has_failed = False
        try:
            if "response" in question:
                reply = asyncio.run(_answer(environment, question, say_replayed))
            else:
                # Its threads end with a turn, in whose time they are waited for.
                with ThreadPoolExecutor() as threads:
                    conversations.get_loop().set_default_executor(threads)
                    reply = conversations.run(_answer(environment, question, say_replayed))
            data = json.dumps(reply).encode()
            if len(data) > _MOST_REPLY_BYTES:
                raise ValueError(f"a reply of {len(data)} bytes is larger than {_MOST_REPLY_BYTES}")
        except Exception as error:
            data, has_failed = json.dumps({"error": f"{error!r}"[:1000]}).encode(), True
        if has_failed or asyncio.all_tasks(conversations.get_loop()):
            # Nothing that one conversation has begun runs in the time of another.
            environment._forget_episodes()
            conversations.close()
            conversations = asyncio.Runner()
        if _confine.address_space_bytes() - num_ready_bytes > most_kept > 0:
            environment._forget_episodes()
            gc.collect()
        pipe.send_bytes(data)


async def _answer(environment: NumberedAgent, question: dict[str, Any], on_turn: Callable[[], None]) -> dict[str, Any]:
    """To the question about a single answer, the beginning of a conversation, its next turn or its end."""
    if "conversation" in question:
        conversation = read_conversation(question["conversation"])
        if "answer" in question:
            return {"messages": await environment._reply(conversation, question["answer"], on_turn)}
        return {"reward": await environment._outcome(conversation, on_turn)}
    problem = read_problem(question["problem"])
    if "response" not in question:
        return {"messages": await environment._opening(problem)}
    assert isinstance(environment, NumberedProblems), "conversations are not asked for single answers"
    return {"reward": await environment.get_reward(question["response"], problem)}
