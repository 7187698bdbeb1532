# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Conversations as token ids, and what tokenizers of different libraries share: roles of special tokens, turns, checks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def chat_turns(messages: Sequence[Mapping[str, Any]], *, encode: Callable[[str], list[int]], start: int, end: int) -> list[ChatTurn]:
    """Turns of the form ``<start>role newline content<end>newline``.

    Only the two sentinels are special; ``encode`` must treat text as plain, so a message cannot forge a turn. Header and
    content are encoded apart, so that a model learns its answers in the very ids that it is asked for.

    Args:
        messages: mappings with ``role`` and ``content``.
        encode: plain text to ids.
        start: sentinel id before the role.
        end: likewise, after the content.

    Raises:
        TokenizerError: a message lacks role or content, or calls tools.
    """
    turns = []
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            raise _no_tools(f"messages[{number}] has tool_calls")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise TokenizerError(f'messages[{number}] must have "role" and "content" as text, got keys {sorted(message)}')
        header, body = [start, *encode(f"{role}\n")], [*encode(content), end]
        turns.append(ChatTurn(role=role, header=header, body=body, tail=encode("\n")))
    return turns


def _no_tools(what: str) -> TokenizerError:
    return TokenizerError(f"{what}, which chat templates write and this tokenizer runs none; tune by `mcore sft`, or write them as content")


def join_turns(turns: Sequence[ChatTurn], opening: Sequence[int] = ()) -> list[int]:
    """Ids of a conversation, and of an open turn behind it."""
    return [token for turn in turns for part in (turn.header, turn.body, turn.tail) for token in part] + list(opening)


class RoleTokenizer(ABC):
    """Base of tokenizers that know their special tokens by role; a subclass sets these fields and encodes plain text."""

    _roles: Mapping[str, int]
    """Role ("eod", "pad", "bos", "turn_start", "turn_end", ...) to id."""
    _no_turns: str
    """What to say when turns are asked for where there are no tokens for them."""

    @property
    def eod(self) -> int | None:
        return self._roles.get("eod")

    @property
    def pad(self) -> int | None:
        return self._roles.get("pad")

    @property
    def bos(self) -> int | None:
        return self._roles.get("bos")

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        return dict(self._roles)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> list[int]:
        """Turns between the tokens ``<|im_start|>`` and ``<|im_end|>``; a template stored with the tokenizer is not run.

        Raises:
            TokenizerError: the tokenizer has no such tokens, or a message lacks role or content.
        """
        turns = self.chat_turns(messages)
        return join_turns(turns, [self._roles["turn_start"], *self._plain_ids("assistant\n")] if add_generation_prompt else [])

    def chat_turns(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[ChatTurn]:
        """Ids of each message, apart by what a model is given and what it writes.

        Raises:
            TokenizerError: the tokenizer has no tokens for turns, a message lacks role or content, or there are tools or calls of them.
        """
        if tools:
            raise _no_tools("the conversation has tools")
        if not {"turn_start", "turn_end"} <= set(self._roles):
            raise TokenizerError(self._no_turns)
        return chat_turns(messages, encode=self._plain_ids, start=self._roles["turn_start"], end=self._roles["turn_end"])

    @abstractmethod
    def _plain_ids(self, text: str) -> list[int]:
        """Ids of text in which nothing is special."""


def utf8(text: str) -> bytes:
    """Bytes of ``text``.

    Raises:
        TokenizerError: it holds half a surrogate pair, as escaped JSON can, which has no bytes.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TokenizerError(f"text has half a surrogate pair, {text[error.start]!r}, at {error.start}; replace it") from error


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise `TokenizerError` for an id that is none of the vocabulary."""
    if len(ids) and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = min(ids) if min(ids) < 0 else max(ids)
        raise TokenizerError(f"id {bad} lies outside of 0..{vocab_size - 1}; padding of a vocabulary has no text")
