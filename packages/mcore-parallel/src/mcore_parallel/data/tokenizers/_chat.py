# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations as token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mcore_parallel.data._errors import TokenizerError

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


@dataclass(frozen=True, kw_only=True)
class ChatTurn:
    """One message of a conversation; its ids are header, body and tail in this order."""

    role: str
    """Who speaks."""
    header: list[int]
    """What stands before the content; a model that is to answer in this role is given it."""
    body: list[int]
    """The content and the id that ends the turn: what a model writes."""
    tail: list[int]
    """What stands between turns."""


def chat_turns(messages: Sequence[Mapping[str, str]], *, encode: Callable[[str], list[int]], start: int, end: int) -> list[ChatTurn]:
    """Turns of the form ``<start>role newline content<end>newline``.

    Only the two sentinels are special; ``encode`` must treat text as plain, so a message cannot forge a turn. Header and
    content are encoded apart, so that a model learns its answers in the very ids that it is asked for.

    Args:
        messages: mappings with ``role`` and ``content``.
        encode: plain text to ids.
        start: sentinel id before the role.
        end: likewise, after the content.

    Raises:
        TokenizerError: a message lacks role or content.
    """
    turns = []
    for number, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise TokenizerError(f'messages[{number}] must have "role" and "content" as text, got keys {sorted(message)}')
        header, body = [start, *encode(f"{role}\n")], [*encode(content), end]
        turns.append(ChatTurn(role=role, header=header, body=body, tail=encode("\n")))
    return turns


def join_turns(turns: Sequence[ChatTurn], opening: Sequence[int] = ()) -> list[int]:
    """Ids of a conversation, and of an open turn behind it."""
    return [token for turn in turns for part in (turn.header, turn.body, turn.tail) for token in part] + list(opening)
