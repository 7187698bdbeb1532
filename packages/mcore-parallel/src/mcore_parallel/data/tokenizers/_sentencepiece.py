# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokenizers in SentencePiece's .model format, by way of its library (extra ``sentencepiece``)."""

import hashlib
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mcore_parallel.data._errors import TokenizerError
from mcore_parallel.data.tokenizers._chat import TURN_END, TURN_START, RoleTokenizer, check_ids


class SentencePieceTokenizer(RoleTokenizer):
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
        self._no_turns = f"{self.path} has no {TURN_START} and {TURN_END} pieces; train it with them as user-defined symbols"
        self._digest = hashlib.sha256(data).hexdigest()

    @property
    def vocab_size(self) -> int:
        return self._model.GetPieceSize()

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "SentencePieceTokenizer", "sha256": self._digest}

    def tokenize(self, text: str) -> list[int]:
        return self._model.EncodeAsIds(text)

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """On all cores, by the library's own threads."""
        return self._model.Encode(list(texts), out_type=int)

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        check_ids(ids, self.vocab_size)
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if not self._is_special(token):
                run.append(token)
            elif not skip_special:
                parts += [self._model.DecodeIds(run), self._model.IdToPiece(token)]
                run = []
        return "".join([*parts, self._model.DecodeIds(run)])

    def _plain_ids(self, text: str) -> list[int]:
        ids = self.tokenize(text)
        if self._roles["turn_start"] in ids or self._roles["turn_end"] in ids:
            raise TokenizerError(f"a message spells out {TURN_START} or {TURN_END}, which this library always parses; replace it")
        return ids

    def _is_special(self, token: int) -> bool:
        return self._model.IsControl(token) or token in (self._roles.get("turn_start"), self._roles.get("turn_end"))


def _library() -> ModuleType:
    try:
        import sentencepiece
    except ImportError as error:
        raise TokenizerError("the sentencepiece library is missing; pip install 'mcore-parallel[sentencepiece]'") from error
    return sentencepiece
