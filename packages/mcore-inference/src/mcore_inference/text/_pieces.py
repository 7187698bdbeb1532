# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each token adds to a text, in whole characters."""

import contextlib
from collections.abc import Iterable

from mcore_inference._stability import internal_api
from mcore_inference.text._tokenizer import Tokenizer

__all__ = ["TextPieces", "text_until_failure", "whole_text"]

_BROKEN = "\ufffd"
# A character of UTF-8 has at most four bytes, so at most three tokens of it can be missing their rest.
_MAX_BROKEN = 3
_MAX_HELD = 64
"""Tokens behind the last whole character."""


@internal_api
class TextPieces:
    """Turns tokens into pieces of text, which join to the text of all of them.

    Args:
        tokenizer: decodes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenize = tokenizer.detokenize
        self._window: list[int] = []
        """Tokens whose text is not all emitted, and before them those of the last piece: the text of a token may depend on them."""
        self._num_before = 0
        """Tokens of the window that are those of the last piece; behind them are ones whose text has not come or that have none."""
        self._emitted: str | None = ""
        """What is emitted of the window's text; None for all."""

    def push(self, token: int) -> str:
        """Take a token; new text that further tokens cannot change."""
        window, emitted = self._window, self._emitted
        if emitted is None:
            emitted = self._emitted = self._detokenize(window[:])
        window.append(token)
        text = self._detokenize(window[:])
        if not text.endswith(_BROKEN):
            if self._num_before and text == emitted:
                # A special token, say, or a space that shows when a word follows: those before it tell whether the next begins with one.
                if len(window) - self._num_before > _MAX_HELD:
                    window.pop()
                return ""
            del window[: self._num_before]
            self._num_before, self._emitted = len(window), None
            return text[len(emitted) :]
        if len(window) - self._num_before > _MAX_HELD:
            # No character is so long, and to decode them again with each token takes ever longer.
            new = self.rest()
            self._window, self._num_before, self._emitted = [], 0, ""
            return new
        if not text.startswith(emitted):
            # Some decoders break all bytes in a row, those of whole characters too, until the last character is whole.
            return ""
        end = length = len(text)
        # Where those before have no text of their own, such a decoder breaks them as well: Llama 2 strips a space at the beginning.
        most = _MAX_BROKEN if emitted else _MAX_BROKEN + self._num_before
        while end > 0 and length - end < most and text[end - 1] == _BROKEN:
            end -= 1
        self._emitted = text[: max(len(emitted), end)]
        return text[len(emitted) : end]

    def rest(self) -> str:
        """What was held back, behind the last token."""
        emitted = self._emitted
        if emitted is None:
            return ""
        text = self._detokenize(self._window[:])
        return text[len(emitted) :] if text.startswith(emitted) else self._detokenize(self._window[self._num_before :])


@internal_api
def whole_text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    """Text of an output, which may end within a character."""
    text = tokenizer.detokenize(tokens)
    if _BROKEN not in text:
        return text
    # Some decoders break whole characters beside a broken one.
    pieces = TextPieces(tokenizer)
    return "".join(map(pieces.push, tokens)) + pieces.rest()


@internal_api
def text_until_failure(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Text of the tokens before the first at which a tokenizer raises."""
    pieces, text = TextPieces(tokenizer), ""
    with contextlib.suppress(Exception):
        for token in tokens:
            text += pieces.push(token)
    return text
