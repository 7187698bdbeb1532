# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An environment behind HTTP, for trainers elsewhere."""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import logging
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from mcore_rl._stability import experimental_api
from mcore_rl._types import check_reward
from mcore_rl.agent._environment_messages import (
    VERSION,
    EnvironmentCard,
    MessageError,
    problem_fields,
    read_conversation,
    read_message,
    read_problem,
)
from mcore_rl.agent._held_elsewhere import is_conversation
from mcore_rl.agent._judged import Problem
from mcore_rl.agent._numbered import NumberedAgent, NumberedProblems

_log = logging.getLogger(__name__)
_END_S = 2.0


@experimental_api
class EnvironmentServer:
    """Poses the problems of an environment, judges answers to them and holds conversations, for each `RemoteEnvironment` that asks.

    POST /environment, /problem, /attempt and /reward take and give JSON objects, and so do /conversation/start, /conversation/reply,
    /conversation/reward and /conversation/attempt; a field that is unknown, missing or of another type is refused with status 400. GET
    /health says ``{"status": "ok"}``. The server keeps episodes between their turns. Each request bears what was said, too,
    which is replayed (``MultiTurnAgent.resume``) where the episode is lost, so that any server of the same environment goes on with it.
    The environment is called in one event loop, of a thread of its own: a judge or a tool that takes long belongs in a `ProcessJudge`. One
    that exceeds the environment's ``judge_timeout_s`` is given up with status 504, one that raises with 500.

    Args:
        environment: whose problems are posed.
        host: address to listen at.
        port: 0 for a free one.
        api_key: that each request must bear, but /health; needed where ``host`` is no address of this machine alone.
        max_requests: requests that are served at a time; further ones wait to be accepted.

    Raises:
        ValueError: an address that others reach without an ``api_key``, or a number out of its range; names it.
        OSError: the address cannot be listened at.

    Example:
        >>> with EnvironmentServer(Countdown(), api_key="secret") as server:
        ...     remote = RemoteEnvironment(server.url, api_key="secret")
    """

    def __init__(
        self, environment: NumberedAgent, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None, max_requests: int = 256
    ) -> None:
        if not api_key and not _is_loopback(host):
            raise ValueError(f"host={host!r} is reached by others; set api_key, or host='127.0.0.1'")
        if any(not " " < character <= "~" for character in api_key or ""):
            raise ValueError("api_key must be visible ASCII characters; take spaces and line ends off")
        if max_requests < 1:
            raise ValueError(f"max_requests={max_requests} must be at least 1")
        self.environment = environment
        self._key = f"Bearer {api_key}" if api_key else ""
        # Here, since Python's HTTP server takes long to import.
        from mcore_rl.agent._environment_http import POLL_S, HttpServer

        self._http = HttpServer((host, port), self, max_requests)
        self._loop = asyncio.new_event_loop()
        works = (self._loop.run_forever, functools.partial(self._http.serve_forever, POLL_S))
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def wait(self) -> None:
        """Serve until ``close``."""
        self._threads[1].join()

    def close(self) -> None:
        """Take no more requests, and give up those that are served; may be called again."""
        self._http.is_closing.set()
        self._http.shutdown()
        self._http.server_close()
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._threads[0].join(_END_S)
        # An environment that holds the loop up keeps its thread, which ends with the process.
        if not self._threads[0].is_alive():
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def is_allowed(self, authorization: str) -> bool:
        """Whether a request bears the key."""
        return not self._key or hmac.compare_digest(authorization.encode(), self._key.encode())

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and reply to a request; in a thread of its own."""
        posing, judging = self.environment.prompt_timeout_s, self.environment.judge_timeout_s
        works: dict[str, tuple[Callable[[bytes], Awaitable[dict[str, Any]]], float]] = {
            "/environment": (self._card, posing),
            "/problem": (self._problem, posing),
            "/attempt": (self._attempt, posing),
            "/reward": (self._reward, judging),
            "/conversation/attempt": (self._conversation_attempt, posing),
            "/conversation/start": (self._conversation_start, judging),
            "/conversation/reply": (self._conversation_reply, judging),
            "/conversation/reward": (self._conversation_reward, judging),
        }
        if path not in works:
            return 404, {"error": f"no {path[:60]} here"}
        work, limit = works[path]
        call = asyncio.run_coroutine_threadsafe(self._limited(work, body, limit), self._loop)
        try:
            # The loop's own limit comes first, but where the environment holds the loop up.
            return 200, call.result(limit + 1.0)
        except MessageError as error:
            return 400, {"error": str(error)}
        except TimeoutError as error:
            call.cancel()
            # One of the environment's own, as of a mixture, says what took long.
            reason = f"failed: {error!r}"[:500] if str(error) else f"took longer than its limit of {limit:g} s"
            return 504, {"error": f"environment {self.environment.env_id!r} {reason}"}
        except Exception as error:
            _log.warning("environment %r: %s failed: %r", self.environment.env_id, path, error)
            return 500, {"error": f"environment {self.environment.env_id!r} failed: {error!r}"[:500]}

    async def _limited(self, work: Callable[[bytes], Awaitable[dict[str, Any]]], body: bytes, limit: float) -> dict[str, Any]:
        return await asyncio.wait_for(work(body), limit)

    async def _card(self, body: bytes) -> dict[str, Any]:
        read_message(body, {})
        own = self.environment
        card = EnvironmentCard(
            version=VERSION,
            env_id=own.env_id,
            num_problems=own.num_problems(),
            num_evaluation=own.num_problems(validation=True),
            turn_limits=own.turn_limits,
            tools=list(own.tools),
            prompt_timeout_s=own.prompt_timeout_s,
            answer_timeout_s=own.answer_timeout_s,
            judge_timeout_s=own.judge_timeout_s,
        )
        return asdict(card)

    async def _problem(self, body: bytes) -> dict[str, Any]:
        number = read_message(body, {"number": int})["number"]
        if number < 0:
            raise MessageError(f"number={number} must not be negative")
        return {"problem": problem_fields(self.environment.problem(number))}

    async def _attempt(self, body: bytes) -> dict[str, Any]:
        message = read_message(body, {"problem": dict, "seed": int})
        return {"attempt": self.environment.attempt(read_problem(message["problem"]), random.Random(message["seed"]))}

    async def _reward(self, body: bytes) -> dict[str, Any]:
        message = read_message(body, {"problem": dict, "response": str})
        problem = read_problem(message["problem"])
        if not isinstance(self.environment, NumberedProblems) or is_conversation(self.environment, problem):
            raise MessageError(f"problem {problem.problem_id!r} is one of a conversation; ask /conversation/reward")
        return self._judged(await self.environment.get_reward(message["response"], problem), problem)

    async def _conversation_attempt(self, body: bytes) -> dict[str, Any]:
        message = read_message(body, {"problem": dict, "seed": int})
        answers = self.environment.attempt_turns(read_problem(message["problem"]), random.Random(message["seed"]))
        return {"answers": None if answers is None else list(answers)}

    async def _conversation_start(self, body: bytes) -> dict[str, Any]:
        problem = read_problem(read_message(body, {"problem": dict})["problem"])
        self._check_turns(problem, 0)
        return {"messages": await self.environment._opening(problem)}

    async def _conversation_reply(self, body: bytes) -> dict[str, Any]:
        message = read_message(body, {"conversation": dict, "answer": str})
        conversation = read_conversation(message["conversation"], lambda problem, before: self._check_turns(problem, before + 1))
        if conversation.turns and not conversation.turns[-1].replies:
            raise MessageError("the last turn of a conversation has no replies, which ends it; ask /conversation/reward")
        return {"messages": await self.environment._reply(conversation, message["answer"])}

    async def _conversation_reward(self, body: bytes) -> dict[str, Any]:
        conversation = read_conversation(read_message(body, {"conversation": dict})["conversation"], self._check_turns)
        return self._judged(await self.environment._outcome(conversation), conversation.problem)

    def _check_turns(self, problem: Problem, num_turns: int) -> None:
        """Whether a problem is one of a conversation of so many turns."""
        limits = self.environment._limits_of(problem)
        if limits is None:
            raise MessageError(f"problem {problem.problem_id!r} is one of a single answer; ask /reward")
        if num_turns > limits.max_turns:
            raise MessageError(f"a conversation of {num_turns} turns is longer than max_turns={limits.max_turns}")

    def _judged(self, reward: float, problem: Problem) -> dict[str, Any]:
        check_reward(reward, env_id=problem.env_id or self.environment.env_id, problem_id=problem.problem_id)
        return {"reward": float(reward)}


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
