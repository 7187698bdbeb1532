# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Looking at checkpoints without loading them, and comparing two: no model code, no device, no process group."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core import (
    SLAB_BYTES,
    CheckpointManager,
    CheckpointReader,
    Manifest,
    check_files,
    check_side_files,
    is_checkpoint,
    read_asset,
    read_manifest,
    slabs,
)
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import BACKEND_NAME, open_shard
from mcore_ckpt._storage import Folder, LocalFolder, StoredFile, WatchedFolder, itemsize, open_folder
from mcore_ckpt.chunks import Box

__all__ = ["Difference", "Summary", "diff", "resolve_checkpoint", "resolve_folder", "summarize", "verify"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing that two checkpoints do not have alike."""

    name: str
    """Of the tensor, of the extra value as ``extra.key``, or of the asset as ``asset.name``."""
    kind: str
    """"only in first", "only in second", "dtype", "shape", "values", "asset" or "extra"."""
    text: str
    """What each of them has; for values, how many differ and by how much at most."""

    def __str__(self) -> str:
        return f"{self.name}: {self.kind}: {self.text}"

    def to_json(self) -> dict[str, str]:
        """For machines."""
        return asdict(self)


def diff(
    first: str | Path | Folder,
    second: str | Path | Folder,
    *,
    values: bool = True,
    atol: float = 0.0,
    rtol: float = 0.0,
    on_bytes: Callable[[int], None] | None = None,
) -> list[Difference]:
    """Compare two checkpoints, whatever their layouts and formats; empty when they hold the same. Memory: 64 MiB at a time.

    Args:
        first: a committed checkpoint.
        second: another.
        values: also the elements; False for names, shapes, dtypes and extra values only.
        atol: elements a and b are alike where |a - b| <= atol + rtol |b|, infinite ones where they are equal; with both 0, where
            their bits are equal.
        rtol: see ``atol``.
        on_bytes: told of bytes of the first as they are compared.

    Raises:
        CheckpointingException: one of them is no checkpoint, or damaged.
        ValueError: a negative tolerance.
    """
    if not (atol >= 0 and rtol >= 0):
        raise ValueError(f"atol={atol} and rtol={rtol} must be at least 0")
    one, two = CheckpointReader(first), CheckpointReader(second)
    differences = []
    first_tensors, second_tensors = one.manifest.tensors, two.manifest.tensors
    for name in sorted(first_tensors.keys() | second_tensors.keys()):
        a, b = first_tensors.get(name), second_tensors.get(name)
        if a is None or b is None:
            has = a or b
            assert has is not None
            where = "only in second" if a is None else "only in first"
            differences.append(Difference(name=name, kind=where, text=f"{has.dtype} {list(has.shape)}"))
            continue
        if a.dtype != b.dtype:
            differences.append(Difference(name=name, kind="dtype", text=f"{a.dtype}, {b.dtype}"))
        if a.shape != b.shape:
            differences.append(Difference(name=name, kind="shape", text=f"{list(a.shape)}, {list(b.shape)}"))
        elif values:
            differences += _values(one, two, name, (atol, rtol), on_bytes)
    digests = [{name: asset.sha256 for name, asset in reader.manifest.assets.items()} for reader in (one, two)]
    return [*differences, *_values_by_key("asset", *digests), *_values_by_key("extra", one.manifest.extra, two.manifest.extra)]


def _values(
    one: CheckpointReader, two: CheckpointReader, name: str, tolerance: tuple[float, float], on_bytes: Callable[[int], None] | None
) -> Sequence[Difference]:
    record = one.manifest.tensors[name]
    count, largest, first_place = 0, 0.0, ""
    width = max(itemsize(record.dtype), itemsize(two.manifest.tensors[name].dtype))
    for box in slabs(Box.whole(record.shape), SLAB_BYTES // 8 // width):
        if not box.num_elements:
            continue
        a, b = one.read(name, box), two.read(name, box)
        unlike, size = _unlike(a, b, *tolerance)
        if unlike.any():
            if not count:
                within = unlike.nonzero()[0].tolist()
                first_place = str([begin + place for begin, place in zip(box.offset, within, strict=True)])
            count += int(unlike.sum())
            largest = max(largest, float(size[unlike].max()))
        if on_bytes is not None:
            on_bytes(box.num_elements * itemsize(record.dtype))
    if not count:
        return []
    whole = Box.whole(record.shape).num_elements
    text = f"{count} of {whole} elements differ, by at most {largest:.6g}, the first at {first_place}"
    return [Difference(name=name, kind="values", text=text)]


def _unlike(a: Tensor, b: Tensor, atol: float, rtol: float) -> tuple[Tensor, Tensor]:
    """Which elements are unlike, and how far apart all are (infinitely where one of them is no number)."""
    same_bits = torch.zeros(a.shape, dtype=torch.bool)
    if a.dtype == b.dtype:
        as_bytes = (a.reshape(-1).view(torch.uint8) == b.reshape(-1).view(torch.uint8)).reshape(a.numel(), -1)
        same_bits = as_bytes.all(dim=1).reshape(a.shape)
        if bool(same_bits.all()):
            return ~same_bits, torch.zeros(a.shape)
    wide = torch.complex128 if a.dtype.is_complex or b.dtype.is_complex else torch.float64
    one, two = a.to(wide), b.to(wide)
    far = (one - two).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    equal = one == two
    if a.dtype == b.dtype and not (a.dtype.is_floating_point or a.dtype.is_complex):
        # Large integers have no float64 of their own.
        equal, far = same_bits, torch.where(same_bits, 0.0, far.clamp(min=1.0))
    exact = atol == 0 and rtol == 0 and a.dtype == b.dtype
    # A share of infinity would be no tolerance.
    near = (far <= atol + rtol * two.abs()) & far.isfinite()
    alike = same_bits if exact else same_bits | equal | near
    return ~alike, far


def _values_by_key(kind: str, one: Any, two: Any) -> list[Difference]:
    differences = []
    for key in sorted(one.keys() | two.keys()):
        if key not in one or key not in two:
            where = "only in second" if key not in one else "only in first"
            differences.append(Difference(name=f"{kind}.{key}", kind=where, text=repr(one.get(key, two.get(key)))[:200]))
        elif one[key] != two[key]:
            differences.append(Difference(name=f"{kind}.{key}", kind=kind, text=f"{one[key]!r:.200}, {two[key]!r:.200}"))
    return differences


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
    """``directory`` itself where it is a checkpoint, else the newest step of the `CheckpointManager` folder that it is, or that lies in it
    as ``checkpoints``, as in the folder of a run. On a disk only.

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
        for manager in (CheckpointManager(folder), CheckpointManager(folder.child("checkpoints"))):
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
