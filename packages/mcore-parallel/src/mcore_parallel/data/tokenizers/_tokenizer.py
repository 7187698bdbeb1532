# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a tokenizer offers, and two that need no files."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mcore_parallel.data._errors import TokenizerError
from mcore_parallel.data.tokenizers._chat import TURN_END, TURN_START, RoleTokenizer, check_ids, utf8


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def vocab_size(self) -> int:
        """Ids lie in [0, vocab_size)."""
        ...

    @property
    def eod(self) -> int | None:
        """Id that ends a document."""
        ...

    @property
    def bos(self) -> int | None:
        """Id that begins a sequence."""
        ...

    @property
    def pad(self) -> int | None:
        """Id that fills a sequence up."""
        ...

    @property
    def special_tokens_dict(self) -> Mapping[str, int]:
        """Role ("eod", "pad", ...) to id."""
        ...

    @property
    def unique_identifiers(self) -> Mapping[str, Any]:
        """Facts that tell this tokenizer from others; enters the names of cached indices."""
        ...

    def tokenize(self, text: str) -> list[int]:
        """Ids of ``text``; nothing is added to it."""
        ...

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Same as `tokenize` of each, faster."""
        ...

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ``ids``; special tokens are left out, or written by name."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> list[int]:
        """Ids of a conversation of ``{"role", "content"}`` messages."""
        ...


class ByteTokenizer(RoleTokenizer):
    """UTF-8 bytes as ids 0..255, five special ids after them. Needs no training, covers all text.

    Example:
        >>> ByteTokenizer().tokenize("hi")
        [104, 105]
    """

    _SPECIALS = ("<|endoftext|>", "<|pad|>", "<|bos|>", TURN_START, TURN_END)
    _roles: Mapping[str, int] = MappingProxyType({"eod": 256, "pad": 257, "bos": 258, "turn_start": 259, "turn_end": 260})

    vocab_size = 256 + len(_SPECIALS)

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "ByteTokenizer"}

    def tokenize(self, text: str) -> list[int]:
        return list(utf8(text))

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(utf8(text)) for text in texts]

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        check_ids(ids, self.vocab_size)
        if skip_special:
            return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")
        pieces = (bytes([token]) if token < 256 else self._SPECIALS[token - 256].encode() for token in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def token_bytes(self) -> list[bytes | None]:
        """Bytes of each id; None for special tokens."""
        return [bytes([token]) if token < 256 else None for token in range(self.vocab_size)]

    def _plain_ids(self, text: str) -> list[int]:
        return self.tokenize(text)


class NullTokenizer:
    """Text that is already ids, as decimal numbers between blanks; the last id of the vocabulary is eod.

    Args:
        vocab_size: all ids, eod included.

    Example:
        >>> NullTokenizer(100).tokenize("3 14"), NullTokenizer(100).eod
        ([3, 14], 99)
    """

    bos = None
    pad = None

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise TokenizerError(f"vocab_size={vocab_size} must be at least 2: one id and eod")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    @property
    def special_tokens_dict(self) -> dict[str, int]:
        return {"eod": self.eod}

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "NullTokenizer", "vocab_size": self.vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """Ids written in ``text``.

        Raises:
            TokenizerError: a word is no number, or the number no id.
        """
        try:
            ids = np.array(text.split(), dtype=np.int64).tolist()
        except (ValueError, OverflowError) as error:
            raise TokenizerError(f"text {text[:40]!r} is not all decimal ids; NullTokenizer reads numbers between blanks") from error
        check_ids(ids, self.vocab_size)
        return ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.tokenize(text) for text in texts]

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        check_ids(ids, self.vocab_size)
        return " ".join(str(token) for token in ids if not (skip_special and token == self.eod))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> list[int]:
        raise TokenizerError("NullTokenizer has no chat template; use ByteTokenizer or HuggingFaceTokenizer")
