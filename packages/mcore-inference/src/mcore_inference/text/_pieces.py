# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each token adds to a text, in whole characters."""

import contextlib
from collections.abc import Iterable

from mcore_inference._stability import internal_api
from mcore_inference.text._tokenizer import Tokenizer

__all__ = ["TextPieces", "text_until_failure"]

_BROKEN = "\ufffd"
# A character of UTF-8 has at most four bytes, so at most three tokens of it can be missing their rest.
_MAX_BROKEN = 3


@internal_api
class TextPieces:
    """Turns tokens into pieces of text, which join to the text of all of them.

    Args:
        tokenizer: decodes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenize = tokenizer.detokenize
        self._window: list[int] = []
        """Tokens whose text is not all given, and before them those of the last piece: the text of a token may depend on them."""
        self._num_before = 0
        """Tokens of the window that are those of the last piece."""
        self._given: int | None = 0
        """Characters of the window's text that are given; None for all."""

    def push(self, token: int) -> str:
        """Take a token; new text that further tokens cannot change."""
        window, given = self._window, self._given
        if given is None:
            given = self._given = len(self._detokenize(window[:]))
        window.append(token)
        text = self._detokenize(window[:])
        if not text.endswith(_BROKEN):
            del window[: self._num_before]
            self._num_before, self._given = len(window), None
            return text[given:]
        end = length = len(text)
        while end > 0 and length - end < _MAX_BROKEN and text[end - 1] == _BROKEN:
            end -= 1
        self._given = max(given, end)
        return text[given:end]

    def rest(self) -> str:
        """What was held back, behind the last token."""
        return "" if self._given is None else self._detokenize(self._window[:])[self._given :]


@internal_api
def text_until_failure(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    """Text of the tokens before the first at which a tokenizer raises."""
    pieces, text = TextPieces(tokenizer), ""
    with contextlib.suppress(Exception):
        for token in tokens:
            text += pieces.push(token)
    return text
