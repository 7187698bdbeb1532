# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokenizers in SentencePiece's .model format, by way of its library (extra ``sentencepiece``)."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from mcore_parallel.data._chat import TURN_END, TURN_START, ChatTurn, chat_turns, join_turns
from mcore_parallel.data._errors import TokenizerError


class SentencePieceTokenizer:
    """A .model file; roles of special tokens are those stored in it, and chat turns where it has their pieces.

    Text comes back as the model's own normalisation leaves it; models with byte fallback cover all text.

    Args:
        path: the .model file.

    Raises:
        TokenizerError: the library or the file is missing, or the file is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            with open(self.path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise TokenizerError(f"cannot read {self.path}: {error}; give a .model file") from error
        self._model = _library().SentencePieceProcessor()
        try:
            loaded = bool(data) and self._model.LoadFromSerializedProto(data)
        except (RuntimeError, ValueError, OSError) as error:
            raise TokenizerError(f"{self.path} is no model of SentencePiece: {error}; copy it again") from error
        if not loaded:
            raise TokenizerError(f"{self.path} is no model of SentencePiece; copy it again")
        stored = {"eod": self._model.eos_id(), "pad": self._model.pad_id(), "bos": self._model.bos_id(), "unk": self._model.unk_id()}
        for role, name in (("turn_start", TURN_START), ("turn_end", TURN_END)):
            number = self._model.PieceToId(name)
            stored[role] = number if self._model.IdToPiece(number) == name else -1
        self._roles = {role: number for role, number in stored.items() if number >= 0}
        self._digest = hashlib.sha256(data).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self._model.GetPieceSize()

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

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "SentencePieceTokenizer", "sha256": self._digest}

    def tokenize(self, text: str) -> list[int]:
        return self._model.EncodeAsIds(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """On all cores, by the library's own threads."""
        return self._model.Encode(list(texts), out_type=int)

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        bad = [token for token in ids if not 0 <= token < self.vocab_size]
        if bad:
            raise TokenizerError(f"id {bad[0]} lies outside of 0..{self.vocab_size - 1}; padding of a vocabulary has no text")
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if not self._is_special(token):
                run.append(token)
            elif not skip_special:
                parts += [self._model.DecodeIds(run), self._model.IdToPiece(token)]
                run = []
        return "".join([*parts, self._model.DecodeIds(run)])

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = False) -> list[int]:
        """Turns between the pieces ``<|im_start|>`` and ``<|im_end|>``.

        Raises:
            TokenizerError: the model has no such pieces.
        """
        turns = self.chat_turns(messages)
        return join_turns(turns, [self._roles["turn_start"], *self.tokenize("assistant\n")] if add_generation_prompt else [])

    def chat_turns(self, messages: Sequence[Mapping[str, str]]) -> list[ChatTurn]:
        """Ids of each message, apart by what a model is given and what it writes.

        Raises:
            TokenizerError: the model has no pieces for turns, or a message spells one out.
        """
        if not {"turn_start", "turn_end"} <= set(self._roles):
            raise TokenizerError(f"{self.path} has no {TURN_START} and {TURN_END} pieces; train it with them as user-defined symbols")
        start, end = self._roles["turn_start"], self._roles["turn_end"]

        def encode(text: str) -> list[int]:
            ids = self.tokenize(text)
            if start in ids or end in ids:
                raise TokenizerError(f"a message spells out {TURN_START} or {TURN_END}, which this library always parses; replace it")
            return ids

        return chat_turns(messages, encode=encode, start=start, end=end)

    def _is_special(self, token: int) -> bool:
        return self._model.IsControl(token) or token in (self._roles.get("turn_start"), self._roles.get("turn_end"))


def _library() -> ModuleType:
    try:
        import sentencepiece
    except ImportError as error:
        raise TokenizerError("the sentencepiece library is missing; pip install 'mcore-parallel[sentencepiece]'") from error
    return sentencepiece
