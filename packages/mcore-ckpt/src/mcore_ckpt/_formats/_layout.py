# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What differs between the formats: names of files, how a shard is written and opened, what lies beside."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from torch import Tensor

from mcore_ckpt._formats._archive import DistcpFile, write_distcp
from mcore_ckpt._formats._torch_dist import METADATA_NAME, Place, Stored, write_metadata
from mcore_ckpt._storage import FileRecord, SafetensorsFile, StoredFile, TensorSlot, write_safetensors

__all__ = ["BACKEND_NAME", "FORMATS", "ShardFile", "asset_file", "open_shard", "own_file", "shard_name", "side_files", "write_shard"]

FORMATS = ("native", "torch_dist", "fsdp_dtensor")
BACKEND_NAME = "metadata.json"
_OWN = re.compile(r"[0-9a-f]{8}-r[0-9]+-[0-9]+\.safetensors|__[0-9]+_[0-9]+_[0-9a-f]{8}\.distcp|[0-9a-f]{8}-asset-[A-Za-z0-9._+-]+")
_BACKEND = MappingProxyType({"sharded_backend": "torch_dist", "sharded_backend_version": 1})


class ShardFile(Protocol):
    """A file of tensors that is open for reading."""

    file: StoredFile

    def slot(self, key: str) -> TensorSlot | None:
        """Type and shape of the tensor of that key, None where there is none."""
        ...

    def begin(self, key: str) -> int | None:
        """First byte in the file of a tensor whose elements follow one another there; None where they do not."""
        ...

    def tensor(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or rows of it; copy what you keep."""
        ...


def own_file(name: str) -> bool:
    """Whether a save of this library gave a file that name."""
    return _OWN.fullmatch(name) is not None


def shard_name(format: str, token: str, rank: int, number: int) -> str:
    """Name of the ``number``-th file of ``rank``; ``token`` differs from one attempt to the next."""
    if format != "native":
        return f"__{rank}_{number}_{token}.distcp"
    return f"{token}-r{rank:05d}-{number:03d}.safetensors"


def asset_file(token: str, name: str) -> str:
    """Name of the file of an asset; of all assets different ones."""
    return f"{token}-asset-{name.replace('/', '+')}"


def write_shard(
    file: StoredFile, tensors: Sequence[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]]
) -> tuple[FileRecord, dict[str, str]]:
    """Write a new file; returns its length and digest, and the key under which each tensor is found in it."""
    if file.name.endswith(".distcp"):
        return write_distcp(file, tensors)
    return write_safetensors(file, tensors), {key: key for key, *_ in tensors}


def open_shard(file: StoredFile) -> ShardFile:
    """Open a file by what its name says it is.

    Raises:
        CheckpointingException: it is not that.
    """
    return DistcpFile(file) if file.name.endswith(".distcp") else SafetensorsFile(file)


def side_files(format: str, tensors: Mapping[str, Stored], values: Mapping[str, Place]) -> dict[str, bytes]:
    """Files for other readers, by name, in the order in which they are to appear."""
    if format == "native":
        return {}
    files = {METADATA_NAME: write_metadata(tensors, values)}
    # What tells the two apart for their other readers: fsdp_dtensor is what torch.distributed.checkpoint writes, and nothing beside.
    return files if format == "fsdp_dtensor" else {**files, BACKEND_NAME: json.dumps(dict(_BACKEND)).encode()}
