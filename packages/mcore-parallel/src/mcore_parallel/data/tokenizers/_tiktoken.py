# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Byte-pair vocabularies in tiktoken's formats, by way of its library (extra ``tiktoken``)."""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mcore_parallel.data._errors import TokenizerError
from mcore_parallel.data.tokenizers._chat import TURN_END, TURN_START, RoleTokenizer, check_ids, utf8

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""How GPT-2 cuts text into words before pairs are merged (Radford et al., 2019)."""
_ROLES = {"eod": "<|endoftext|>", "pad": "<|pad|>", "bos": "<|bos|>", "turn_start": TURN_START, "turn_end": TURN_END}


class TiktokenTokenizer(RoleTokenizer):
    """Ranked byte strings and, behind them, special tokens. Covers all text; no network.

    Args:
        path: a .tiktoken file (``base64 rank`` a line) or a .json list of objects with ``rank`` and ``token_bytes``.
        pattern: expression that cuts text into words; must be the one that the vocabulary was learnt with.
        special_tokens: names that get the ids behind the ranks, in this order; those of `ByteTokenizer` have roles.

    Raises:
        TokenizerError: the library or the file is missing, the file is damaged, or the pattern is no expression.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        pattern: str = GPT2_PATTERN,
        special_tokens: Sequence[str] = tuple(_ROLES.values()),
    ) -> None:
        self.path = os.fspath(path)
        self.pattern, self.special_tokens = pattern, tuple(special_tokens)
        try:
            with open(self.path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise TokenizerError(f"cannot read {self.path}: {error}; give a .tiktoken or .json vocabulary") from error
        ranks = _ranks(data, self.path)
        self._specials = {name: len(ranks) + number for number, name in enumerate(self.special_tokens)}
        self.vocab_size = len(ranks) + len(self._specials)
        try:
            self._encoding = _library().Encoding(self.path, pat_str=pattern, mergeable_ranks=ranks, special_tokens=self._specials)
        except ValueError as error:
            raise TokenizerError(f"pattern={pattern!r} does not fit {self.path}: {error}") from error
        self._roles = {role: self._specials[name] for role, name in _ROLES.items() if name in self._specials}
        self._no_turns = f"special_tokens={self.special_tokens} lack {TURN_START} and {TURN_END}; add them"
        self._digest = hashlib.sha256(data).hexdigest()

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "TiktokenTokenizer", "sha256": self._digest, "pattern": self.pattern, "special_tokens": self.special_tokens}

    def tokenize(self, text: str) -> list[int]:
        """Special tokens written out in ``text`` become their ids."""
        return self._encoding.encode(_whole(text), allowed_special="all")

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """On all cores, by the library's own threads."""
        return self._encoding.encode_batch([_whole(text) for text in texts], num_threads=os.cpu_count() or 1, allowed_special="all")

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        check_ids(ids, self.vocab_size)
        first = self.vocab_size - len(self._specials)
        return self._encoding.decode([token for token in ids if token < first or not skip_special])

    def token_bytes(self) -> list[bytes | None]:
        """Bytes of each id; None for special tokens."""
        plain = self.vocab_size - len(self._specials)
        return [self._encoding.decode_single_token_bytes(token) if token < plain else None for token in range(self.vocab_size)]

    def _plain_ids(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(_whole(text))


def _ranks(data: bytes, path: str) -> dict[bytes, int]:
    try:
        if path.endswith(".json"):
            entries = [(base64.b64decode(entry["token_bytes"], validate=True), int(entry["rank"])) for entry in json.loads(data)]
        else:
            pairs = [line.split() for line in data.splitlines() if line]
            entries = [(base64.b64decode(token, validate=True), int(rank)) for token, rank in pairs]
    except (ValueError, KeyError, TypeError) as error:
        raise TokenizerError(f"{path} is no vocabulary of tiktoken: {error}; copy it again") from error
    ranks = dict(entries)
    if sorted(ranks.values()) != list(range(len(entries))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise TokenizerError(f"{path} must rank {len(entries)} byte strings from 0, all 256 bytes among them; copy it again")
    return ranks


def _whole(text: str) -> str:
    utf8(text)  # the library would write the halves of a pair as other text
    return text


def _library() -> ModuleType:
    try:
        import tiktoken
    except ImportError as error:
        raise TokenizerError("the tiktoken library is missing; pip install 'mcore-parallel[tiktoken]'") from error
    return tiktoken
