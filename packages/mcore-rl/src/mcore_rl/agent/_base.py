# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the loop asks of an agent."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from mcore_rl._types import EvaluationResponse, GenericGenerationArgs, TokenRollout
from mcore_rl.inference import InferenceInterface


class GroupedRolloutGenerator(ABC):
    """Produces groups of rollouts that answer the same problem."""

    @abstractmethod
    async def group_rollout(self, interface: InferenceInterface, *, size: int, args: GenericGenerationArgs) -> list[TokenRollout]:
        """``size`` judged answers to one problem."""

    async def get_grouped_rollouts(
        self, interface: InferenceInterface, *, num_groups: int, size: int, args: GenericGenerationArgs
    ) -> AsyncIterator[list[TokenRollout]]:
        """``num_groups`` groups as they finish; a failing group's exception reaches the consumer and cancels the rest."""
        tasks = [asyncio.ensure_future(self.group_rollout(interface, size=size, args=args)) for _ in range(num_groups)]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class EvaluationAgent(ABC):
    """Measures a model on problems of its own."""

    @abstractmethod
    async def run_evaluation(self, interface: InferenceInterface, *, num_prompts: int, args: GenericGenerationArgs) -> EvaluationResponse:
        """Answers to ``num_prompts`` problems, judged."""
