# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations whose answers are given: what a model imitates that has yet to learn their form."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcore_rl._stability import experimental_api
from mcore_rl._types import GenericGenerationArgs, InferenceRequest, InferenceResponse, TokenRollout
from mcore_rl.agent._judged import JudgedAgent, Problem
from mcore_rl.inference import ChatInferenceInterface, InferenceInterface


class _Recitation(InferenceInterface):
    """Gives the answers one after the other."""

    def __init__(self, answers: Sequence[str], encode: Callable[[str], Sequence[int]], problem: Problem) -> None:
        self._left, self._encode, self._problem = iter(answers), encode, problem

    def encode(self, text: str) -> Sequence[int]:
        return self._encode(text)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        text = next(self._left, None)
        if text is None:
            raise ValueError(f"the answers to problem {self._problem.problem_id} end before the conversation does; give one a turn")
        written = self._encode(text)
        return [[InferenceResponse(response=text, token_ids=[*prompt, *written], prompt_length=len(prompt), logprobs=[0.0] * len(written))]]


@experimental_api
async def recite(
    agent: JudgedAgent,
    problem: Problem,
    answers: Sequence[str],
    *,
    template: Callable[[Sequence[Mapping[str, Any]], bool], Sequence[int]],
    encode: Callable[[str], Sequence[int]],
    max_tokens: int,
) -> TokenRollout:
    """The conversation about a problem in which the policy gives these answers, judged; no engine drew them, and log-probabilities are 0.

    Args:
        agent: poses the problem, replies and judges.
        problem: of the agent.
        answers: one a turn; those after the end of the conversation are left out.
        template: as of `ChatInferenceInterface`.
        encode: tokens that the policy writes for an answer, with the one that ends its turn.
        max_tokens: of the conversation.

    Raises:
        ValueError: the answers end before the conversation does, or it is longer than ``max_tokens``.
        LostError: the environment failed.
    """
    interface = ChatInferenceInterface(_Recitation(answers, encode, problem), template, max_tokens=max_tokens)
    attempt = await agent._play(interface, problem, GenericGenerationArgs())
    length = len(attempt.rollout.trajectory)
    if length > max_tokens or attempt.rollout.finish_reason == "length":
        raise ValueError(
            f"the conversation about problem {problem.problem_id} has {length} tokens or more, max_tokens={max_tokens}; raise it"
        )
    return attempt.rollout
