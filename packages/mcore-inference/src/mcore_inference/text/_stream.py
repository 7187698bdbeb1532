# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text of a growing list of tokens: whole characters only, cut at stop words."""

from collections.abc import Sequence

from mcore_inference._stability import experimental_api
from mcore_inference.text._pieces import TextPieces
from mcore_inference.text._tokenizer import Tokenizer

__all__ = ["TextStream"]


@experimental_api
class TextStream:
    """Turns tokens into text as they come.

    ``text`` only ever grows, holds whole characters, and never holds a part of a stop word that may still complete.

    Args:
        tokenizer: decodes.
        stop_words: end the text before the first match.
        keeps_stop_word: end it behind the match instead.
        prompt: tokens before these, which the text goes on from; the last few are read.

    Example:
        >>> class Letters:
        ...     vocab_size, eod = 128, None
        ...     def tokenize(self, text): return [ord(letter) for letter in text]
        ...     def detokenize(self, ids): return "".join(map(chr, ids))
        >>> stream = TextStream(Letters(), ["END"])
        >>> [stream.push(ord(letter)) for letter in "aENbEND"]
        [False, False, False, False, False, False, True]
        >>> stream.text
        'aENb'
    """

    def __init__(
        self, tokenizer: Tokenizer, stop_words: Sequence[str] = (), *, keeps_stop_word: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        self.text = ""
        self.stopped = False
        self._pieces = TextPieces(tokenizer, prompt)
        self._stop_words, self._keeps_stop_word = tuple(stop_words), keeps_stop_word
        self._pending = ""
        """Decoded, but maybe the beginning of a stop word."""

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Take a token; True when it completed a stop word (``text`` is final then).

        Args:
            token: the next one.
            may_stop: whether a word that it completes is a stop word; one that was completed before is none.
        """
        return self._accept(self._pieces.push(token), may_stop)

    def finish(self) -> str:
        """The final text, with what was held back."""
        if not self.stopped:
            self._accept(self._pieces.rest(), may_stop=False)
            self.text += self._pending
            self._pending = ""
        return self.text

    def _accept(self, new: str, may_stop: bool) -> bool:
        if not self._stop_words:
            self.text += new
            return False
        old = len(self._pending)
        self._pending += new
        if may_stop:
            # Only what the new part completes: a word may lie whole in what is held back for a longer one, from when none could stop.
            matches = [(at, -len(word)) for word in self._stop_words if (at := self._pending.find(word, max(0, old - len(word) + 1))) >= 0]
            if matches:
                begin, length = min(matches)
                self.text += self._pending[: begin - length if self._keeps_stop_word else begin]
                self._pending, self.stopped = "", True
                return True
        held = self._held_back()
        split = len(self._pending) - held
        self.text += self._pending[:split]
        self._pending = self._pending[split:]
        return False

    def _held_back(self) -> int:
        """Length of the longest end of the pending text that begins a stop word."""
        longest = 0
        for word in self._stop_words:
            for length in range(min(len(word) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(word[:length]):
                    longest = length
                    break
        return longest
