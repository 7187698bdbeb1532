# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What was said in a conversation, as it travels to the environment's side elsewhere."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl._stability import experimental_api
from mcore_rl.agent._judged import Problem


@experimental_api
@dataclass(frozen=True, kw_only=True)
class TurnLimits:
    """How long conversations of an environment are.

    Raises:
        ValueError: a limit below 1; names both.
    """

    max_turns: int
    """Answers of the policy, at most."""
    max_tokens: int | None
    """Of a whole conversation; None for that of the interface alone."""

    def __post_init__(self) -> None:
        if self.max_turns < 1 or (self.max_tokens is not None and self.max_tokens < 1):
            raise ValueError(f"max_turns={self.max_turns} and max_tokens={self.max_tokens} must be at least 1")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer of the policy, and what the environment said to it."""

    answer: str
    replies: Sequence[Mapping[str, Any]]
    """Messages; none where the answer ended the conversation."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Conversation:
    """All that was said about a problem. Whoever has it can go on with the conversation."""

    problem: Problem
    opening: Sequence[Mapping[str, Any]]
    """The first messages."""
    turns: Sequence[Turn] = ()

    def with_turn(self, answer: str, replies: Sequence[Mapping[str, Any]]) -> "Conversation":
        """It and one turn more."""
        return dataclasses.replace(self, turns=(*self.turns, Turn(answer=answer, replies=replies)))

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """All that was said, in its order; the policy's answers have the role ``assistant``."""
        messages = list(self.opening)
        for turn in self.turns:
            messages += [{"role": "assistant", "content": turn.answer}, *turn.replies]
        return messages
