# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents that ask once and judge the answer."""

import asyncio
import logging
from abc import abstractmethod
from dataclasses import dataclass

from mcore_rl._stability import experimental_api
from mcore_rl._types import (
    EvaluationResponse,
    GenericGenerationArgs,
    InferenceRequest,
    InferenceResponse,
    RewardEvaluationResult,
    TokenRollout,
    check_reward,
)
from mcore_rl.agent._base import LATE, EvaluationAgent, GroupedRolloutGenerator
from mcore_rl.inference import InferenceInterface

_log = logging.getLogger(__name__)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt and what is needed to judge an answer."""

    problem_id: str
    prompt: str
    golden: str = ""
    """The reference answer, for judges that compare."""
    env_id: str = ""
    """The environment that poses it, where an agent has several; empty for the agent's own."""


@experimental_api
class RewardOnlyAgent(GroupedRolloutGenerator, EvaluationAgent):
    """Single-turn tasks: a subclass hands out problems and rewards.

    Each answer is judged as soon as it is there, while others are generated. One that does not come in time, or whose judge raises or
    takes too long, is dropped with a warning and counts as missing: the others of its group go on. A reward that is no finite number is an
    error.

    Args:
        env_id: name under which rewards are reported.
        prompt_timeout_s: limit of one ``get_prompt``.
        answer_timeout_s: limit of each answer.
        judge_timeout_s: limit of one ``get_reward``.

    Raises:
        ValueError: a limit that is not positive.
    """

    def __init__(
        self, env_id: str, *, prompt_timeout_s: float = 60.0, answer_timeout_s: float = 3600.0, judge_timeout_s: float = 60.0
    ) -> None:
        self.env_id = env_id
        self.prompt_timeout_s, self.answer_timeout_s, self.judge_timeout_s = prompt_timeout_s, answer_timeout_s, judge_timeout_s
        for name in ("prompt_timeout_s", "answer_timeout_s", "judge_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} of environment {env_id!r} must be positive")

    @abstractmethod
    async def get_prompt(self, *, validation: bool = False) -> Problem:
        """The next problem."""

    @abstractmethod
    async def get_reward(self, response: str, problem: Problem) -> float:
        """How good an answer is."""

    async def group_rollout(self, interface: InferenceInterface, *, size: int, args: GenericGenerationArgs) -> list[TokenRollout]:
        problem = await self._problem()
        request = InferenceRequest(prompts=[interface.encode(problem.prompt)], generation_args=args)
        tasks = [asyncio.ensure_future(self._judged(interface, problem, request)) for _ in range(size)]
        late = False
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            late = error.args == (LATE,)
            if not late:
                raise
        finally:
            missing = sum(task.cancel() for task in tasks)
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if late:
            _log.warning("environment %r: %d answers to problem %r are dropped at the end", self.env_id, missing, problem.problem_id)
        return [self._rollout(*result, problem) for result in results if isinstance(result, tuple)]

    def _rollout(self, answer: InferenceResponse, reward: float, problem: Problem) -> TokenRollout:
        return TokenRollout(
            trajectory=tuple(answer.token_ids),
            reward=reward,
            generation_mask=tuple(i >= answer.prompt_length for i in range(len(answer.token_ids))),
            logprobs=tuple(answer.logprobs),
            env_id=problem.env_id or self.env_id,
            problem_id=problem.problem_id,
            finish_reason=answer.finish_reason,
        )

    async def run_evaluation(
        self, interface: InferenceInterface, *, num_prompts: int, args: GenericGenerationArgs, num_samples: int = 1
    ) -> EvaluationResponse:
        """Answers to ``num_prompts`` problems, judged.

        Args:
            interface: answers.
            num_prompts: problems.
            args: how answers are drawn.
            num_samples: answers to each problem, for ``EvaluationResponse.pass_at``.
        """

        async def one(problem: Problem, request: InferenceRequest) -> RewardEvaluationResult | None:
            judged = await self._judged(interface, problem, request)
            if judged is None:
                return None
            answer, reward = judged
            return RewardEvaluationResult(prompt=problem.prompt, response=answer.response, reward=reward, problem_id=problem.problem_id)

        async def ask() -> list[RewardEvaluationResult | None]:
            problem = await self._problem(validation=True)
            request = InferenceRequest(prompts=[interface.encode(problem.prompt)], generation_args=args)
            return await asyncio.gather(*(one(problem, request) for _ in range(num_samples)))

        answers = [result for results in await asyncio.gather(*(ask() for _ in range(num_prompts))) for result in results]
        judged = [result for result in answers if result is not None]
        return EvaluationResponse(env_id=self.env_id, results=judged, num_dropped=len(answers) - len(judged))

    async def _problem(self, *, validation: bool = False) -> Problem:
        try:
            async with asyncio.timeout(self.prompt_timeout_s) as limit:
                return await self.get_prompt(validation=validation)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"environment {self.env_id!r} posed no problem within prompt_timeout_s={self.prompt_timeout_s}") from error

    async def _judged(
        self, interface: InferenceInterface, problem: Problem, request: InferenceRequest
    ) -> tuple[InferenceResponse, float] | None:
        """One answer and its reward; None when either is lost."""
        try:
            async with asyncio.timeout(self.answer_timeout_s) as limit:
                [[answer]] = await interface.agenerate(request)
        except TimeoutError:
            if not limit.expired():
                raise
            _log.warning(
                "environment %r: an answer to problem %r is dropped, not there within answer_timeout_s=%s",
                self.env_id, problem.problem_id, self.answer_timeout_s,
            )  # fmt: skip
            return None
        reward = await self._judge(answer, problem)
        return None if reward is None else (answer, reward)

    async def _judge(self, answer: InferenceResponse, problem: Problem) -> float | None:
        """The reward; None when the judge fails."""
        try:
            reward = await asyncio.wait_for(self.get_reward(answer.response, problem), self.judge_timeout_s)
        except Exception as error:
            _log.warning(
                "environment %r: an answer to problem %r is dropped, its judge failed within judge_timeout_s=%s: %r",
                self.env_id, problem.problem_id, self.judge_timeout_s, error,
            )  # fmt: skip
            return None
        check_reward(reward, env_id=problem.env_id or self.env_id, problem_id=problem.problem_id)
        return float(reward)
