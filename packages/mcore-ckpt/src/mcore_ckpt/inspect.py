# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Looking at a checkpoint without loading it: no model code, no device, no process group."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_ckpt._core import CheckpointManager, Manifest, check_files, check_side_files, is_checkpoint, read_asset, read_manifest
from mcore_ckpt._diff import Difference, diff
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import BACKEND_NAME, open_shard
from mcore_ckpt._storage import Folder, LocalFolder, StoredFile, WatchedFolder, open_folder

__all__ = ["Difference", "Summary", "diff", "resolve_checkpoint", "resolve_folder", "summarize", "verify"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a checkpoint holds, as figures."""

    directory: Folder
    manifest: Manifest

    @property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(chunk.box.num_elements for tensor in self.manifest.tensors.values() for chunk in tensor.chunks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, assets included."""
        return sum(file.bytes for file in (*self.manifest.files.values(), *self.manifest.assets.values()))

    @property
    def stored_format(self) -> str:
        """One of the formats of `mcore_ckpt.save`: what its files are. A checkpoint that torch wrote is as "fsdp_dtensor" is."""
        if not any(name.endswith(".distcp") for name in self.manifest.files):
            return "native"
        return "fsdp_dtensor" if self.directory.size(BACKEND_NAME) is None else "torch_dist"

    def to_json(self) -> dict[str, Any]:
        """For machines: totals, then every tensor, file and asset."""
        return {
            "directory": str(self.directory),
            "format": self.stored_format,
            "version": self.manifest.version,
            "num_elements": self.num_elements,
            "num_bytes": self.num_bytes,
            "extra": dict(self.manifest.extra),
            "others": list(self.manifest.others),
            "tensors": {
                name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "num_chunks": len(tensor.chunks), "num_bytes": tensor.num_bytes}
                for name, tensor in sorted(self.manifest.tensors.items())
            },
            "files": {name: {"num_bytes": file.bytes, "sha256": file.sha256} for name, file in sorted(self.manifest.files.items())},
            "assets": {
                name: {"file": asset.file, "num_bytes": asset.bytes, "sha256": asset.sha256}
                for name, asset in sorted(self.manifest.assets.items())
            },
        }

    def to_table(self) -> str:
        """For people: one line a tensor, totals last."""
        rows = [("tensor", "dtype", "shape", "chunks", "bytes")]
        for name, tensor in sorted(self.manifest.tensors.items()):
            rows.append((name, tensor.dtype, str(list(tensor.shape)), str(len(tensor.chunks)), str(tensor.num_bytes)))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        left = "{:<{}}  {:<{}}  {:<{}}  {:>{}}  {:>{}}"
        lines = [left.format(*(value for pair in zip(row, widths, strict=True) for value in pair)) for row in rows]
        total = f"{len(rows) - 1} tensors, {self.num_elements} elements, {len(self.manifest.files)} files, {self.num_bytes} bytes"
        lines += [f"asset {name}: {asset.bytes} bytes" for name, asset in sorted(self.manifest.assets.items())]
        if self.manifest.others:
            lines.append(f"entries that are no tensors, which load leaves: {', '.join(sorted(self.manifest.others))}")
        return "\n".join([*lines, total, f"extra: {', '.join(sorted(self.manifest.extra)) or 'none'}"])


def resolve_checkpoint(directory: str | Path) -> Path:
    """``directory`` itself where it is a checkpoint, else the newest step of the `CheckpointManager` folder it is. On a disk only.

    Raises:
        CheckpointingException: it is neither.
    """
    folder = resolve_folder(directory)
    if not isinstance(folder, LocalFolder):
        raise CheckpointingException(f"{folder} is not on a disk; copy it to one first")
    return folder.path


def resolve_folder(directory: str | Path | Folder) -> Folder:
    """`resolve_checkpoint` wherever it lies, also in an object store.

    Raises:
        CheckpointingException: neither a checkpoint nor a folder of steps.
    """
    folder = open_folder(directory)
    if not is_checkpoint(folder):
        manager = CheckpointManager(folder)
        step = manager.latest()
        if step is not None:
            return manager.folder(step)
    read_manifest(folder)
    return folder


def summarize(directory: str | Path | Folder) -> Summary:
    """Read the manifest of ``directory`` (see `resolve_checkpoint`); no tensor is read.

    Raises:
        CheckpointingException: not a checkpoint.
    """
    folder = resolve_folder(directory)
    return Summary(directory=folder, manifest=read_manifest(folder))


def verify(directory: str | Path | Folder, *, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Read every byte and compare it with the manifest; returns what is wrong, one line a file, empty when all is well.

    Args:
        directory: see `resolve_checkpoint`.
        on_bytes: told of bytes as they are compared.

    Raises:
        CheckpointingException: not a checkpoint.
    """
    folder = resolve_folder(directory)
    manifest = read_manifest(folder)
    problems = []
    promised: dict[str, list[tuple[str, str, tuple[int, ...]]]] = defaultdict(list)
    for tensor in manifest.tensors.values():
        for chunk in tensor.chunks:
            promised[chunk.file].append((chunk.key, tensor.dtype, chunk.box.shape))
    watched = folder if on_bytes is None else WatchedFolder(folder, on_bytes)
    for name in sorted(manifest.files):
        try:
            check_files(watched, manifest, [name])
            file = open_shard(StoredFile(folder, name))
            for key, dtype, shape in promised[name]:
                slot = file.slot(key)
                if slot is None or (slot.dtype, slot.shape) != (dtype, shape):
                    problems.append(f"{file.file}: {key} is not the {dtype} {list(shape)} that the manifest says")
        except CheckpointingException as error:
            problems.append(str(error))
    for name in sorted(manifest.assets):
        try:
            read_asset(watched, name, manifest)
        except CheckpointingException as error:
            problems.append(str(error))
    return problems + check_side_files(watched, manifest)
