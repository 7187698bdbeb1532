# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What tokenizers of different libraries share: roles of special tokens, turns, and checks of what they are given."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from mcore_parallel.data._errors import TokenizerError
from mcore_parallel.data.tokenizers._chat import ChatTurn, chat_turns, join_turns


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

    def chat_turns(self, messages: Sequence[Mapping[str, str]]) -> list[ChatTurn]:
        """Ids of each message, apart by what a model is given and what it writes.

        Raises:
            TokenizerError: the tokenizer has no tokens for turns, or a message lacks role or content.
        """
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
