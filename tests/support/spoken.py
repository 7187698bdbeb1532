# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A policy that says in conversations what it is told to."""

from collections.abc import Mapping, Sequence
from typing import Any

from mcore_parallel.data import ByteTokenizer
from mcore_rl import ChatInferenceInterface, InferenceInterface, InferenceRequest, InferenceResponse

TOKENIZER = ByteTokenizer()
TURN_END = TOKENIZER.special_tokens_dict["turn_end"]


def template(messages: Sequence[Mapping[str, Any]], is_open: bool) -> list[int]:
    return TOKENIZER.apply_chat_template(messages, is_open)


class Spoken(InferenceInterface):
    """Says in each conversation what it was given for that one, in the order in which they begin."""

    def __init__(self, *conversations: Sequence[str]) -> None:
        self.left = [list(answers) for answers in conversations]
        self.begun: dict[tuple[int, ...], list[list[str]]] = {}
        """What is left to say behind these tokens; which of equal conversations goes on is one."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError("a conversation is not a text")

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        [prompt] = request.prompts
        before = [tokens for tokens, left in self.begun.items() if left and tuple(prompt[: len(tokens)]) == tokens]
        answers = (self.begun[max(before, key=len)] if before else self.left).pop(0)
        drawn = [*TOKENIZER.tokenize(answers[0]), TURN_END]
        self.begun.setdefault((*prompt, *drawn), []).append(answers[1:])
        answer = InferenceResponse(
            response=answers[0], token_ids=[*prompt, *drawn], prompt_length=len(prompt), logprobs=[-1.0] * len(drawn), finish_reason="stop"
        )
        return [[answer]]


def chat(*conversations: Sequence[str]) -> ChatInferenceInterface:
    return ChatInferenceInterface(Spoken(*conversations), template)
