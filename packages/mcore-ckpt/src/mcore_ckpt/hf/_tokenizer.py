# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The files of a tokenizer, as assets of a checkpoint and in an exported folder."""

from fnmatch import fnmatchcase
from pathlib import Path

from mcore_ckpt._core import Manifest, read_asset
from mcore_ckpt._storage import Folder, write_file

__all__ = ["put_tokenizer", "tokenizer_files"]

_FOLDER = "tokenizer/"
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer_metadata.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template*", "tekken.json", "spiece.model"),
    *("*.tiktoken", "*.jinja", "sentencepiece*.model", "generation_config.json"),
)


def tokenizer_files(path: str | Path) -> dict[str, Path]:
    """The files of a tokenizer under the names that assets of a checkpoint have for them, ``tokenizer/tokenizer.json``.

    Args:
        path: a folder, of which files that belong to no tokenizer are left out, or a single file: a
            ``tokenizer.json`` of any name, which keeps the tokenizer_config.json beside it.

    Raises:
        ValueError: there is neither.
    """
    source = Path(path)
    if source.is_file():
        beside = source.with_name("tokenizer_config.json")
        named = "tokenizer.json" if source.suffix == ".json" else source.name
        return {_FOLDER + named: source} | ({_FOLDER + beside.name: beside} if beside.is_file() else {})
    if not source.is_dir():
        raise ValueError(f"{source} is neither a file nor a folder; give the tokenizer's folder, or its tokenizer.json")
    files = (file for file in sorted(source.iterdir()) if file.is_file())
    return {_FOLDER + file.name: file for file in files if any(fnmatchcase(file.name, name) for name in _FILES)}


def put_tokenizer(checkpoint: str | Path | Folder, manifest: Manifest, directory: Path) -> None:
    """Write the tokenizer's files of a checkpoint into an export; what lies there already stays.

    Raises:
        CheckpointingException: one is damaged.
    """
    for name in manifest.assets:
        target = directory / name.removeprefix(_FOLDER)
        if name.startswith(_FOLDER) and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            write_file(target, [read_asset(checkpoint, name, manifest)])
