# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the loop asks of an agent."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from mcore_rl._late import LATE
from mcore_rl._stability import experimental_api
from mcore_rl._types import EvaluationResponse, GenericGenerationArgs, Rollout, TokenRollout
from mcore_rl.inference import InferenceInterface

Result = TypeVar("Result")


@experimental_api
class TokenizedRolloutGenerator(ABC):
    """Produces rollouts, each of a problem of its own."""

    @abstractmethod
    async def rollout(self, interface: InferenceInterface, *, args: GenericGenerationArgs) -> TokenRollout | None:
        """A judged answer to the next problem; None when it is lost."""

    async def get_reward_rollouts(
        self, interface: InferenceInterface, *, num_rollouts: int, args: GenericGenerationArgs
    ) -> list[TokenRollout]:
        """Rollouts of ``num_rollouts`` problems, fewer by those that are lost; a failure cancels the others."""
        return await all_at_once([self.rollout(interface, args=args) for _ in range(num_rollouts)])


@experimental_api
class RolloutGenerator(ABC):
    """Produces rollouts as texts, each of a problem of its own: for data sets and judges."""

    @abstractmethod
    async def rollout(self, interface: InferenceInterface, *, args: GenericGenerationArgs) -> Rollout | None:
        """A judged answer to the next problem; None when it is lost."""

    async def get_reward_rollouts(self, interface: InferenceInterface, *, num_rollouts: int, args: GenericGenerationArgs) -> list[Rollout]:
        """Rollouts of ``num_rollouts`` problems, fewer by those that are lost; a failure cancels the others."""
        return await all_at_once([self.rollout(interface, args=args) for _ in range(num_rollouts)])


async def all_at_once(calls: Sequence[Coroutine[Any, Any, Result | None]], timeout_s: float | None = None) -> list[Result]:
    """What the calls give, in their order, without None; none of them goes on when this ends.

    Args:
        calls: at least none.
        timeout_s: limit of all, after which those that go on are cancelled and give nothing; None for no limit.

    Raises:
        Exception: that of the first call that failed.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    done: set[asyncio.Task[Result | None]] = set()
    try:
        if tasks:
            done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [result for task in tasks if task in done and (result := task.result()) is not None]


@experimental_api
class GroupedRolloutGenerator(ABC):
    """Produces groups of rollouts that answer the same problem."""

    @abstractmethod
    async def group_rollout(self, interface: InferenceInterface, *, size: int, args: GenericGenerationArgs) -> list[TokenRollout]:
        """``size`` judged answers to one problem. Texts (`Rollout`) become the tokens that ``interface.encode`` gives."""

    async def get_grouped_rollouts(
        self,
        interface: InferenceInterface,
        *,
        num_groups: int,
        size: int,
        args: GenericGenerationArgs,
        timeout_s: float | None = None,
        in_order: bool = False,
    ) -> AsyncIterator[list[TokenRollout]]:
        """``num_groups`` groups as they finish; a failing group's exception reaches the consumer at once and cancels the rest.

        After ``timeout_s`` the unfinished ones are cancelled; of those the ones come that end with the rollouts they have
        (`RewardOnlyAgent`), and the others are missing.

        With ``in_order`` a group comes behind those that were begun before it, so that what is made of them does not depend on who was
        faster.
        """
        clock = asyncio.get_running_loop().time
        end = None if timeout_s is None else clock() + timeout_s
        tasks = [asyncio.ensure_future(self.group_rollout(interface, size=size, args=args)) for _ in range(num_groups)]
        pending, unread = set(tasks), tasks
        try:
            while pending:
                left = None if end is None else max(0.0, end - clock())
                done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    for task in pending:
                        task.cancel(LATE)
                    done, pending = (await asyncio.wait(pending))[0], set()
                for task in tasks:
                    if task in done and not task.cancelled() and (error := task.exception()) is not None:
                        raise error
                first = next((place for place, task in enumerate(unread) if task in pending), len(unread))
                ready = unread[:first] if in_order else [task for task in unread if task not in pending]
                unread = [task for task in unread if task not in ready]
                for task in ready:
                    if not task.cancelled():
                        yield task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@experimental_api
class EvaluationAgent(ABC):
    """Measures a model on problems of its own."""

    @abstractmethod
    async def run_evaluation(self, interface: InferenceInterface, *, num_prompts: int, args: GenericGenerationArgs) -> EvaluationResponse:
        """Answers to ``num_prompts`` problems, judged."""
