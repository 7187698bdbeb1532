# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents whose environment replies: conversations, games, tools."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_rl._lost import LostError
from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, InferenceResponse, TokenRollout
from mcore_rl.agent._conversation import Conversation, TurnLimits
from mcore_rl.agent._environment_messages import as_chat
from mcore_rl.agent._judged import Attempt, JudgedAgent, Problem
from mcore_rl.inference import ChatInferenceInterface, InferenceInterface


@experimental_api
class Episode(ABC):
    """The environment's side of one conversation.

    In processes that judge and behind servers an episode waits there for its next turn. One that was lost meanwhile is replaced by a new
    one, which hears the answers before that turn again: what it says has to follow from the problem and the answers alone, where
    ``MultiTurnAgent.resume`` makes none of what was said.
    """

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

    def resume(self, conversation: Conversation) -> Episode | None:
        """A conversation as it stands, in a process that judges, or behind a server, before each turn.

        None, as here, goes on with the `Episode` that has said this. Where that is lost, with its process for instance, it is replayed: a
        new one hears the same answers, and has to say the same to them. A subclass whose replies are no function of the problem and the
        answers, or whose tools change what is outside, makes the episode from what was said.
        """
        return None

    async def _play(self, interface: InferenceInterface, problem: Problem, args: GenericGenerationArgs, draw: str | None = None) -> Attempt:
        limits = TurnLimits(max_turns=self.max_turns, max_tokens=self.max_tokens)
        return await hold(self, interface, lambda: self.begin(problem), problem, args, limits, draw)


async def hold(
    agent: JudgedAgent,
    interface: InferenceInterface,
    begin: Callable[[], Episode],
    problem: Problem,
    args: GenericGenerationArgs,
    limits: TurnLimits,
    draw: str | None,
) -> Attempt:
    """A whole conversation, judged.

    Args:
        agent: whose limits of time hold.
        interface: answers; a `ChatInferenceInterface`.
        begin: the episode, which replies and judges.
        problem: of the agent.
        args: how answers are drawn.
        limits: of the conversation's length.
        draw: names the conversation, for the seeds of its turns; None for the order of requests.

    Raises:
        TypeError: another interface.
        LostError: the conversation is lost.
    """
    if not isinstance(interface, ChatInferenceInterface):
        name = type(interface).__name__
        raise TypeError(f"interface is a {name}; environment {agent.env_id!r} needs a ChatInferenceInterface, as MegatronChatLocal")
    most = min((limit for limit in (limits.max_tokens, interface.max_tokens) if limit is not None), default=None)
    episode, opening = await agent._asked(_begun(begin), "start")
    tokens, mask, responses = _encoded(functools.partial(interface.encode_messages, opening)), [], []
    experts: Tensor | None = None
    logprobs: list[float] | None = []
    versions: list[int] | None = []
    mask += [False] * len(tokens)
    while True:
        allowed = _allowed(args, len(tokens), most)
        if allowed is None:
            reason = "length"
            break
        answer = await agent._answer(interface, tokens, allowed, None if draw is None else f"{draw} turn {len(responses)}")
        drawn = len(answer.token_ids) - answer.prompt_length
        tokens, reason = list(answer.token_ids), answer.finish_reason
        mask += [True] * drawn
        logprobs = None if logprobs is None or answer.logprobs is None else [*logprobs, *answer.logprobs]
        experts = _recorded(experts, answer)
        versions = None if versions is None or answer.weight_versions is None else [*versions, *answer.weight_versions]
        responses.append(answer.response)
        replies = await agent._asked(_replies(episode, answer.response), "reply")
        if not replies or reason == "length" or len(responses) == limits.max_turns:
            break
        following = _encoded(functools.partial(interface.encode_replies, answer, replies))
        if most is not None and len(tokens) + len(following) >= most:
            reason = "length"
            break
        tokens += following
        mask += [False] * len(following)
    reward = await agent._reward(episode.reward(), problem)
    rollout = TokenRollout(
        trajectory=tuple(tokens),
        reward=reward,
        generation_mask=tuple(mask),
        logprobs=None if logprobs is None else tuple(logprobs),
        env_id=problem.env_id or agent.env_id,
        problem_id=problem.problem_id,
        finish_reason=reason,
        routed_experts=None if experts is None else _lengthened(experts, len(tokens) - 1),
        weight_versions=None if versions is None else tuple(versions),
    )
    return Attempt(rollout=rollout, response="\n".join(responses))


async def _begun(begin: Callable[[], Episode]) -> tuple[Episode, Sequence[Mapping[str, Any]]]:
    """An episode and its first messages."""
    episode = begin()
    return episode, await episode.start()


async def _replies(episode: Episode, answer: str) -> Sequence[Mapping[str, Any]]:
    """What is said to an answer, of an iterator, too; nothing of None."""
    return list(await episode.reply(answer) or ())


def _encoded(encode: Callable[[], list[int]]) -> list[int]:
    """Ids of messages of the environment.

    Raises:
        LostError: the chat template does not take them.
    """
    try:
        return encode()
    except Exception as error:
        raise LostError(f"the chat template does not take what the environment says: {error!r}"[:500]) from error


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


async def replayed(agent: MultiTurnAgent, conversation: Conversation, on_turn: Callable[[], None]) -> Episode:
    """A new episode that has heard what was said in a conversation.

    Args:
        agent: of the conversation.
        conversation: so far.
        on_turn: called after each turn, the opening included, that is replayed.

    Raises:
        RuntimeError: the environment says something else than before; names problem and turn.
    """
    episode = agent.begin(conversation.problem)
    _check_same(agent, conversation, 0, await episode.start(), conversation.opening)
    on_turn()
    for number, turn in enumerate(conversation.turns, 1):
        _check_same(agent, conversation, number, await episode.reply(turn.answer), turn.replies)
        on_turn()
    return episode


def _check_same(
    agent: MultiTurnAgent, conversation: Conversation, number: int, now: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]
) -> None:
    if as_chat(now) != as_chat(before):
        raise RuntimeError(
            f"environment {agent.env_id!r} says something else than before to the same answers, in turn {number} of problem "
            f"{conversation.problem.problem_id!r}; give it a resume() that makes an episode of what was said"
        )
