# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokenizers in the tokenizer.json format, by way of the ``tokenizers`` library (extra ``data``)."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from mcore_parallel.data._errors import TokenizerError
from mcore_parallel.data._files import atomic_file
from mcore_parallel.data.tokenizers._chat import TURN_END, TURN_START, RoleTokenizer

# Names by which roles are known when no tokenizer_config.json declares them, the most telling first.
_KNOWN_NAMES = {
    "eod": ("<|endoftext|>", "<|end_of_text|>", "<|eod|>", "</s>", "<eos>", "<|im_end|>"),
    "pad": ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>"),
    "bos": ("<|bos|>", "<|begin_of_text|>", "<s>", "<bos>"),
    "unk": ("<unk>", "[UNK]"),
    "turn_start": (TURN_START,),
    "turn_end": (TURN_END,),
}
_DECLARED_KEYS = {"eod": "eos_token", "pad": "pad_token", "bos": "bos_token", "unk": "unk_token"}


class HuggingFaceTokenizer(RoleTokenizer):
    """A tokenizer.json with the roles of its special tokens.

    Roles come from a tokenizer_config.json beside the file, else from well-known token names; keywords override both.

    Args:
        path: a tokenizer.json, or the folder that holds it.
        eod: token that ends a document.
        pad: token that fills up.
        bos: token that begins a text.
        parse_special: special tokens written out in text become their ids, as Hugging Face does; False keeps text plain.

    Raises:
        TokenizerError: the library or the file is missing, the file is damaged, or a named token is not in it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        eod: str | None = None,
        pad: str | None = None,
        bos: str | None = None,
        parse_special: bool = True,
    ) -> None:
        source = os.fspath(path)
        self.path = os.path.join(source, "tokenizer.json") if os.path.isdir(source) else source
        try:
            with open(self.path, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read {self.path}: {error}; give a tokenizer.json or the folder that holds it") from error
        library = _library()
        try:
            self._plain = library.Tokenizer.from_str(text)
            self._parsing = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{self.path} is no tokenizer.json of the tokenizers library: {error}; save it again") from error
        for tokenizer in (self._plain, self._parsing):
            # Lengths are the dataset's affair; both would alter text silently.
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._plain.encode_special_tokens = True
        self._tokenizer = self._parsing if parse_special else self._plain
        self.parse_special = parse_special
        self._digest = hashlib.sha256(text.encode()).hexdigest()
        declared = _declared(os.path.join(os.path.dirname(self.path), "tokenizer_config.json"))
        wanted = {**declared, **{role: name for role, name in (("eod", eod), ("pad", pad), ("bos", bos)) if name is not None}}
        self._roles = {role: self._id(name, role) for role, name in wanted.items()}
        for role, names in _KNOWN_NAMES.items():
            present_ids = [self._plain.token_to_id(name) for name in names if self._plain.token_to_id(name) is not None]
            if role not in self._roles and present_ids:
                self._roles[role] = present_ids[0]
        self._no_turns = f"{self.path} has no {TURN_START} and {TURN_END} tokens; add them, or render the conversation yourself"
        # Added tokens may leave gaps, so the count of entries would be too low.
        self._vocab_size = max(self.vocab.values(), default=-1) + 1

    @property
    def vocab_size(self) -> int:
        """Largest id plus one."""
        return self._vocab_size

    @property
    def vocab(self) -> dict[str, int]:
        """Token to id."""
        return self._plain.get_vocab(with_added_tokens=True)

    @property
    def eod_token(self) -> str | None:
        """Name of the token that ends a document."""
        return None if self.eod is None else self._plain.id_to_token(self.eod)

    @property
    def pad_token(self) -> str | None:
        """Name of the token that fills up."""
        return None if self.pad is None else self._plain.id_to_token(self.pad)

    @property
    def bos_token(self) -> str | None:
        """Name of the token that begins a text."""
        return None if self.bos is None else self._plain.id_to_token(self.bos)

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        return {"class": "HuggingFaceTokenizer", "sha256": self._digest, "roles": dict(sorted(self._roles.items()))}

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """On all cores, by the library's own threads."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._plain.decode(list(ids), skip_special_tokens=skip_special)

    def tokenizer_json(self) -> str:
        """What the file says, without its truncation and padding."""
        return self._plain.to_str()

    def _plain_ids(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids

    def _id(self, name: str, role: str) -> int:
        token = self._plain.token_to_id(name)
        if token is None:
            raise TokenizerError(f"{role}={name!r} is no token of {self.path}; name one of its vocabulary")
        return token


def train_bpe(
    texts: Iterable[str], vocab_size: int, path: str | os.PathLike[str], *, min_frequency: int = 2, progress: bool = False
) -> HuggingFaceTokenizer:
    """Learn a byte-level BPE and save it.

    The vocabulary starts with the special tokens of eod, pad, bos and the chat turns, then all 256 bytes, so any text
    has ids and comes back unchanged.

    Args:
        texts: documents, read once.
        vocab_size: most ids to make; short texts give fewer.
        path: a file ending in .json, or a folder, which also gets the tokenizer_config.json other libraries read.

    Raises:
        TokenizerError: vocab_size has no room for bytes and special tokens.
    """
    library = _library()
    names = {role: _KNOWN_NAMES[role][0] for role in ("eod", "pad", "bos", "turn_start", "turn_end")}
    least = 256 + len(names)
    if vocab_size < least:
        raise TokenizerError(f"vocab_size={vocab_size} must be at least {least}: 256 bytes and {len(names)} special tokens")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(names.values()),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    target = os.fspath(path)
    if target.endswith(".json"):
        file_name, folder = target, os.path.dirname(target)
    else:
        file_name, folder = os.path.join(target, "tokenizer.json"), target
    os.makedirs(folder or ".", exist_ok=True)
    if folder == target:
        config = {key: names[role] for role, key in _DECLARED_KEYS.items() if role in names}
        with atomic_file(os.path.join(folder, "tokenizer_config.json")) as file:
            file.write(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}, indent=2).encode())
    with atomic_file(file_name) as file:
        file.write(tokenizer.to_str(pretty=True).encode())
    return HuggingFaceTokenizer(target)


def _declared(path: str) -> dict[str, str]:
    """Roles of a tokenizer_config.json, empty when there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}; repair it or move it away") from error
    roles = {}
    for role, key in _DECLARED_KEYS.items():
        value = config.get(key)
        name = value.get("content") if isinstance(value, dict) else value
        if isinstance(name, str):
            roles[role] = name
    return roles


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError("the tokenizers library is missing; pip install 'mcore-parallel[data]', or use byte") from error
    return tokenizers
