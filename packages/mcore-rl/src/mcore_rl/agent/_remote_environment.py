# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An environment whose problems are posed and judged, and whose conversations are held, by a server."""

import asyncio
import json
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from mcore_rl._http import HttpPeer, PeerError, PeerReplyError, PeerTimeoutError
from mcore_rl._stability import experimental_api
from mcore_rl.agent._conversation import Conversation, TurnLimits
from mcore_rl.agent._environment_messages import (
    MOST_BYTES,
    EnvironmentCard,
    MessageError,
    Types,
    conversation_fields,
    problem_fields,
    read_chat,
    read_message,
    read_problem,
)
from mcore_rl.agent._held_elsewhere import HeldElsewhere
from mcore_rl.agent._judged import Problem
from mcore_rl.agent._numbered import ignore_turn

_FIRST_WAIT_S = 0.1
T = TypeVar("T")


@experimental_api
class RemoteEnvironment(HeldElsewhere):
    """The environment of an `EnvironmentServer`.

    Its limits are those of the environment there, and ``timeout_s`` more for the way. Every call is a connection of its own, which ends
    with whoever waits. A call whose connection fails is repeated: problems, replies and rewards are functions of what is asked, which of a
    conversation is all that was said. A reward or a reply that does not come in time, or that the server refuses, loses its answer or its
    conversation alone, as of any environment; the error names environment and server.

    Args:
        url: of the server without path, as ``http://127.0.0.1:8100``.
        api_key: sent as a bearer token.
        timeout_s: seconds that a call may take beyond the limit of the environment.
        num_tries: times that a call whose connection fails is made, at most.

    Raises:
        ValueError: a setting out of its range; names it.
        PeerError: the server gave no answer, or one that is none; names it.

    Example:
        >>> RemoteEnvironment("http://127.0.0.1:8100", api_key="secret").problem(0).env_id
        'countdown'
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0, num_tries: int = 3) -> None:
        if num_tries < 1:
            raise ValueError(f"num_tries={num_tries} must be at least 1")
        self._url, self._api_key, self._timeout_s, self._num_tries = url, api_key, timeout_s, num_tries
        self._name = "an environment"
        self._card = _blocking(self._describe())
        self._name = f"environment {self._card.env_id!r}"
        # The limit of a call, whose error says more, ends before that of the agent.
        super().__init__(
            self._card.env_id,
            prompt_timeout_s=self._card.prompt_timeout_s + 2 * timeout_s,
            answer_timeout_s=self._card.answer_timeout_s,
            judge_timeout_s=self._card.judge_timeout_s + 2 * timeout_s,
        )

    @property
    def _poses_at_once(self) -> bool:
        return False

    @property
    def env_ids(self) -> tuple[str, ...]:
        return tuple(self._card.turn_limits)

    @property
    def turn_limits(self) -> Mapping[str, TurnLimits | None]:
        return self._card.turn_limits

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        return self._card.tools

    def problem(self, number: int) -> Problem:
        return _blocking(self._posed(number))

    def num_problems(self, *, validation: bool = False) -> int:
        return self._card.num_evaluation if validation else self._card.num_problems

    def attempt(self, problem: Problem, generator: random.Random) -> str | None:
        body = {"problem": problem_fields(problem), "seed": generator.getrandbits(62)}
        return _blocking(self._ask("/attempt", body, self._card.prompt_timeout_s, {"attempt": (str, type(None))}))["attempt"]

    def attempt_turns(self, problem: Problem, generator: random.Random) -> Sequence[str] | None:
        body = {"problem": problem_fields(problem), "seed": generator.getrandbits(62)}
        path, types = "/conversation/attempt", {"answers": (list, type(None))}
        answers = _blocking(self._ask(path, body, self._card.prompt_timeout_s, types))["answers"]
        if answers is not None and not all(isinstance(answer, str) for answer in answers):
            raise PeerReplyError(f"{self._name}: {self._url} gave no reply to {path}: an answer is no text")
        return answers

    async def _judged(self, response: str, problem: Problem) -> float:
        return await self._rewarded("/reward", {"problem": problem_fields(problem), "response": response})

    async def _opening(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        return await self._messages("/conversation/start", {"problem": problem_fields(problem)})

    async def _reply(
        self, conversation: Conversation, answer: str, on_turn: Callable[[], None] = ignore_turn
    ) -> Sequence[Mapping[str, Any]]:
        return await self._messages("/conversation/reply", {"conversation": conversation_fields(conversation), "answer": answer})

    async def _outcome(self, conversation: Conversation, on_turn: Callable[[], None] = ignore_turn) -> float:
        return await self._rewarded("/conversation/reward", {"conversation": conversation_fields(conversation)})

    async def _rewarded(self, path: str, body: Mapping[str, Any]) -> float:
        return float((await self._ask(path, body, self._card.judge_timeout_s, {"reward": (int, float)}))["reward"])

    async def _messages(self, path: str, body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        reply = await self._ask(path, body, self._card.judge_timeout_s, {"messages": list})
        try:
            return read_chat(reply["messages"])
        except MessageError as error:
            raise PeerReplyError(f"{self._name}: {self._url} gave no reply to {path}: {error}") from None

    async def _posed(self, number: int) -> Problem:
        reply = await self._ask("/problem", {"number": number}, self._card.prompt_timeout_s, {"problem": dict})
        try:
            return read_problem(reply["problem"])
        except MessageError as error:
            raise PeerReplyError(f"{self._name}: {self._url} posed no problem: {error}") from None

    async def _describe(self) -> EnvironmentCard:
        content = await self._call("/environment", {}, 0.0)
        try:
            return EnvironmentCard.read(content)
        except MessageError as error:
            raise PeerReplyError(f"{self._url} is no server of an environment: {error}") from None

    async def _ask(self, path: str, body: Mapping[str, Any], limit_s: float, types: Types) -> dict[str, Any]:
        content = await self._call(path, body, limit_s)
        try:
            return read_message(content, types)
        except MessageError as error:
            raise PeerReplyError(f"{self._name}: {self._url} gave no reply to {path}: {error}") from None

    async def _call(self, path: str, body: Mapping[str, Any], limit_s: float) -> bytes:
        peer = HttpPeer(self._url, api_key=self._api_key, timeout_s=limit_s + self._timeout_s)
        content = json.dumps(body).encode()
        if len(content) > MOST_BYTES:
            # A server that refuses it closes while it comes, which looks as if it were lost.
            raise PeerError(f"{self._name}: what {self._url}{path} is asked has {len(content)} bytes, more than {MOST_BYTES}")
        for tries_left in range(self._num_tries - 1, -1, -1):
            try:
                return await peer.post(path, content)
            except PeerError as error:
                if not tries_left or error.status is not None or isinstance(error, PeerReplyError | PeerTimeoutError):
                    named = type(error)(f"{self._name}: {error}")
                    named.status = error.status
                    raise named from error
            await asyncio.sleep(_FIRST_WAIT_S * 4 ** (self._num_tries - 1 - tries_left))
        raise AssertionError


def _blocking(call: Coroutine[Any, Any, T]) -> T:
    """What a call gives, in a thread that has no event loop yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, call).result()
