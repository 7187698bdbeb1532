# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Texts of requests, made by the threads that read them."""

from collections.abc import Callable, Collection, Sequence

from mcore_inference.text import TextPieces, Tokenizer, text_until_failure, whole_text

__all__ = ["StreamText", "text_of"]


class StreamText:
    """The text of a request that needs none in its steps, as it grows.

    The tokenizer is foreign code: what it raises ends this request alone.

    Args:
        tokenizer: decodes; in this thread, beside others.
        prompt: tokens behind which the text stands; the last few are read.
        silent_ids: tokens without text, which end a request.
        fail: called once, with what the tokenizer raised before the end; the request ends later, by an error.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], silent_ids: Collection[int], fail: Callable[[Exception], None]) -> None:
        self._pieces, self._silent_ids, self._fail = TextPieces(tokenizer, prompt), silent_ids, fail
        self._emitted: list[str] = []
        self.failure: Exception | None = None
        """What the tokenizer raised; no text comes behind it."""

    def push(self, tokens: Sequence[int]) -> str:
        """What these tokens add, in whole characters."""
        if self.failure is not None:
            return ""
        text = self._new(tokens)
        if self.failure is not None:
            self._fail(self.failure)
        return text

    def end(self, tokens: Sequence[int]) -> str:
        """What the last tokens add, which may be none, with what was held back."""
        return "" if self.failure is not None else self._new(tokens, is_final=True)

    @property
    def emitted(self) -> str:
        """All pieces; behind the end, the text of all tokens."""
        return "".join(self._emitted)

    def _new(self, tokens: Sequence[int], *, is_final: bool = False) -> str:
        text = ""
        try:
            for token in tokens:
                if token not in self._silent_ids:
                    text += self._pieces.push(token)
            if is_final:
                text += self._pieces.rest()
        except Exception as error:
            self.failure = error
        if text:
            self._emitted.append(text)
        return text


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], silent_ids: Collection[int], tokens: list[int]) -> tuple[str, Exception | None]:
    """Text of a whole output behind the end of its prompt, of which a silent token is the last; and what the tokenizer raised, behind the
    text before that."""
    spoken = tokens[:-1] if tokens and tokens[-1] in silent_ids else tokens
    try:
        return whole_text(tokenizer, spoken, prompt) if spoken else "", None
    except Exception as failure:
        return text_until_failure(tokenizer, spoken, prompt), failure
