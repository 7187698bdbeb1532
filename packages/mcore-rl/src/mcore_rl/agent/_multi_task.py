# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Several environments as one, each with its share of the problems."""

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_rl._stability import experimental_api
from mcore_rl._types import EvaluationResponse, GenericGenerationArgs
from mcore_rl.agent._base import all_at_once
from mcore_rl.agent._conversation import Conversation, TurnLimits
from mcore_rl.agent._judged import Attempt, Problem
from mcore_rl.agent._numbered import NumberedAgent, NumberedProblems, ignore_turn, within_own_limit
from mcore_rl.agent._stream_position import StreamPosition
from mcore_rl.inference import InferenceInterface

_LONGEST_CYCLE = 100_000


@experimental_api
class WeightedMultiTask(NumberedProblems):
    """Environments share the problems by their weights, and none starves.

    Of the first n problems an environment poses its share of n, less or more by under 1, for every n. Which one poses problem n depends on
    the weights alone, so that ranks and resumed runs agree; the environments' own seeds decide what is posed. Rollouts have the ``env_id``
    of their environment, and a ``problem_id`` of ENV_ID/PROBLEM_ID. Each environment keeps its own limits. Where one of them holds
    conversations, the interface has to be a `ChatInferenceInterface`: the others' prompts are messages of the user there, and all of them
    are written with the ``tools`` of all.

    Args:
        environments: with different ``env_id``; they belong to this one from now on, ``start_at`` included.
        weights: one an environment; only their ratios count. An environment of weight 0 is evaluated but not trained on.
        env_id: name of all together, in evaluations.

    Raises:
        ValueError: no environments, two of one name or a name with a /; weights of another number, negative, not finite, or none above 0;
            weights whose order repeats only after more than 100,000 problems; or two different tools, or lengths of conversations, of one
            name.

    Example:
        >>> mixed = WeightedMultiTask([CharacterShare(["a"], "a"), Arithmetic(ArithmeticConfig())], [3, 1])
        >>> [mixed.problem(n).env_id for n in range(4)]
        ['character_share', 'character_share', 'arithmetic', 'character_share']
    """

    def __init__(self, environments: Sequence[NumberedAgent], weights: Sequence[float], *, env_id: str = "multi_task") -> None:
        names = [environment.env_id for environment in environments]
        if not names or len(set(names)) < len(names) or any("/" in name for name in names):
            raise ValueError(f"environments={names} must be one or more, of different env_id without a /; pass another env_id")
        self._shares = _whole_shares(names, weights)
        for environment, share in zip(environments, self._shares, strict=True):
            if share and environment.num_problems() < 1:
                raise ValueError(f"environment {environment.env_id!r} has no problems to train on; give it weight 0")
        limits = {
            name: max(getattr(environment, name) for environment in environments)
            for name in ("prompt_timeout_s", "answer_timeout_s", "judge_timeout_s")
        }
        super().__init__(env_id, **limits)
        self.environments = tuple(environments)
        self._by_name = dict(zip(names, environments, strict=True))
        self._cycle = _interleave(self._shares)
        self._tools, self._turn_limits = _joined_tools(environments), _joined_limits(environments)

    @property
    def _poses_at_once(self) -> bool:
        return all(environment._poses_at_once for environment in self.environments)

    @property
    def env_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for environment in self.environments for name in environment.env_ids))

    @property
    def turn_limits(self) -> Mapping[str, TurnLimits | None]:
        return self._turn_limits

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Those of all environments."""
        return self._tools

    def start_at(self, position: int | StreamPosition, *, rank: int = 0, num_ranks: int = 1) -> None:
        super().start_at(position, rank=rank, num_ranks=num_ranks)
        for environment in self.environments:
            environment.start_at(0, rank=rank, num_ranks=num_ranks)

    def problem(self, number: int) -> Problem:
        environment, own = self._turn(number)
        return self._named(environment, environment.problem(own))

    async def _posed(self, number: int) -> Problem:
        environment, own = self._turn(number)
        return self._named(environment, await environment._posed(own))

    def _turn(self, number: int) -> tuple[NumberedAgent, int]:
        """Who poses problem ``number``, and which of its own problems that is."""
        if number >= self.FIRST_EVALUATION:
            turn, index = divmod(number - self.FIRST_EVALUATION, len(self.environments))
            own = self.FIRST_EVALUATION + turn
        else:
            cycle, turn = divmod(number, len(self._cycle))
            index, earlier = self._cycle[turn]
            own = cycle * self._shares[index] + earlier
        return self.environments[index], own

    def _named(self, environment: NumberedAgent, problem: Problem) -> Problem:
        """A problem of an environment, as it is posed here."""
        name = environment.env_id
        return dataclasses.replace(problem, problem_id=_joined(name, problem.problem_id), env_id=problem.env_id or name)

    def attempt(self, problem: Problem, generator: random.Random) -> str | None:
        environment, own = self._own(problem)
        return environment.attempt(own, generator)

    def attempt_turns(self, problem: Problem, generator: random.Random) -> Sequence[str] | None:
        environment, own = self._own(problem)
        return environment.attempt_turns(own, generator)

    async def _opening(self, problem: Problem) -> Sequence[Mapping[str, Any]]:
        environment, own = self._own(problem)
        return await within_own_limit(environment, environment._opening(own))

    async def _reply(
        self, conversation: Conversation, answer: str, on_turn: Callable[[], None] = ignore_turn
    ) -> Sequence[Mapping[str, Any]]:
        environment, own = self._own(conversation.problem)
        call = environment._reply(dataclasses.replace(conversation, problem=own), answer, on_turn)
        return await within_own_limit(environment, call)

    async def _outcome(self, conversation: Conversation, on_turn: Callable[[], None] = ignore_turn) -> float:
        environment, own = self._own(conversation.problem)
        call = environment._outcome(dataclasses.replace(conversation, problem=own), on_turn)
        return await within_own_limit(environment, call)

    def _forget(self, conversation: Conversation) -> None:
        environment, own = self._own(conversation.problem)
        environment._forget(dataclasses.replace(conversation, problem=own))

    def _forget_episodes(self) -> None:
        for environment in self.environments:
            environment._forget_episodes()

    async def get_reward(self, response: str, problem: Problem) -> float:
        """By the environment that posed it.

        Raises:
            TypeError: that holds conversations, which no single answer is.
        """
        environment, own = self._own(problem)
        if not isinstance(environment, NumberedProblems):
            raise TypeError(f"environment {environment.env_id!r} holds conversations and judges no single answer; ask for rollouts")
        return await within_own_limit(environment, environment.get_reward(response, own))

    async def _play(self, interface: InferenceInterface, problem: Problem, args: GenericGenerationArgs, draw: str | None = None) -> Attempt:
        environment, own = self._own(problem)
        attempt = await environment._play(interface, own, args, draw)
        rollout = dataclasses.replace(attempt.rollout, env_id=problem.env_id, problem_id=problem.problem_id)
        return dataclasses.replace(attempt, rollout=rollout)

    async def evaluation_prompts(self, num_prompts: int, *, validation: bool = True) -> list[Problem]:
        """``num_prompts`` problems of each environment, in their order; of training, those of weight 0 included."""
        problems = await all_at_once([each.evaluation_prompts(num_prompts, validation=validation) for each in self.environments])
        return [self._named(environment, problem) for environment, own in zip(self.environments, problems, strict=True) for problem in own]

    async def run_evaluation(
        self,
        interface: InferenceInterface,
        *,
        num_prompts: int,
        args: GenericGenerationArgs,
        num_samples: int = 1,
        timeout_s: float | None = None,
    ) -> EvaluationResponse:
        """The answers of all environments, to ``num_prompts`` problems of each."""
        options: dict[str, Any] = {"args": args, "num_samples": num_samples, "timeout_s": timeout_s}
        responses = await self.evaluate_each(interface, num_prompts=num_prompts, **options)
        results = [
            dataclasses.replace(result, problem_id=_joined(response.env_id, result.problem_id))
            for response in responses
            for result in response.results
        ]
        return EvaluationResponse(env_id=self.env_id, results=results, num_dropped=sum(response.num_dropped for response in responses))

    async def evaluate_each(
        self,
        interface: InferenceInterface,
        *,
        num_prompts: int,
        args: GenericGenerationArgs,
        num_samples: int = 1,
        timeout_s: float | None = None,
    ) -> list[EvaluationResponse]:
        """One evaluation an environment, in their order, each of ``num_prompts`` problems; arguments as of ``run_evaluation``."""
        options: dict[str, Any] = {"args": args, "num_samples": num_samples, "timeout_s": timeout_s}
        return await all_at_once([each.run_evaluation(interface, num_prompts=num_prompts, **options) for each in self.environments])

    def _own(self, problem: Problem) -> tuple[NumberedAgent, Problem]:
        """The environment of a problem, and the problem as it posed it."""
        name, _, own_id = problem.problem_id.partition("/")
        own_env = "" if problem.env_id == name else problem.env_id
        return self._by_name[name], dataclasses.replace(problem, problem_id=own_id, env_id=own_env)


def _joined(env_id: str, problem_id: str) -> str:
    return f"{env_id}/{problem_id}"


def _joined_tools(environments: Sequence[NumberedAgent]) -> list[Mapping[str, Any]]:
    """Of all environments, each once."""
    tools: dict[str, Mapping[str, Any]] = {}
    for environment in environments:
        for tool in environment.tools:
            name = tool["function"]["name"]
            if tools.setdefault(name, tool) != tool:
                raise ValueError(f"environment {environment.env_id!r} has another tool {name!r} than one before it; rename it")
    return list(tools.values())


def _joined_limits(environments: Sequence[NumberedAgent]) -> dict[str, TurnLimits | None]:
    """Of all environments, by name."""
    joined: dict[str, TurnLimits | None] = {}
    for environment in environments:
        for name, limits in environment.turn_limits.items():
            if joined.setdefault(name, limits) != limits:
                raise ValueError(f"environment {environment.env_id!r} has another {name!r} than one before it, of other turns; rename it")
    return joined


def _whole_shares(names: Sequence[str], weights: Sequence[float]) -> list[int]:
    """How many problems of a cycle each environment poses: the smallest whole numbers in the ratios of the weights."""
    if len(weights) != len(names):
        raise ValueError(f"weights={list(weights)} must be as many as the {len(names)} environments")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise ValueError(f"weights={list(weights)} must be finite and not negative, and one of them above 0")
    from fractions import Fraction

    # 0.97 is 97/100 here, not the nearest binary fraction.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * scale) for weight in exact]
    shares = [share // math.gcd(*shares) for share in shares]
    if sum(shares) > _LONGEST_CYCLE:
        raise ValueError(f"weights={list(weights)} repeat only after {sum(shares)} problems, more than {_LONGEST_CYCLE}; round them")
    return shares


def _interleave(shares: Sequence[int]) -> list[tuple[int, int]]:
    """Each turn of a cycle: whose it is, and how many of the cycle's that one had before.

    Problem k of an environment with the share w may be posed from turn floor(k / w) on and before turn ceil((k + 1) / w), which keeps its
    number within 1 of its share. The earliest deadline among those that may be posed goes first; since the shares add up to 1, all
    deadlines are kept. Of equal deadlines the smaller share goes first, which spreads it.
    """
    total, counts = sum(shares), [0] * len(shares)
    cycle = []
    for turn in range(total):
        ready = [index for index, share in enumerate(shares) if counts[index] * total < share * (turn + 1)]
        index = min(ready, key=lambda index: (-(-(counts[index] + 1) * total // shares[index]), shares[index]))
        cycle.append((index, counts[index]))
        counts[index] += 1
    return cycle
