# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Small files that a checkpoint keeps beside its tensors: what they may be called and how large they may be."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt._errors import CheckpointingException

__all__ = ["MAX_ASSETS_BYTES", "AssetRecord", "AssetSource", "check_asset_names", "check_assets", "digest_names"]

MAX_ASSETS_BYTES = 2**28
"""Of all assets of a checkpoint together: a tokenizer has some 40 MiB at most, and tensors belong in the state."""
_MAX_ASSETS = 1000
_MAX_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


@dataclass(frozen=True)
class AssetRecord:
    """A stored asset: its file in the checkpoint's folder, length and digest."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class AssetSource:
    """An asset that is to be written."""

    name: str
    num_bytes: int
    read: Callable[[], bytes]

    def held(self) -> "AssetSource":
        """The same with its content in memory, as it is now."""
        content = self.read()
        return replace(self, num_bytes=len(content), read=lambda: content)


def check_asset_names(names: Iterable[str]) -> None:
    """Check that every name stays inside whatever folder it is written to, and that all can lie there together.

    Raises:
        ValueError: one does not; names it.
    """
    names = list(names)
    if len(names) > _MAX_ASSETS:
        raise ValueError(f"{len(names)} assets; a checkpoint keeps at most {_MAX_ASSETS}")
    known = set(names)
    for name in names:
        if not isinstance(name, str) or len(name) > _MAX_NAME or not _NAME.fullmatch(name):
            raise ValueError(
                f"asset name {name!r} does not stay inside the folder; it must be parts of letters, digits, '.', '_' and '-' that begin "
                f"with none of '.' and '-', joined by '/', of at most {_MAX_NAME} characters"
            )
        parts = name.split("/")
        above = next((folder for end in range(1, len(parts)) if (folder := "/".join(parts[:end])) in known), None)
        if above is not None:
            raise ValueError(f"asset {above!r} cannot be a file and the folder of {name!r}; rename one of them")


def check_assets(assets: Mapping[str, Any]) -> list[AssetSource]:
    """What is to be written; nothing is read but the lengths of files.

    Args:
        assets: name -> bytes, the path of a plain file, or an `AssetSource`.

    Raises:
        ValueError: a name, a value of another type, or too many bytes; says which.
        CheckpointingException: no such file.
    """
    check_asset_names(assets)
    sources = [_source(name, value) for name, value in assets.items()]
    total = sum(source.num_bytes for source in sources)
    if total > MAX_ASSETS_BYTES:
        largest = max(sources, key=lambda source: source.num_bytes)
        raise ValueError(
            f"assets of {total} bytes, the largest {largest.name!r} of {largest.num_bytes}; a checkpoint keeps at most {MAX_ASSETS_BYTES}"
        )
    return sources


def digest_names(assets: Mapping[str, Any]) -> str:
    """Equal for equal names; empty for none."""
    return hashlib.sha256("\0".join(sorted(assets)).encode()).hexdigest() if assets else ""


def _source(name: str, value: Any) -> AssetSource:
    if isinstance(value, AssetSource):
        return value
    if isinstance(value, bytes):
        return AssetSource(name, len(value), lambda: value)
    if not isinstance(value, str | Path):
        raise ValueError(f"asset {name!r} is {type(value).__name__}; give its bytes, or the path of a file")
    path = Path(value)
    if not path.is_file():
        raise CheckpointingException(f"asset {name!r}: {path} is {'no plain file' if path.exists() else 'missing'}")
    return AssetSource(name, path.stat().st_size, partial(_read, name, path))


def _read(name: str, path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(MAX_ASSETS_BYTES + 1)
    if len(content) > MAX_ASSETS_BYTES:
        raise CheckpointingException(f"asset {name!r}: {path} grew above {MAX_ASSETS_BYTES} bytes")
    return content
