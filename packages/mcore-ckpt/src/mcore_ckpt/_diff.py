# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What differs between two checkpoints."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core import SLAB_BYTES, CheckpointReader, slabs
from mcore_ckpt._storage import Folder, itemsize
from mcore_ckpt.chunks import Box

__all__ = ["Difference", "diff"]


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
        atol: elements a and b are alike where |a - b| <= atol + rtol |b|; with both 0, where their bits are equal.
        rtol: see ``atol``.
        on_bytes: told of bytes of the first as they are compared.

    Raises:
        CheckpointingException: one of them is no checkpoint, or damaged.
        ValueError: a negative tolerance.
    """
    if not (atol >= 0 and rtol >= 0):
        raise ValueError(f"atol={atol} and rtol={rtol} must be at least 0")
    one, two = CheckpointReader(first), CheckpointReader(second)
    found = []
    mine, its = one.manifest.tensors, two.manifest.tensors
    for name in sorted(mine.keys() | its.keys()):
        a, b = mine.get(name), its.get(name)
        if a is None or b is None:
            has = a or b
            assert has is not None
            where = "only in second" if a is None else "only in first"
            found.append(Difference(name=name, kind=where, text=f"{has.dtype} {list(has.shape)}"))
            continue
        if a.dtype != b.dtype:
            found.append(Difference(name=name, kind="dtype", text=f"{a.dtype}, {b.dtype}"))
        if a.shape != b.shape:
            found.append(Difference(name=name, kind="shape", text=f"{list(a.shape)}, {list(b.shape)}"))
        elif values:
            found += _values(one, two, name, (atol, rtol), on_bytes)
    digests = [{name: asset.sha256 for name, asset in reader.manifest.assets.items()} for reader in (one, two)]
    return [*found, *_values_by_key("asset", *digests), *_values_by_key("extra", one.manifest.extra, two.manifest.extra)]


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
    far = (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=torch.inf)
    exact = atol == 0 and rtol == 0 and a.dtype == b.dtype
    alike = same_bits if exact else same_bits | (far <= atol + rtol * b.to(wide).abs())
    return ~alike, far


def _values_by_key(kind: str, one: Any, two: Any) -> list[Difference]:
    found = []
    for key in sorted(one.keys() | two.keys()):
        if key not in one or key not in two:
            where = "only in second" if key not in one else "only in first"
            found.append(Difference(name=f"{kind}.{key}", kind=where, text=repr(one.get(key, two.get(key)))[:200]))
        elif one[key] != two[key]:
            found.append(Difference(name=f"{kind}.{key}", kind=kind, text=f"{one[key]!r:.200}, {two[key]!r:.200}"))
    return found
