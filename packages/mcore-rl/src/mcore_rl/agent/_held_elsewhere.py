# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Environments whose conversations are held elsewhere: in processes with limits, by workers of a cluster, or behind a server."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs
from mcore_rl.agent._conversation import Conversation
from mcore_rl.agent._judged import Attempt, Problem
from mcore_rl.agent._multi_turn import Episode, hold
from mcore_rl.agent._numbered import NumberedAgent, NumberedProblems
from mcore_rl.inference import InferenceInterface


@experimental_api
class HeldElsewhere(NumberedProblems):
    """Poses problems here; a subclass asks elsewhere for replies and rewards (``_opening``, ``_reply``, ``_outcome``, ``_judged``).

    Each question bears the whole conversation, so that nothing is lost with what is kept elsewhere: whoever answers may be replaced between
    two turns.
    """

    async def get_reward(self, response: str, problem: Problem) -> float:
        """Of a single answer.

        Raises:
            TypeError: the problem is one of a conversation.
        """
        if is_conversation(self, problem):
            name = problem.env_id or self.env_id
            raise TypeError(f"environment {name!r} holds conversations and judges no single answer; ask for rollouts")
        return await self._judged(response, problem)

    @abstractmethod
    async def _judged(self, response: str, problem: Problem) -> float:
        """How good a single answer is."""

    async def _play(self, interface: InferenceInterface, problem: Problem, args: GenericGenerationArgs, draw: str | None = None) -> Attempt:
        limits = self._limits_of(problem)
        if limits is None:
            return await super()._play(interface, problem, args, draw)
        return await hold(self, interface, lambda: _Episode(self, problem), problem, args, limits, draw)


def is_conversation(environment: NumberedAgent, problem: Problem) -> bool:
    """Whether an environment's problem is one of several turns."""
    return environment._limits_of(problem) is not None


class _Episode(Episode):
    """The conversation so far, with which the environment elsewhere is asked."""

    def __init__(self, environment: HeldElsewhere, problem: Problem) -> None:
        self._environment, self._so_far = environment, Conversation(problem=problem, opening=())

    async def start(self) -> Sequence[Mapping[str, Any]]:
        problem = self._so_far.problem
        self._so_far = Conversation(problem=problem, opening=await self._environment._opening(problem))
        return self._so_far.opening

    async def reply(self, answer: str) -> Sequence[Mapping[str, Any]]:
        replies = await self._environment._reply(self._so_far, answer)
        self._so_far = self._so_far.with_turn(answer, replies)
        return replies

    async def reward(self) -> float:
        return await self._environment._outcome(self._so_far)
