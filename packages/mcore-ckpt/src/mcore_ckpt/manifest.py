# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The manifest: the one file that makes a folder a checkpoint, and says what every byte of it is."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import FileRecord, itemsize
from mcore_ckpt.chunks import Box, check_tiling

__all__ = ["Chunk", "FileRecord", "Manifest", "TensorRecord", "is_checkpoint", "read_manifest"]

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 1
"""Raised when a reader of the previous version would misread a new checkpoint; unknown fields alone do not need it."""

_FORMAT = "mcore-ckpt"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_MAX_BYTES = 2**30


@dataclass(frozen=True)
class Chunk:
    """One stored box of a tensor: the tensor ``key`` of ``file``."""

    file: str
    key: str
    box: Box


@dataclass(frozen=True)
class TensorRecord:
    """A global tensor and the chunks that tile it; a tensor without elements has none."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).num_elements * itemsize(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of a committed checkpoint."""

    tensors: Mapping[str, TensorRecord]
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any] = field(default_factory=dict)
    version: int = FORMAT_VERSION

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
        if expected != _digest(body):
            raise ValueError("its digest does not match its content; the manifest is damaged")
        try:
            files = {_file_name(name): FileRecord(_count(file["bytes"]), str(file["sha256"])) for name, file in body["files"].items()}
            tensors = {name: _tensor(name, record, files) for name, record in body["tensors"].items()}
            extra = body["extra"]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"malformed: {type(error).__name__} {error}") from error
        if not isinstance(extra, dict):
            raise ValueError("extra is not an object")
        return cls(tensors=tensors, files=files, extra=extra, version=version)


def is_checkpoint(directory: str | Path) -> bool:
    """Whether ``directory`` holds a committed checkpoint."""
    return (Path(directory) / MANIFEST_NAME).is_file()


def read_manifest(directory: str | Path) -> Manifest:
    """Manifest of the checkpoint in ``directory``.

    Raises:
        CheckpointingException: there is none, or it cannot be believed; says what lies there instead where that is known.
    """
    path = Path(directory) / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise CheckpointingException(f"{directory} is not a checkpoint: {_what_lies_there(Path(directory))}") from None
    except OSError as error:
        raise CheckpointingException(f"{path}: {error}") from error
    try:
        if len(content) > _MAX_BYTES:
            raise ValueError(f"longer than {_MAX_BYTES} bytes")
        return Manifest.decode(content)
    except ValueError as error:
        raise CheckpointingException(f"{path}: {error}") from error


def check_extra(value: Any, path: str = "extra") -> None:
    """Check that ``value`` comes back from JSON as it went in; a tuple comes back as a list.

    Raises:
        ValueError: it would not; names the place.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if type(key) is not str:
                raise ValueError(f"{path}: key {key!r} is {type(key).__name__}; JSON keys are strings")
            check_extra(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            check_extra(item, f"{path}[{place}]")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise ValueError(f"{path} is {type(value).__name__}; extra holds JSON values only, tensors belong in the state")


def _what_lies_there(directory: Path) -> str:
    if not directory.exists():
        return "there is no such folder"
    if not directory.is_dir():
        return "it is a file"
    names = {entry.name for entry in directory.iterdir()}
    metadata = directory / "metadata.json"
    if names & {".zarray", ".zgroup"} or (metadata.is_file() and b"zarr" in metadata.read_bytes()[:4096]):
        return "it holds zarr arrays, which are not supported; rewrite it as torch_dist with the system that wrote it"
    if ".metadata" in names:
        return "it holds a torch distributed checkpoint (.metadata), which this release does not read"
    steps = sorted(name for name in names if name.startswith("step_"))
    if steps:
        return f"it holds {', '.join(steps[-3:])}; name one of them or use CheckpointManager"
    return f"it has no {MANIFEST_NAME}" + (" (a save that never finished)" if any(_FILE_NAME.fullmatch(name) for name in names) else "")


def _tensor(name: str, record: Any, files: Mapping[str, FileRecord]) -> TensorRecord:
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


def _file_name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"file name {name!r} does not stay inside the folder")
    return name


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} must be an int of at least 0")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
