# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each token adds to a text, in whole characters."""

import contextlib
from collections.abc import Iterable, Sequence

from mcore_inference._stability import internal_api
from mcore_inference.text._tokenizer import Tokenizer

__all__ = ["TextPieces", "prompt_end", "text_until_failure", "whole_text"]

_BROKEN = "\ufffd"
# A character of UTF-8 has at most four bytes, so at most three tokens of it can be missing their rest.
_MAX_BROKEN = 3
_MAX_HELD = 64
"""Tokens behind the last whole character."""
_LENGTHS = (6, 7, 8, 9, 5, 4, 3, 2, 1)
"""Of the end of a prompt behind which an output is decoded, the first that is whole characters: one of four in a row does not begin
within one."""
_MAX_BEFORE = max(_LENGTHS) + _MAX_BROKEN


@internal_api
def prompt_end(tokens: Sequence[int]) -> Sequence[int]:
    """The last tokens of a prompt, on which the text of its output may depend."""
    return tokens[-_MAX_BEFORE:]


@internal_api
class TextPieces:
    """Turns tokens into pieces of text, which join to the text that all of them add behind a prompt.

    A tokenizer of SentencePiece strips the blank of a text's first token, which is none behind a prompt. A character that the prompt begins
    and the tokens complete is theirs.

    Args:
        tokenizer: decodes.
        prompt: tokens before these; the last few are read, at the first push. Where they have no text, the others are decoded alone.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer, self._detokenize = tokenizer, tokenizer.detokenize
        self._prompt = prompt_end(prompt)
        self._num_cut = None if self._prompt else 0
        """U+FFFD that the prompt's text ends with and no text followed yet; None where the prompt is not decoded yet."""
        self._window: list[int] = []
        """Tokens whose text is not all emitted, and before them those of the last piece: the text of a token may depend on them."""
        self._num_before = 0
        """Tokens of the window that are those of the last piece; behind them are ones whose text has not come or that have none."""
        self._emitted: str | None = ""
        """What is emitted of the window's text; None for all."""

    def push(self, token: int) -> str:
        """Take a token; new text that further tokens cannot change."""
        window, emitted = self._window, self._emitted
        # The usual token has nothing held back before it, and a first one has.
        is_usual = emitted is None
        if emitted is None:
            emitted = self._emitted = self._detokenize(window[:])
        elif self._num_cut != 0:
            return self._behind_prompt(token)
        window.append(token)
        text = self._detokenize(window[:])
        if not text.endswith(_BROKEN):
            if self._num_before and text == emitted:
                # A special token, say, or a space that shows when a word follows: those before it tell whether the next begins with one.
                if len(window) - self._num_before > _MAX_HELD:
                    window.pop()
                return ""
            new = text[len(emitted) :] if is_usual else self._added(text, emitted)
            del window[: self._num_before]
            self._num_before, self._emitted = len(window), None
            return new
        if len(window) - self._num_before > _MAX_HELD:
            # No character is so long, and to decode them again with each token takes ever longer.
            new = self._held_text()
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
        text = self._held_text()
        return self._without_cut(text, self._num_cut) if self._num_cut else text

    def _behind_prompt(self, token: int) -> str:
        num_cut, self._num_cut = self._num_cut, 0
        if num_cut is None:
            num_cut = self._begin()
        return self._without_cut(self.push(token), num_cut)

    def _begin(self) -> int:
        """Take the prompt; how many U+FFFD its text ends with."""
        whole, text, cut = _split(self._tokenizer, self._prompt)
        if whole:
            self._window, self._num_before, self._emitted = whole, len(whole), text
        for token in cut:
            self.push(token)
        return self._held_text().count(_BROKEN) if cut else 0

    def _without_cut(self, text: str, num_cut: int) -> str:
        """New text without what the prompt has of it."""
        new = _without(text, num_cut)
        self._num_cut = 0 if new else num_cut - len(text)
        return new

    def _held_text(self) -> str:
        emitted = self._emitted
        if emitted is None:
            return ""
        return self._added(self._detokenize(self._window[:]), emitted)

    def _added(self, text: str, emitted: str) -> str:
        """What the text of the window has behind what is emitted of it."""
        if text.startswith(emitted):
            return text[len(emitted) :]
        whole = emitted.rstrip(_BROKEN)
        if whole != emitted and text.startswith(whole):
            # What stood for a part of a character stands for less, now that others are whole.
            return _without(text[len(whole) :], len(emitted) - len(whole))
        # Some decoders break all bytes in a row, those before too.
        return self._detokenize(self._window[self._num_before :])


@internal_api
def whole_text(tokenizer: Tokenizer, tokens: list[int], prompt: Sequence[int] = ()) -> str:
    """Text of an output behind its prompt, both of which may end within a character; as ``TextPieces`` have it."""
    before, begin, cut = _split(tokenizer, prompt_end(prompt))
    if not cut:
        text = tokenizer.detokenize([*before, *tokens])
        if _BROKEN not in text and text.startswith(begin):
            return text[len(begin) :]
    # Some decoders break whole characters beside a broken one.
    pieces = TextPieces(tokenizer, prompt)
    return "".join(map(pieces.push, tokens)) + pieces.rest()


@internal_api
def text_until_failure(tokenizer: Tokenizer, tokens: Iterable[int], prompt: Sequence[int] = ()) -> str:
    """Text of the tokens before the first at which a tokenizer raises."""
    pieces, text = TextPieces(tokenizer, prompt), ""
    with contextlib.suppress(Exception):
        for token in tokens:
            text += pieces.push(token)
    return text


def _without(text: str, count: int) -> str:
    """A text without so many U+FFFD at its beginning, or all that there are."""
    return text[min(count, len(text) - len(text.lstrip(_BROKEN))) :]


def _split(tokenizer: Tokenizer, prompt: Sequence[int]) -> tuple[list[int], str, list[int]]:
    """Of the end of a prompt tokens of whole characters, which may be none, their text, and the tokens behind them that may be a part of
    one; nothing where the tokenizer refuses them."""
    # The model may know ids that its tokenizer does not.
    with contextlib.suppress(Exception):
        for end in range(len(prompt), max(0, len(prompt) - _MAX_BROKEN - 1), -1):
            for length in _LENGTHS:
                whole = list(prompt[max(0, end - length) : end])
                if _BROKEN not in (text := tokenizer.detokenize(whole)):
                    return whole, text, list(prompt[end:])
        return [], "", list(prompt[-_MAX_BROKEN:])
    return [], "", []
