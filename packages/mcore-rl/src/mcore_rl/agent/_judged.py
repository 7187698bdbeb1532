# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What agents that judge answers have in common: groups, evaluations, limits of time."""

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mcore_rl._late import LATE
from mcore_rl._lost import LostError, LostGroup, described
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
from mcore_rl.agent._base import EvaluationAgent, GroupedRolloutGenerator, TokenizedRolloutGenerator, all_at_once
from mcore_rl.agent._sibling_routing import routed_as_siblings
from mcore_rl.inference import InferenceInterface

_log = logging.getLogger(__name__)
T = TypeVar("T")
_RETRY_WAITS_S = (0.1, 1.0)
"""Before a request whose failure was transient is asked again."""


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


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A judged trajectory, and what the policy said in it."""

    rollout: TokenRollout
    response: str


@experimental_api
class JudgedAgent(TokenizedRolloutGenerator, GroupedRolloutGenerator, EvaluationAgent):
    """Poses problems and judges attempts at them.

    Each attempt is judged as soon as it is there, while others are generated. A problem of training that cannot be posed is dropped with
    its answers; where none of an iteration can, it fails with what the last one raised. An attempt whose request the engine refuses,
    which does not come in time, or whose judge raises or takes too long, is dropped: the others of its group go on. A warning names each,
    and it counts as missing. A request whose failure is transient is repeated, twice at most. A reward that is no finite number is an
    error, and so is an engine that failed.

    Args:
        env_id: name under which rewards are reported.
        prompt_timeout_s: limit of one ``get_prompt``.
        answer_timeout_s: limit of each answer.
        judge_timeout_s: limit of each call of the environment that judges or replies.

    Raises:
        ValueError: a limit that is not positive.
    """

    _num_draws: int = 0
    _num_evaluations: int = 0

    def __init__(
        self, env_id: str, *, prompt_timeout_s: float = 60.0, answer_timeout_s: float = 3600.0, judge_timeout_s: float = 60.0
    ) -> None:
        self.env_id = env_id
        self.prompt_timeout_s, self.answer_timeout_s, self.judge_timeout_s = prompt_timeout_s, answer_timeout_s, judge_timeout_s
        for name in ("prompt_timeout_s", "answer_timeout_s", "judge_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} of environment {env_id!r} must be positive")

    @property
    def _poses_at_once(self) -> bool:
        """Whether problems are there as soon as they are asked for, and answers are asked for in their order."""
        return True

    @abstractmethod
    async def get_prompt(self, *, validation: bool = False) -> Problem:
        """The next problem."""

    async def evaluation_prompts(self, num_prompts: int, *, validation: bool = True) -> list[Problem]:
        """The problems that an evaluation asks.

        Args:
            num_prompts: so many.
            validation: those of evaluations; else those of training.

        Raises:
            TimeoutError: one is not there within ``prompt_timeout_s``.
        """
        return await all_at_once([self._problem(validation=validation) for _ in range(num_prompts)])

    @abstractmethod
    async def _play(self, interface: InferenceInterface, problem: Problem, args: GenericGenerationArgs, draw: str | None = None) -> Attempt:
        """One attempt; ``draw`` names it, for seeds of requests that come in no certain order.

        Raises:
            LostError: it, or its reward, is lost.
        """

    async def _attempt(self, interface: InferenceInterface, problem: Problem, args: GenericGenerationArgs, draw: str) -> Attempt | None:
        """One attempt; None when it, or its reward, is lost."""
        try:
            return await self._play(interface, problem, args, draw)
        except LostError as error:
            _log.warning("environment %r: an answer to problem %r is dropped, %s", self.env_id, problem.problem_id, error)
            return None

    async def rollout(self, interface: InferenceInterface, *, args: GenericGenerationArgs) -> TokenRollout | None:
        draw = self._next_draw()
        problem = await self._problem_or_failure()
        attempt = None if isinstance(problem, Exception) else await self._attempt(interface, problem, args, f"{draw} 0")
        return None if attempt is None else attempt.rollout

    async def group_rollout(self, interface: InferenceInterface, *, size: int, args: GenericGenerationArgs) -> list[TokenRollout]:
        draw = self._next_draw()
        problem = await self._problem_or_failure()
        if isinstance(problem, Exception):
            return LostGroup(problem)
        tasks = [asyncio.ensure_future(self._attempt(interface, problem, args, f"{draw} {choice}")) for choice in range(size)]
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
        rollouts = routed_as_siblings([result.rollout for result in results if isinstance(result, Attempt)])
        if not rollouts:
            _log.warning("environment %r: problem %r is dropped, all of its %d answers are lost", self.env_id, problem.problem_id, size)
        return rollouts

    async def run_evaluation(
        self,
        interface: InferenceInterface,
        *,
        num_prompts: int,
        args: GenericGenerationArgs,
        num_samples: int = 1,
        timeout_s: float | None = None,
    ) -> EvaluationResponse:
        """Answers to ``num_prompts`` problems of ``evaluation_prompts``, judged; when it ends, or fails, none of them goes on.

        Args:
            interface: answers.
            num_prompts: problems.
            args: how answers are drawn.
            num_samples: answers to each problem, for ``EvaluationResponse.pass_at``.
            timeout_s: limit of all answers, after which those that are missing are dropped; None for that of each alone.
        """

        self._num_evaluations += 1
        evaluation = f"{self.env_id} evaluation {self._num_evaluations}"

        async def one(problem: Problem, place: int) -> RewardEvaluationResult | None:
            attempt = await self._attempt(interface, problem, args, f"{evaluation} {place}")
            if attempt is None:
                return None
            reward = attempt.rollout.reward
            env_id, problem_id = attempt.rollout.env_id, problem.problem_id
            return RewardEvaluationResult(
                prompt=problem.prompt, response=attempt.response, reward=reward, problem_id=problem_id, env_id=env_id
            )

        problems = [problem for problem in await self.evaluation_prompts(num_prompts) for _ in range(num_samples)]
        judged = await all_at_once([one(problem, place) for place, problem in enumerate(problems)], timeout_s)
        return EvaluationResponse(env_id=self.env_id, results=judged, num_dropped=len(problems) - len(judged))

    def _next_draw(self) -> str:
        """Names the next problem of training, in the order in which they are asked for."""
        self._num_draws += 1
        return f"{self.env_id} {self._num_draws}"

    async def _problem(self, *, validation: bool = False) -> Problem:
        return await self._in_time(lambda: self.get_prompt(validation=validation))

    async def _problem_or_failure(self) -> Problem | Exception:
        """A problem of training; or why it cannot be posed, which the log has and which costs its own answers alone."""
        try:
            return await self._problem()
        except Exception as error:
            text = "environment %r: a problem is dropped with all its answers, it was not posed: %s"
            _log.warning(text, self.env_id, described(error), exc_info=True)
            return error

    async def _in_time(self, pose: Callable[[], Awaitable[Problem]]) -> Problem:
        """A problem, within the limit."""
        try:
            async with asyncio.timeout(self.prompt_timeout_s) as limit:
                return await pose()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"environment {self.env_id!r} posed no problem within prompt_timeout_s={self.prompt_timeout_s}") from error

    async def _answer(
        self, interface: InferenceInterface, prompt: Sequence[int], args: GenericGenerationArgs, draw: str | None = None
    ) -> InferenceResponse:
        """One answer, in time."""
        request = InferenceRequest(prompts=[prompt], generation_args=args, draw=draw)
        try:
            async with asyncio.timeout(self.answer_timeout_s) as limit:
                for wait_s in _RETRY_WAITS_S:
                    try:
                        [[answer]] = await interface.agenerate(request)
                        return answer
                    except LostError as error:
                        if not error.is_transient:
                            raise
                    await asyncio.sleep(wait_s)
                [[answer]] = await interface.agenerate(request)
                return answer
        except TimeoutError as error:
            reason = f"not there within answer_timeout_s={self.answer_timeout_s}" if limit.expired() else f"not there in time: {error}"
            raise LostError(reason) from error

    async def _asked(self, call: Awaitable[T], part: str) -> T:
        """What the environment gives, in time."""
        try:
            async with asyncio.timeout(self.judge_timeout_s):
                return await call
        except Exception as error:
            raise LostError(f"its {part} failed within judge_timeout_s={self.judge_timeout_s}: {error!r}") from error

    async def _reward(self, call: Awaitable[float], problem: Problem) -> float:
        reward = await self._asked(call, "judge")
        check_reward(reward, env_id=problem.env_id or self.env_id, problem_id=problem.problem_id)
        return float(reward)
