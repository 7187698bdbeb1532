# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The texts and bytes of single tokens, which need not be whole characters."""

import functools
import json
import re

from mcore_inference._stability import experimental_api
from mcore_inference.text._tokenizer import JsonTokenizer, Tokenizer, VocabularyTokenizer

__all__ = ["TokenBytes"]

_BROKEN = "\ufffd"
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


@experimental_api
class TokenBytes:
    """Texts and bytes of tokens where they stand behind others: alone, one of SentencePiece loses the blank that it begins with.

    Bytes of a whole vocabulary are read when the first is asked for that no text tells.

    Args:
        tokenizer: says bytes by ``token_bytes()``, or by ``tokenizer_json()``; else they are known of whole characters only.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._letter: tuple[list[int], str] | None = None
        """What ``_before`` found; None where the tokenizer has not told yet."""

    def text(self, token: int) -> str:
        """Of a token, "" for a special one; U+FFFD stands for what is no whole character."""
        before, begin = self._before()
        if before:
            text = self._tokenizer.detokenize([*before, token])
            if text.startswith(begin):
                return text[len(begin) :]
        return self._tokenizer.detokenize([token])

    def of(self, token: int) -> bytes | None:
        """Bytes of a token, b"" for a special one; None where the tokenizer does not tell."""
        if isinstance(self._tokenizer, VocabularyTokenizer):
            known = self._vocabulary[token] if token < len(self._vocabulary) else None
            return known or b""
        text = self.text(token)
        if _BROKEN not in text:
            return text.encode()
        piece = self._pieces.get(token, "")
        if match := _FALLBACK.fullmatch(piece):
            return bytes([int(match[1], 16)])
        if piece and set(piece) <= set(_BYTES):
            return bytes(_BYTES[letter] for letter in piece)
        # A character of the vocabulary like any other.
        return text.encode() if _BROKEN in piece else None

    def _before(self) -> tuple[list[int], str]:
        """Tokens of a letter and their text, to stand before another; none where the tokenizer does not know it."""
        if self._letter is None:
            try:
                tokens = list(self._tokenizer.tokenize("a"))
                text = self._tokenizer.detokenize(tokens)
            except Exception:
                # Of a letter that it does not know, or of this call alone: the next token asks again.
                return [], ""
            self._letter = (tokens, text) if text == "a" else ([], "")
        return self._letter

    @functools.cached_property
    def _vocabulary(self) -> list[bytes | None]:
        assert isinstance(self._tokenizer, VocabularyTokenizer)
        return list(self._tokenizer.token_bytes())

    @functools.cached_property
    def _pieces(self) -> dict[int, str]:
        """Of each id what tokenizer.json writes for it."""
        if not isinstance(self._tokenizer, JsonTokenizer):
            return {}
        try:
            text = self._tokenizer.tokenizer_json()
        except ValueError:
            # One that is written in Python has no such file.
            return {}
        vocabulary = json.loads(text)["model"]["vocab"]
        if isinstance(vocabulary, dict):
            return {number: piece for piece, number in vocabulary.items()}
        return {number: piece for number, (piece, _) in enumerate(vocabulary)}


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: those that can be seen as they are, the others from U+0100 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = sorted(set(range(0x100)) - set(seen))
    return {chr(byte): byte for byte in seen} | {chr(0x100 + place): byte for place, byte in enumerate(unseen)}


_BYTES = _byte_letters()
