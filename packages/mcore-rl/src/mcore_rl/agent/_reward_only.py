# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents that ask once and judge the answer."""

import asyncio
from abc import abstractmethod
from dataclasses import dataclass

from mcore_rl._types import (
    EvaluationResponse,
    GenericGenerationArgs,
    InferenceRequest,
    InferenceResponse,
    RewardEvaluationResult,
    TokenRollout,
)
from mcore_rl.agent._base import EvaluationAgent, GroupedRolloutGenerator
from mcore_rl.inference import InferenceInterface


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt and what is needed to judge an answer."""

    problem_id: str
    prompt: str
    golden: str = ""


class RewardOnlyAgent(GroupedRolloutGenerator, EvaluationAgent):
    """Single-turn tasks: a subclass hands out problems and rewards.

    Args:
        env_id: name under which rewards are reported.
    """

    def __init__(self, env_id: str) -> None:
        self.env_id = env_id

    @abstractmethod
    async def get_prompt(self, *, validation: bool = False) -> Problem:
        """The next problem."""

    @abstractmethod
    async def get_reward(self, response: str, problem: Problem) -> float:
        """How good an answer is."""

    async def group_rollout(self, interface: InferenceInterface, *, size: int, args: GenericGenerationArgs) -> list[TokenRollout]:
        problem = await self.get_prompt()
        answers = await self._ask(interface, problem, size, args)
        rewards = await asyncio.gather(*(self.get_reward(answer.response, problem) for answer in answers))
        return [
            TokenRollout(
                trajectory=tuple(answer.token_ids),
                reward=reward,
                generation_mask=tuple(i >= answer.prompt_length for i in range(len(answer.token_ids))),
                logprobs=tuple(answer.logprobs),
                env_id=self.env_id,
                problem_id=problem.problem_id,
                finish_reason=answer.finish_reason,
            )
            for answer, reward in zip(answers, rewards, strict=True)
        ]

    async def run_evaluation(self, interface: InferenceInterface, *, num_prompts: int, args: GenericGenerationArgs) -> EvaluationResponse:
        async def one() -> RewardEvaluationResult:
            problem = await self.get_prompt(validation=True)
            [answer] = await self._ask(interface, problem, 1, args)
            reward = await self.get_reward(answer.response, problem)
            return RewardEvaluationResult(prompt=problem.prompt, response=answer.response, reward=reward, problem_id=problem.problem_id)

        return EvaluationResponse(env_id=self.env_id, results=await asyncio.gather(*(one() for _ in range(num_prompts))))

    async def _ask(self, interface: InferenceInterface, problem: Problem, n: int, args: GenericGenerationArgs) -> list[InferenceResponse]:
        request = InferenceRequest(prompts=[interface.encode(problem.prompt)], n=n, generation_args=args)
        [answers] = await interface.agenerate(request)
        return answers
