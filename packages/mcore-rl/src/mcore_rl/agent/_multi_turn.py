# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents whose environment replies: conversations, games, tools."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, InferenceResponse, TokenRollout
from mcore_rl.agent._judged import Attempt, JudgedAgent, Problem
from mcore_rl.inference import ChatInferenceInterface, InferenceInterface


@experimental_api
class Episode(ABC):
    """The environment's side of one conversation."""

    @abstractmethod
    async def start(self) -> Sequence[Mapping[str, Any]]:
        """The first messages, ``role`` and ``content`` each."""

    @abstractmethod
    async def reply(self, answer: str) -> Sequence[Mapping[str, Any]]:
        """What is said to an answer: messages of the user, or results of tools that it called; none ends the conversation."""

    @abstractmethod
    async def reward(self) -> float:
        """How good the conversation was, once it has ended."""


@experimental_api
class MultiTurnAgent(JudgedAgent):
    """Tasks of several turns: a subclass poses problems and begins an `Episode` for each attempt.

    One rollout is one conversation. Its tokens are those that were sent and drawn, never encoded again; the policy learns from those that
    it drew. It ends when the environment has no reply, after ``max_turns`` answers, or with an answer that its limit of tokens cut off.

    Args:
        env_id: name under which rewards are reported.
        max_turns: answers of the policy, at most.
        max_tokens: of the whole conversation; a turn that would begin beyond it does not, and an answer is cut there. None for that of the
            interface alone.
        limits: as of `JudgedAgent`; ``judge_timeout_s`` is also that of one reply.

    Raises:
        ValueError: a limit that is not positive.
    """

    def __init__(self, env_id: str, *, max_turns: int = 8, max_tokens: int | None = None, **limits: float) -> None:
        super().__init__(env_id, **limits)
        if max_turns < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"max_turns={max_turns} and max_tokens={max_tokens} of environment {env_id!r} must be at least 1")
        self.max_turns, self.max_tokens = max_turns, max_tokens

    @abstractmethod
    def begin(self, problem: Problem) -> Episode:
        """A new conversation about a problem."""

    async def _play(self, interface: InferenceInterface, problem: Problem, args: GenericGenerationArgs) -> Attempt:
        if not isinstance(interface, ChatInferenceInterface):
            name = type(interface).__name__
            raise TypeError(f"interface is a {name}; environment {self.env_id!r} needs a ChatInferenceInterface, as MegatronChatLocal")
        limits = [limit for limit in (self.max_tokens, interface.max_tokens) if limit is not None]
        most = min(limits) if limits else None
        episode = self.begin(problem)
        tokens, mask, responses = interface.encode_messages(await self._asked(episode.start(), "start")), [], []
        experts: Tensor | None = None
        logprobs: list[float] | None = []
        versions: list[int] | None = []
        mask += [False] * len(tokens)
        while True:
            allowed = _allowed(args, len(tokens), most)
            if allowed is None:
                reason = "length"
                break
            answer = await self._answer(interface, tokens, allowed)
            drawn = len(answer.token_ids) - answer.prompt_length
            tokens, reason = list(answer.token_ids), answer.finish_reason
            mask += [True] * drawn
            logprobs = None if logprobs is None or answer.logprobs is None else [*logprobs, *answer.logprobs]
            experts = _recorded(experts, answer)
            versions = None if versions is None or answer.weight_versions is None else [*versions, *answer.weight_versions]
            responses.append(answer.response)
            replies = await self._asked(episode.reply(answer.response), "reply")
            if not replies or reason == "length" or len(responses) == self.max_turns:
                break
            following = interface.encode_replies(answer, replies)
            if most is not None and len(tokens) + len(following) >= most:
                reason = "length"
                break
            tokens += following
            mask += [False] * len(following)
        reward = await self._reward(episode.reward(), problem)
        rollout = TokenRollout(
            trajectory=tuple(tokens),
            reward=reward,
            generation_mask=tuple(mask),
            logprobs=None if logprobs is None else tuple(logprobs),
            env_id=problem.env_id or self.env_id,
            problem_id=problem.problem_id,
            finish_reason=reason,
            routed_experts=None if experts is None else _lengthened(experts, len(tokens) - 1),
            weight_versions=None if versions is None else tuple(versions),
        )
        return Attempt(rollout=rollout, response="\n".join(responses))


def _allowed(args: GenericGenerationArgs, num_tokens: int, most: int | None) -> GenericGenerationArgs | None:
    """With the limit of the next answer; None where there is no room for one."""
    if most is None:
        return args
    left = most - num_tokens
    return None if left < 1 else args.add(GenericGenerationArgs(max_tokens=min(left, args.max_tokens or left)))


def _recorded(before: Tensor | None, answer: InferenceResponse) -> Tensor | None:
    """Experts of all tokens so far but the last: of those that this turn found in the cache, what an earlier one recorded."""
    experts = answer.routed_experts
    if experts is None or before is None:
        return experts
    return torch.where(experts < 0, _lengthened(before, len(experts)), experts)


def _lengthened(experts: Tensor, length: int) -> Tensor:
    """[length, L, K], -1 behind what was recorded."""
    return torch.nn.functional.pad(experts, (0, 0, 0, 0, 0, length - len(experts)), value=-1)
