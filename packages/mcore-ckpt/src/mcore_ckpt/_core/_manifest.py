# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The manifest: the one file that makes a folder a checkpoint, and says what every byte of it is."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import BACKEND_NAME, METADATA_NAME, read_metadata
from mcore_ckpt._storage import FileRecord, Folder, LocalFolder, StoredFile, digest_file, dtype_of, itemsize, open_folder
from mcore_ckpt.chunks import Box, check_tiling

__all__ = [
    "MANIFEST_NAME",
    "MAX_ASSETS_BYTES",
    "AssetRecord",
    "Chunk",
    "Manifest",
    "TensorRecord",
    "check_asset_names",
    "check_extra",
    "check_json_value",
    "check_side_files",
    "is_checkpoint",
    "read_manifest",
]

MANIFEST_NAME = "manifest.json"
"""The file that makes a folder a checkpoint; published last."""
FORMAT_VERSION = 1
"""Raised when a reader of the previous version would misread a new checkpoint; unknown fields alone do not need it."""

MAX_ASSETS_BYTES = 2**28
"""Of all assets of a checkpoint together: a tokenizer has some 40 MiB at most, and tensors belong in the state."""
_MAX_ASSETS = 1000
_MAX_ASSET_NAME = 200
_ASSET_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_FORMAT = "mcore-ckpt"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors|[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.distcp")
_ASSET_FILE = re.compile(r"[0-9a-f]{8}-asset-[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}")
_SIDE_FILE = re.compile("|".join(re.escape(name) for name in (METADATA_NAME, BACKEND_NAME)))
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_BYTES = 2**30
_MAX_BACKEND_BYTES = 2**20
_MAX_DIMS = 64
_MAX_COUNT = 2**63 - 1


@dataclass(frozen=True)
class Chunk:
    """One stored box of a tensor: the tensor ``key`` of ``file``."""

    file: str
    key: str
    box: Box
    start: int | None = None
    """Where that tensor is flat and holds more: its first element that is one of the box, whose others follow. Never in a file."""


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor and the chunks that tile it; a tensor without elements has none."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype``, which is the code that files have for it, as torch's."""
        return dtype_of(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).num_elements * itemsize(self.dtype)


@dataclass(frozen=True)
class AssetRecord:
    """A stored asset: its file in the checkpoint's folder, length and digest."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a committed checkpoint."""

    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any] = field(default_factory=dict)
    assets: Mapping[str, AssetRecord] = field(default_factory=dict)
    """Files kept beside the tensors, by name; `mcore_ckpt.assets` reads them."""
    side_files: Mapping[str, FileRecord] = field(default_factory=dict)
    """Files for other readers, such as ``.metadata``; `load` does not read them."""
    version: int = FORMAT_VERSION
    others: tuple[str, ...] = ()
    """Entries of another system's checkpoint that are no tensors; they are not read."""

    def encode(self) -> bytes:
        """The manifest as JSON, with a digest over all its other fields."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": self.version,
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "chunks": [[chunk.file, chunk.key, *chunk.box.to_json()] for chunk in tensor.chunks],
                }
                for name, tensor in self.tensors.items()
            },
            "files": {name: {"bytes": file.bytes, "sha256": file.sha256} for name, file in self.files.items()},
            "extra": self.extra,
        }
        if self.assets:
            body["assets"] = {name: asdict(asset) for name, asset in self.assets.items()}
        if self.side_files:
            body["side_files"] = {name: asdict(file) for name, file in self.side_files.items()}
        return json.dumps({**body, "sha256": _digest(body)}, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes) -> "Manifest":
        """Read and check a manifest: names stay inside the folder, chunks tile their tensors, the digest holds.

        Raises:
            ValueError: it does not, or a newer version wrote it.
        """
        try:
            body = json.loads(content, object_pairs_hook=_distinct)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(body, dict) or body.get("format") != _FORMAT:
            raise ValueError(f"not a manifest of format {_FORMAT!r}")
        version = body.get("version")
        if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
            raise ValueError(f"format version {version!r}; this release reads up to {FORMAT_VERSION}, upgrade mcore-ckpt")
        expected = body.pop("sha256", None)
        try:
            if expected != _digest(body):
                raise ValueError("its digest does not match its content; the manifest is damaged")
            files = {_file_name(name): _file(record) for name, record in body["files"].items()}
            side_files = {_file_name(name, _SIDE_FILE): _file(record) for name, record in body.get("side_files", {}).items()}
            tensors = {name: _tensor(name, record, files) for name, record in body["tensors"].items()}
            _check_room(tensors, files)
            assets = _assets(body.get("assets", {}))
            extra = body["extra"]
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"malformed: {type(error).__name__} {error}") from error
        if not isinstance(extra, dict):
            raise ValueError("extra is not an object")
        return cls(tensors=tensors, files=files, extra=extra, assets=assets, side_files=side_files, version=version)


def check_side_files(folder: Folder, manifest: Manifest) -> list[str]:
    """What is wrong with the files for other readers, one line a file.

    One that the manifest records is compared byte by byte. One that it does not, because an earlier release or another system wrote it, is
    read, and compared with the manifest where it says the same.
    """
    problems = []
    for name in (METADATA_NAME, BACKEND_NAME):
        file, record = StoredFile(folder, name), manifest.side_files.get(name)
        try:
            size = folder.size(name)
            if record is not None and (size is None or size != record.bytes):
                raise ValueError(
                    "missing, or not a plain file" if size is None else f"{size} bytes instead of {record.bytes}; it is damaged"
                )
            if record is not None and digest_file(file) != record:
                raise ValueError("its SHA-256 is not the one in the manifest; the file is damaged")
            if record is None and size is not None:
                _check_unrecorded(file, manifest)
        except (OSError, ValueError, RecursionError) as error:
            problems.append(f"{file}: {str(error) or type(error).__name__}")
    return problems


def _check_unrecorded(file: StoredFile, manifest: Manifest) -> None:
    if file.name == METADATA_NAME:
        read, _ = read_metadata(file.folder)
        expected = {name: (t.dtype, t.shape, sorted((c.file, c.key, c.box) for c in t.chunks)) for name, t in manifest.tensors.items()}
        seen = {name: (dtype, shape, sorted(chunks)) for name, (dtype, shape, chunks) in read.items()}
        differing = [name for name in {**expected, **seen} if expected.get(name) != seen.get(name)]
        if differing:
            raise ValueError(f"it does not say what the manifest says about {list_names(differing)}")
    elif file.size() > _MAX_BACKEND_BYTES or not isinstance(json.loads(bytes(file.read(0, file.size()))), dict):
        raise ValueError("not the description of a format")


def is_checkpoint(directory: str | Path | Folder) -> bool:
    """Whether ``directory`` holds a committed checkpoint."""
    return open_folder(directory).size(MANIFEST_NAME) is not None


def read_manifest(directory: str | Path | Folder) -> Manifest:
    """Manifest of the checkpoint in ``directory``; of one that ``torch.distributed.checkpoint`` wrote, what its metadata says.

    Raises:
        CheckpointingException: there is none, or it cannot be believed; says what lies there instead where that is known.
    """
    folder = open_folder(directory)
    path = f"{folder}/{MANIFEST_NAME}"
    try:
        size = folder.size(MANIFEST_NAME)
        if size is None and folder.size(METADATA_NAME) is not None:
            path = f"{folder}/{METADATA_NAME}"
            return _foreign(folder)
        if size is None:
            raise CheckpointingException(f"{folder} is not a checkpoint: {_what_lies_there(folder)}")
        if size > _MAX_BYTES:
            raise ValueError(f"longer than {_MAX_BYTES} bytes")
        return Manifest.decode(bytes(folder.read(MANIFEST_NAME, 0, size)))
    except (OSError, ValueError) as error:
        raise CheckpointingException(f"{path}: {error}") from error


def check_extra(extra: Any) -> None:
    """Check that ``extra`` is an object of values that come back from JSON as they went in.

    Raises:
        ValueError: it is none; names the place.
    """
    if not isinstance(extra, Mapping):
        raise ValueError(f"extra is {type(extra).__name__}; give a dict of JSON values by name")
    check_json_value(extra)


def check_json_value(value: Any, path: str = "extra") -> None:
    """Check that ``value`` comes back from JSON as it went in; a tuple comes back as a list.

    Raises:
        ValueError: it would not; names the place.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{path}: key {key!r} is {type(key).__name__}; JSON keys are strings")
            check_json_value(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            check_json_value(item, f"{path}[{place}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ValueError(f"{path} is {type(value).__name__}; extra holds JSON values only, tensors belong in the state")


def _foreign(folder: Folder) -> Manifest:
    stored, others = read_metadata(folder)
    tensors = {
        name: TensorRecord(dtype, shape, tuple(Chunk(*chunk) for chunk in chunks)) for name, (dtype, shape, chunks) in stored.items()
    }
    sizes = {name: folder.size(name) for name in sorted({chunk.file for tensor in tensors.values() for chunk in tensor.chunks})}
    missing = [name for name, size in sizes.items() if size is None]
    if missing:
        raise ValueError(f"{missing[0]} is missing, or not a plain file")
    files = {name: FileRecord(size or 0, "") for name, size in sizes.items()}
    _check_room(tensors, files)
    return Manifest(tensors=tensors, files=files, others=tuple(others))


def _what_lies_there(folder: Folder) -> str:
    if isinstance(folder, LocalFolder) and not folder.path.is_dir():
        return "it is a file" if folder.path.exists() else "there is no such folder"
    names = set(folder.names())
    size = folder.size("metadata.json")
    if names & {".zarray", ".zgroup"} or (size and b"zarr" in bytes(folder.read("metadata.json", 0, min(size, 4096)))):
        return "it holds zarr arrays, which are not supported; rewrite it as torch_dist with the system that wrote it"
    steps = sorted(name for name in names if name.startswith("step_"))
    if steps:
        return f"it holds {', '.join(steps[-3:])}; name one of them or use CheckpointManager"
    if "config.json" in names:
        return f"it has no {MANIFEST_NAME}; config.json means a Hugging Face folder, of which import-hf makes a checkpoint"
    return f"it has no {MANIFEST_NAME}" + (" (a save that never finished)" if any(_FILE_NAME.fullmatch(name) for name in names) else "")


def _tensor(name: str, record: Any, files: Mapping[str, FileRecord]) -> TensorRecord:
    if len(record["shape"]) > _MAX_DIMS:
        raise ValueError(f"tensor {name}: {len(record['shape'])} dims; at most {_MAX_DIMS} are read")
    shape = tuple(_count(size) for size in record["shape"])
    itemsize(record["dtype"])
    chunks = []
    for file, key, *box in record["chunks"]:
        if file not in files:
            raise ValueError(f"tensor {name}: chunk in {file!r}, which is not one of its files")
        chunks.append(Chunk(file, str(key), Box.from_json(box)))
    try:
        check_tiling(shape, [chunk.box for chunk in chunks])
    except ValueError as error:
        raise ValueError(f"tensor {name}: {error}") from error
    return TensorRecord(record["dtype"], shape, tuple(chunks))


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
        if not isinstance(name, str) or len(name) > _MAX_ASSET_NAME or not _ASSET_NAME.fullmatch(name):
            raise ValueError(
                f"asset name {name!r} does not stay inside the folder; it must be parts of letters, digits, '.', '_' and '-' that begin "
                f"with none of '.' and '-', joined by '/', of at most {_MAX_ASSET_NAME} characters"
            )
        parts = name.split("/")
        above = next((folder for end in range(1, len(parts)) if (folder := "/".join(parts[:end])) in known), None)
        if above is not None:
            raise ValueError(f"asset {above!r} cannot be a file and the folder of {name!r}; rename one of them")


def _assets(body: Mapping[str, Any]) -> dict[str, AssetRecord]:
    check_asset_names(body)
    assets = {
        name: AssetRecord(_file_name(row["file"], _ASSET_FILE), _count(row["bytes"]), _sha256(row["sha256"])) for name, row in body.items()
    }
    if sum(asset.bytes for asset in assets.values()) > MAX_ASSETS_BYTES:
        raise ValueError(f"its assets are said to have more than {MAX_ASSETS_BYTES} bytes")
    return assets


def _check_room(tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]) -> None:
    """Chunks cannot hold more than their files: so nobody makes room for a tensor that is not there."""
    used = dict.fromkeys(files, 0)
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            used[chunk.file] += chunk.box.num_elements * itemsize(tensor.dtype)
    for name, num_bytes in used.items():
        if num_bytes > files[name].bytes:
            raise ValueError(f"file {name} of {files[name].bytes} bytes is said to hold {num_bytes} bytes of tensors")


def _file(record: Mapping[str, Any]) -> FileRecord:
    return FileRecord(_count(record["bytes"]), _sha256(record["sha256"]))


def _file_name(name: str, pattern: re.Pattern[str] = _FILE_NAME) -> str:
    if not pattern.fullmatch(name):
        raise ValueError(f"file name {name!r} does not stay inside the folder")
    return name


def _sha256(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} is no SHA-256")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{value!r} must be an int from 0 to 2**63 - 1")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
