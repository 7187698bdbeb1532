# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Small files that a checkpoint keeps beside its tensors: checked before a save, read back, or written out."""

import fnmatch
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt._core._manifest import MAX_ASSETS_BYTES, Manifest, check_asset_names, read_manifest
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._storage import Folder, open_folder

__all__ = ["AssetSource", "asset_sources", "check_assets", "digest_names", "extract_assets", "read_asset"]


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


def read_asset(directory: str | Path | Folder, name: str, manifest: Manifest | None = None) -> bytes:
    """The content of an asset, compared with its SHA-256. Not collective.

    Args:
        directory: a committed checkpoint.
        name: one of ``read_manifest(directory).assets``.
        manifest: of ``directory``, if it was read already.

    Raises:
        CheckpointingException: no such asset, names the nearest; or its file is missing or damaged.

    Example:
        >>> from mcore_ckpt import save
        >>> from mcore_ckpt.storage import MemoryFolder
        >>> place = MemoryFolder()
        >>> save({}, place, assets={"run.json": b"{}"})
        >>> read_asset(place, "run.json")
        b'{}'
    """
    folder = open_folder(directory)
    manifest = manifest or read_manifest(folder)
    if name not in manifest.assets:
        raise CheckpointingException(f"{folder} has no asset {list_names([name], manifest.assets)}")
    record = manifest.assets[name]
    where = f"{folder}/{record.file} (asset {name})"
    try:
        size = folder.size(record.file)
        if size is None:
            raise CheckpointingException(f"{where}: missing, or not a plain file")
        if size != record.bytes:
            raise CheckpointingException(f"{where}: {size} bytes instead of {record.bytes}; the file is damaged")
        content = bytes(folder.read(record.file, 0, size)) if size else b""
    except OSError as error:
        raise CheckpointingException(f"{where}: {error}") from error
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise CheckpointingException(f"{where}: its SHA-256 is not the one in the manifest; the file is damaged")
    return content


def extract_assets(directory: str | Path | Folder, output: str | Path, patterns: Sequence[str] = ("*",)) -> list[Path]:
    """Write assets as files of their names under ``output``. Not collective.

    Args:
        directory: a committed checkpoint.
        output: a folder, created where it is missing.
        patterns: which ones; ``*`` also stands for ``/``.

    Returns:
        The files.

    Raises:
        CheckpointingException: a damaged asset.
        ValueError: a pattern that no name matches, or a file that is there already.
    """
    manifest, target = read_manifest(directory), Path(output)
    chosen: dict[str, Path] = {}
    for pattern in patterns:
        matches = fnmatch.filter(manifest.assets, pattern)
        if not matches and pattern != "*":
            raise ValueError(f"no asset is called {list_names([pattern], manifest.assets)}")
        chosen.update((name, target / name) for name in matches)
    there = [str(path) for path in chosen.values() if path.exists()]
    if there:
        raise ValueError(f"{there[0]} exists; choose another folder or remove it")
    contents = {path: read_asset(directory, name, manifest) for name, path in chosen.items()}
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(content)
    return list(contents)


def asset_sources(directory: str | Path | Folder, manifest: Manifest) -> dict[str, AssetSource]:
    """What a copy of a checkpoint passes to its save: each asset read, and compared, when its turn comes."""
    return {
        name: AssetSource(name, record.bytes, partial(read_asset, directory, name, manifest)) for name, record in manifest.assets.items()
    }
