# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The text of a stream, made by the thread that reads it."""

from collections.abc import Callable, Collection, Sequence

from mcore_inference.requests import DynamicInferenceRequestRecord
from mcore_inference.text import TextPieces, Tokenizer

__all__ = ["StreamText"]


class StreamText:
    """The text of a request that needs none in its steps. The tokenizer is foreign code: what it raises ends this request alone.

    Args:
        tokenizer: decodes; in this thread, beside others.
        silent_ids: tokens without text, which end a request.
        fail: called once, with what the tokenizer raised; the request ends later, by an error.
    """

    def __init__(self, tokenizer: Tokenizer, silent_ids: Collection[int], fail: Callable[[Exception], None]) -> None:
        self._pieces, self._silent_ids, self._fail = TextPieces(tokenizer), silent_ids, fail
        self._emitted: list[str] = []
        self._is_broken = False

    def push(self, tokens: Sequence[int]) -> str:
        """What these tokens add, in whole characters; nothing behind one that the tokenizer failed at."""
        text = "" if self._is_broken else self._new(tokens)
        if text:
            self._emitted.append(text)
        return text

    def end(self, tokens: Sequence[int], record: DynamicInferenceRequestRecord) -> str:
        """What the last tokens add, with what was held back.

        Args:
            tokens: may be none.
            record: of the request, finished; its text becomes what the pieces join to.
        """
        emitted = "".join(self._emitted)
        text = "" if self._is_broken else self._new(tokens, is_final=True)
        if self._is_broken and record.requests[-1].succeeded():
            # The engine could decode all of it at once.
            return record.generated_text[len(emitted) :]
        record.generated_text = emitted + text
        return text

    def _new(self, tokens: Sequence[int], *, is_final: bool = False) -> str:
        text = ""
        try:
            for token in tokens:
                if token not in self._silent_ids:
                    text += self._pieces.push(token)
            if is_final:
                text += self._pieces.rest()
        except Exception as error:
            self._is_broken = True
            self._fail(error)
        return text
