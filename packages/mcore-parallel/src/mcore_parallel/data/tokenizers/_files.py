# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A tokenizer chosen by name or path, and kept whole in a folder such as a checkpoint's."""

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

from mcore_parallel.data._errors import TokenizerError
from mcore_parallel.data._files import atomic_file
from mcore_parallel.data.tokenizers._tokenizer import ByteTokenizer, NullTokenizer, Tokenizer

METADATA_NAME = "tokenizer_metadata.json"
_CHOICES = "byte, null:VOCAB_SIZE, or the path of a tokenizer.json, .model or .tiktoken, or of the folder that holds one"


def build_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
    """Tokenizer of a name or a path.

    Args:
        name: ``byte``, ``null:VOCAB_SIZE``, or the path of a tokenizer.json (Hugging Face), a .model (SentencePiece), a .tiktoken, or
            of a folder that holds one of them or was written by `save_tokenizer`.

    Raises:
        TokenizerError: no such choice, or the file is missing or damaged.
    """
    text = os.fspath(name)
    kind, _, argument = text.partition(":")
    if text == "byte":
        return ByteTokenizer()
    if kind == "null":
        if not argument.isdecimal():
            raise TokenizerError(f"tokenizer={text!r} needs a vocabulary size; write for instance null:32000")
        return NullTokenizer(int(argument))
    if not os.path.exists(text):
        raise TokenizerError(f"tokenizer={text!r} is no choice; give {_CHOICES}")
    if os.path.exists(os.path.join(text, METADATA_NAME)):
        return _from_metadata(text)
    if os.path.isdir(text):
        models = sorted(entry for entry in os.listdir(text) if entry.endswith((".model", ".tiktoken")))
        if not models or os.path.exists(os.path.join(text, "tokenizer.json")):
            return _libraries()["huggingface"](text)
        if len(models) > 1:
            raise TokenizerError(f"{text} holds {', '.join(models)}; name the one to use")
        text = os.path.join(text, models[0])
    library = {".model": "sentencepiece", ".tiktoken": "tiktoken"}.get(os.path.splitext(text)[1], "huggingface")
    return _libraries()[library](text)


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Write what `build_tokenizer` needs to make the same tokenizer of ``folder`` again, on a machine without the original files.

    Copies the vocabulary and writes ``tokenizer_metadata.json``, last, which names the library and its options.

    Args:
        tokenizer: one of this package's; others raise.
        folder: made if missing.

    Raises:
        TokenizerError: a class of another package.
    """
    names = {"ByteTokenizer": "byte", "NullTokenizer": "null", "HuggingFaceTokenizer": "huggingface"}
    names |= {"SentencePieceTokenizer": "sentencepiece", "TiktokenTokenizer": "tiktoken"}
    library = names.get(type(tokenizer).__name__)
    if library is None:
        raise TokenizerError(f"{type(tokenizer).__name__} is no tokenizer of this package; write its files yourself")
    target = os.fspath(folder)
    os.makedirs(target, exist_ok=True)
    path = getattr(tokenizer, "path", None)
    metadata: dict[str, Any] = {"library": library}
    if path is not None:
        metadata["file"] = os.path.basename(path)
        copy = os.path.join(target, metadata["file"])
        if os.path.abspath(copy) != os.path.abspath(path):
            with open(path, "rb") as source, atomic_file(copy) as file:
                shutil.copyfileobj(source, file)
    for option in (
        ("vocab_size",) if library == "null" else ("pattern", "special_tokens", "parse_special", "eod_token", "pad_token", "bos_token")
    ):
        value = getattr(tokenizer, option, None)
        if value is not None:
            metadata[option.removesuffix("_token")] = value
    with atomic_file(os.path.join(target, METADATA_NAME)) as file:
        file.write(json.dumps(metadata, indent=2).encode())


def _from_metadata(folder: str) -> Tokenizer:
    path = os.path.join(folder, METADATA_NAME)
    try:
        with open(path, encoding="utf-8") as file:
            metadata = dict(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}; write it again with save_tokenizer") from error
    library, name = metadata.pop("library", None), metadata.pop("file", None)
    libraries = _libraries()
    if library not in libraries:
        raise TokenizerError(f"{path}: library={library!r} is no choice; give one of {', '.join(libraries)}")
    if name is not None and (not isinstance(name, str) or os.path.basename(name) != name):
        raise TokenizerError(f"{path}: file={name!r} must be the name of a file beside it")
    try:
        return libraries[library](*([] if name is None else [os.path.join(folder, name)]), **metadata)
    except TypeError as error:
        raise TokenizerError(f"{path}: {error}; write it again with save_tokenizer") from error


def _libraries() -> dict[str, Callable[..., Tokenizer]]:
    # the one place that decides for the optional libraries, which load when a tokenizer is made
    from mcore_parallel.data.tokenizers._huggingface import HuggingFaceTokenizer
    from mcore_parallel.data.tokenizers._sentencepiece import SentencePieceTokenizer
    from mcore_parallel.data.tokenizers._tiktoken import TiktokenTokenizer

    return {
        "byte": ByteTokenizer,
        "null": NullTokenizer,
        "huggingface": HuggingFaceTokenizer,
        "sentencepiece": SentencePieceTokenizer,
        "tiktoken": TiktokenTokenizer,
    }
