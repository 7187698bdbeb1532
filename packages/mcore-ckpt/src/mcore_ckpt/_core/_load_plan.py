# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The plan of a load, as data: which chunks fill which tensors, which rank verifies which file, and how mismatches are handled."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from mcore_ckpt._core._manifest import Chunk, TensorRecord
from mcore_ckpt._errors import list_names
from mcore_ckpt.chunks import Box

__all__ = ["Mismatches", "Read", "Strictness", "as_strictness", "assign_files", "compare", "plan_load", "slabs"]

_MODES = ("raise", "warn", "ignore")


@dataclass(frozen=True, kw_only=True)
class Strictness:
    """What to do about each kind of mismatch: "raise" before anything is written, "warn" on the first rank, or "ignore".

    Where it is not raised, the tensor in the state keeps its values. Another element type is always raised.

    Raises:
        ValueError: another mode.

    Example:
        >>> Strictness(missing="warn", unexpected="ignore").shape
        'raise'
    """

    missing: Literal["raise", "warn", "ignore"] = "raise"
    """The state asks for it, the checkpoint lacks it."""
    unexpected: Literal["raise", "warn", "ignore"] = "raise"
    """The checkpoint holds it, no rank asks for it."""
    shape: Literal["raise", "warn", "ignore"] = "raise"
    """Stored with another global shape than the state's."""

    def __post_init__(self) -> None:
        for field in fields(self):
            mode = getattr(self, field.name)
            if mode not in _MODES:
                raise ValueError(f"{field.name}={mode!r} must be one of {', '.join(_MODES)}")


@dataclass(frozen=True, kw_only=True)
class Mismatches:
    """Differences between a state and a checkpoint; sorted names, all empty where they fit."""

    missing: tuple[str, ...] = ()
    """Asked for and not stored."""
    unexpected: tuple[str, ...] = ()
    """Stored and not asked for."""
    shapes: tuple[str, ...] = ()
    """Stored with another global shape: ``name (stored [..], asked [..])``."""
    dtypes: tuple[str, ...] = ()
    """Stored with another element type."""

    def __bool__(self) -> bool:
        """Whether there is any."""
        return any(getattr(self, field.name) for field in fields(self))

    def lines(self, strictness: Strictness, mode: str) -> list[str]:
        """One line for each kind of mismatch that ``strictness`` treats as ``mode``; with the remedy where that is "raise"."""
        lines = []
        if self.missing and strictness.missing == mode:
            lines.append(f"missing from the checkpoint: {list_names(self.missing, self.unexpected)}")
        if self.shapes and strictness.shape == mode:
            lines.append(f"other global shape: {list_names(self.shapes)}")
        if self.dtypes and mode == "raise":
            lines.append(f"other dtype: {list_names(self.dtypes)}; load into the stored dtype and convert after")
        if self.unexpected and strictness.unexpected == mode:
            remedy = "; pass strict=False to leave them" if mode == "raise" else ""
            lines.append(f"holds tensors nobody asks for: {list_names(self.unexpected, self.missing)}{remedy}")
        return lines

    def warn(self, strictness: Strictness, where: str) -> None:
        """Warn about the kinds that ``strictness`` sets to "warn"."""
        lines = self.lines(strictness, "warn")
        if lines:
            warnings.warn(f"{where}: {'; '.join(lines)}", RuntimeWarning, stacklevel=3)


def as_strictness(strict: bool | Strictness) -> Strictness:
    """True: everything raises. False: as True, but unexpected tensors are left."""
    if isinstance(strict, Strictness):
        return strict
    return Strictness() if strict else Strictness(unexpected="ignore")


@dataclass(frozen=True)
class Read:
    """Copy indices ``box`` of the global tensor ``name`` out of ``chunk``."""

    name: str
    chunk: Chunk
    box: Box


def compare(wanted: Mapping[str, TensorRecord], stored: Mapping[str, TensorRecord]) -> Mismatches:
    """All mismatches between the ``wanted`` tensors and the ``stored`` ones."""
    both = sorted(wanted.keys() & stored.keys())
    shapes = (f"{n} (stored {list(stored[n].shape)}, asked {list(wanted[n].shape)})" for n in both if stored[n].shape != wanted[n].shape)
    dtypes = (f"{n} (stored {stored[n].dtype}, asked {wanted[n].dtype})" for n in both if stored[n].dtype != wanted[n].dtype)
    missing, unexpected = wanted.keys() - stored.keys(), stored.keys() - wanted.keys()
    return Mismatches(missing=tuple(sorted(missing)), unexpected=tuple(sorted(unexpected)), shapes=tuple(shapes), dtypes=tuple(dtypes))


def plan_load(wanted: Iterable[tuple[str, Box]], stored: Mapping[str, TensorRecord]) -> list[Read]:
    """Which boxes of which chunks fill the ``wanted`` parts, in order of file so that each file is opened once.

    The reads of a part tile it, because the chunks tile the tensor.
    """
    reads = []
    for name, box in wanted:
        for chunk in stored[name].chunks:
            common = chunk.box.intersect(box)
            if common is not None:
                reads.append(Read(name, chunk, common))
    return sorted(reads, key=lambda read: (read.chunk.file, read.name, read.box))


def slabs(box: Box, max_elements: int) -> Iterator[Box]:
    """``box`` cut into consecutive boxes of at most ``max_elements`` (at least 1), along its first dims."""
    if box.num_elements <= max_elements or not box.shape:
        yield box
        return
    row = box.num_elements // box.shape[0]
    step = max(1, max_elements // row)
    for begin in range(0, box.shape[0], step):
        size = min(step, box.shape[0] - begin)
        piece = Box((box.offset[0] + begin, *box.offset[1:]), (size, *box.shape[1:]))
        if piece.num_elements <= max_elements:
            yield piece
        else:
            inner = slabs(Box(piece.offset[1:], piece.shape[1:]), max_elements)
            yield from (Box((piece.offset[0], *rest.offset), (1, *rest.shape)) for rest in inner)


def assign_files(sizes: Mapping[str, int], num_ranks: int, preferred: Mapping[str, int] | None = None) -> list[list[str]]:
    """Files divided over ranks, the largest first, each to whoever has the fewest bytes.

    Args:
        sizes: bytes of each file.
        num_ranks: how many there are.
        preferred: the rank that should take a file; it does unless that puts it more than a quarter above its share.
    """
    load = [0] * num_ranks
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    fair = sum(sizes.values()) / num_ranks
    for name in sorted(sizes, key=lambda file: (-sizes[file], file)):
        size, wish = sizes[name], (preferred or {}).get(name)
        if wish is not None and load[wish] + size <= 1.25 * max(fair, size):
            rank = wish
        else:
            rank = min(range(num_ranks), key=lambda r: (load[r], r))
        load[rank] += size
        shares[rank].append(name)
    return shares
