# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One checkpoint read tensor by tensor, or box by box, outside any group."""

from pathlib import Path

import torch
from torch import Tensor

from mcore_ckpt._core._load import check_files
from mcore_ckpt._core._manifest import Manifest, TensorRecord, read_manifest
from mcore_ckpt._core._plan import Read, plan_load, slabs
from mcore_ckpt._core._read import stored_part
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import ShardFile, open_shard
from mcore_ckpt._storage import Folder, StoredFile, dtype_of, itemsize, open_folder
from mcore_ckpt.chunks import Box

__all__ = ["CheckpointReader"]

SLAB_BYTES = 32 * 2**20
"""Copied at once: what a mapped file holds in memory beside the tensor that is filled."""


class CheckpointReader:
    """Files of a checkpoint, each opened once, for whoever reads many of its tensors.

    Args:
        directory: a committed checkpoint, of this library or one that torch wrote.

    Raises:
        CheckpointingException: it is none.
    """

    def __init__(self, directory: str | Path | Folder) -> None:
        self.folder = open_folder(directory)
        self.manifest: Manifest = read_manifest(self.folder)
        self._files: dict[str, ShardFile] = {}

    def record(self, name: str) -> TensorRecord:
        """What the manifest says about a tensor.

        Raises:
            CheckpointingException: no such tensor; names the nearest.
        """
        if name not in self.manifest.tensors:
            raise CheckpointingException(f"{self.folder} has no tensor {list_names([name], self.manifest.tensors)}")
        return self.manifest.tensors[name]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or all of it, in host memory of its own; digests are not compared.

        Raises:
            CheckpointingException: no such tensor, or it does not lie where the manifest says.
        """
        record = self.record(name)
        box = Box.whole(record.shape) if box is None else box
        target = torch.empty(box.shape, dtype=dtype_of(record.dtype))
        room = max(1, SLAB_BYTES // itemsize(record.dtype))
        for read in plan_load([(name, box)], {name: record}):
            for piece in slabs(read.box, room):
                part = stored_part(self._open(read.chunk.file), Read(name, read.chunk, piece), target.dtype)
                target[piece.relative_to(box).slices()].copy_(part)
        return target

    def _open(self, name: str) -> ShardFile:
        if name not in self._files:
            check_files(self.folder, self.manifest, [name], digests=False)
            self._files[name] = open_shard(StoredFile(self.folder, name))
        return self._files[name]
