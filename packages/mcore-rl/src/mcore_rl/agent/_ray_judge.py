# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Environments that judge and reply on other machines."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_rl._ray_workers import RayOptions, RayWorkers
from mcore_rl._stability import experimental_api
from mcore_rl.agent._conversation import Conversation
from mcore_rl.agent._conversation_memory import ConversationMemory
from mcore_rl.agent._held_elsewhere import HeldElsewhere
from mcore_rl.agent._judged import Problem
from mcore_rl.agent._numbered import MOST_EPISODES, NumberedAgent, NumberedProblems, ignore_turn
from mcore_rl.agent._posed_here import PosedHere


@experimental_api
class RayJudge(HeldElsewhere, PosedHere):
    """An environment whose problems are posed here, and whose answers are judged by copies of it in workers of a Ray cluster. Where it
    holds conversations, these copies reply, too.

    Ray places the copies, starts one again that died, and repeats its calls; a judgement that is lost all the same, or takes longer than
    ``judge_timeout_s``, loses its answer alone, as of any environment.

    A conversation goes on in the worker that has it. A turn that this worker dies in, or that takes longer than ``judge_timeout_s``, loses
    its conversation alone: it is never repeated, for its tools may have been called. A worker that dies between two turns loses none.
    Each turn bears what was said before it, too, which is replayed (``MultiTurnAgent.resume``) where the worker was started again, or in
    another one where it does not answer.

    Args:
        make: makes the environment, here and in each worker.
        options: workers and limits.

    Raises:
        ModuleNotFoundError: Ray is not installed; names the extra.
        ValueError: there is no connection to a cluster.
        RayWorkerError: the workers did not start.

    Example:
        >>> ray.init(address="auto")
        >>> environment = RayJudge(Countdown, RayOptions(num_workers=64))
    """

    def __init__(self, make: Callable[[], NumberedAgent], options: RayOptions | None = None) -> None:
        super().__init__(make)
        self.workers = RayWorkers(functools.partial(JudgeWorker, make), options, name=self.env_id)
        self._places: ConversationMemory[int] = ConversationMemory(MOST_EPISODES * self.workers.options.num_workers)
        """Of the workers that have the conversations."""

    async def _judged(self, response: str, problem: Problem) -> float:
        return await self.workers.call("get_reward", response, problem)

    async def _opening(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        place = self.workers.least_busy()
        messages = await self.workers.call("start", problem, worker=place)
        self._places.put(Conversation(problem=problem, opening=messages), place)
        return messages

    async def _reply(
        self, conversation: Conversation, answer: str, on_turn: Callable[[], None] = ignore_turn
    ) -> Sequence[Mapping[str, Any]]:
        place = self._place_of(conversation)
        replies = await self.workers.call("reply", conversation, answer, worker=place, max_task_retries=0)
        self._places.put(conversation.with_turn(answer, replies), place)
        return replies

    async def _outcome(self, conversation: Conversation, on_turn: Callable[[], None] = ignore_turn) -> float:
        return await self.workers.call("reward", conversation, worker=self._place_of(conversation))

    def _forget(self, conversation: Conversation) -> None:
        self._places.take(conversation)

    def _place_of(self, conversation: Conversation) -> int:
        """The worker that has a conversation; another one where that is lost, or does not answer."""
        place = self._places.take(conversation)
        return self.workers.least_busy() if place is None or not self.workers.is_responsive(place) else place

    def close(self, drain_s: float = 0.0) -> None:
        """End the workers; may be called again.

        Args:
            drain_s: as of `RayWorkers`.
        """
        self.workers.close(drain_s)


class JudgeWorker:
    """An environment in its worker."""

    def __init__(self, make: Callable[[], NumberedAgent]) -> None:
        self._environment = make()

    async def get_reward(self, response: str, problem: Problem) -> float:
        """Of a single answer."""
        assert isinstance(self._environment, NumberedProblems), "conversations are not asked for single answers"
        return await self._environment.get_reward(response, problem)

    async def start(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        """The first messages of a conversation."""
        return await self._environment._opening(problem)

    async def reply(self, conversation: Conversation, answer: str) -> Sequence[Mapping[str, Any]]:
        """What is said to an answer."""
        return await self._environment._reply(conversation, answer)

    async def reward(self, conversation: Conversation) -> float:
        """How good a conversation was."""
        return await self._environment._outcome(conversation)
