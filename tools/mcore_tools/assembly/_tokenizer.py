# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The tokenizer of a run, by its name or its path."""

import tempfile
from pathlib import Path

from mcore_ckpt.hf import tokenizer_files
from mcore_parallel.data import Tokenizer, build_tokenizer, save_tokenizer


def has_files(name: str) -> bool:
    """False for the tokenizers that ``build_tokenizer`` makes of a name alone: ``byte`` and ``null:VOCAB_SIZE``."""
    return name != "byte" and not name.startswith("null:")


def open_tokenizer(name: str, vocab_size: int, owner: str = "") -> Tokenizer:
    """A tokenizer for whose tokens a model of ``vocab_size`` has room; ``owner`` stands before its field where another config holds it.

    Args:
        name: as of ``build_tokenizer``.
        vocab_size: of the model.
        owner: prefix of fields in messages.

    Raises:
        ValueError: no such tokenizer, or a model that is too small for it.
    """
    tokenizer = build_tokenizer(name)
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{owner}model.vocab_size={vocab_size} is smaller than the {tokenizer.vocab_size} tokens of {name}; "
            f"set {owner}model.vocab_size={tokenizer.vocab_size} or more"
        )
    return tokenizer


def tokenizer_assets(name: str) -> dict[str, Path | bytes]:
    """What a checkpoint keeps to make the tokenizer again, under the names of ``tokenizer_files``.

    Raises:
        ValueError: no such tokenizer.
    """
    if has_files(name):
        return {**tokenizer_files(name)}
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(build_tokenizer(name), folder)
        return {asset: path.read_bytes() for asset, path in tokenizer_files(folder).items()}
