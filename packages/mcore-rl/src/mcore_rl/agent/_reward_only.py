# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents that ask once and judge the answer."""

from abc import abstractmethod
from collections.abc import Sequence

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, TokenRollout
from mcore_rl.agent._judged import Attempt, JudgedAgent, Problem
from mcore_rl.inference import InferenceInterface


@experimental_api
class RewardOnlyAgent(JudgedAgent):
    """Single-turn tasks: a subclass hands out problems and rewards.

    ``get_prompt`` poses the next problem, ``evaluation_prompts`` those of an evaluation, and ``get_dataset`` lists all that there are.
    `NumberedProblems` has the three from one function of a number.
    """

    def get_dataset(self, *, validation: bool = False) -> Sequence[Problem]:
        """All problems of training, or all of evaluations.

        Raises:
            NotImplementedError: they are made as they are asked for; names the environment.
        """
        raise NotImplementedError(f"environment {self.env_id!r} lists no problems; make it one of NumberedProblems, or give it get_dataset")

    @abstractmethod
    async def get_reward(self, response: str, problem: Problem) -> float:
        """How good an answer is."""

    async def _play(self, interface: InferenceInterface, problem: Problem, args: GenericGenerationArgs, draw: str | None = None) -> Attempt:
        # In a certain order their number is enough.
        answer = await self._answer(interface, interface.encode(problem.prompt), args, None if self._poses_at_once else draw)
        reward = await self._reward(self.get_reward(answer.response, problem), problem)
        rollout = TokenRollout(
            trajectory=tuple(answer.token_ids),
            reward=reward,
            generation_mask=(False,) * answer.prompt_length + (True,) * (len(answer.token_ids) - answer.prompt_length),
            logprobs=None if answer.logprobs is None else tuple(answer.logprobs),
            env_id=problem.env_id or self.env_id,
            problem_id=problem.problem_id,
            finish_reason=answer.finish_reason,
            routed_experts=answer.routed_experts,
            weight_versions=None if answer.weight_versions is None else tuple(answer.weight_versions),
        )
        return Attempt(rollout=rollout, response=answer.response)
