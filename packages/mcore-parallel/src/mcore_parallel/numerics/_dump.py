# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensors of a run on disk, in the order in which they came about."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mcore_parallel.numerics._bound import layer_of

PHASES = ("forward", "backward", "gradient", "parameter")
"""Kinds of tensors in the order of a step: outputs of modules, gradients of these, gradients of parameters, and parameters."""
STATISTICS = ("norm", "mean", "std", "min", "max")
_FORMAT = "mcore-dump-1"


class DumpError(ValueError):
    """Files that are no dump, or two dumps that cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class DumpEntry:
    """One tensor of a dump."""

    phase: Literal["forward", "backward", "gradient", "parameter"]
    name: str
    """Global name of the module or parameter."""
    call: int
    """Which forward since the beginning, from 0; 0 for gradients and parameters."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_statistics: bool
    """Only ``STATISTICS`` of it are there."""
    path: Path
    position: int
    """In its file, in the order of time."""

    @property
    def key(self) -> str:
        """As it is called in its file."""
        return entry_key(self.phase, self.call, self.name)

    def place(self, num_layers: int) -> tuple[int, int, int, int]:
        """Sorts entries by when they came about, over the files of all pipeline stages."""
        layer = layer_of(f"{self.name}.", num_layers)
        return PHASES.index(self.phase), self.call, -layer if self.phase == "backward" else layer, self.position


def entry_key(phase: str, call: int, name: str) -> str:
    """Name of a tensor in a file.

    Example:
        >>> entry_key("forward", 0, "layers.1.mlp")
        'forward/0/layers.1.mlp'
    """
    return f"{phase}/{call}/{name}"


def statistics(x: Tensor) -> Tensor:
    """``STATISTICS`` of a tensor, float64 [5]; zeros for an empty one."""
    if not x.numel():
        return torch.zeros(len(STATISTICS), dtype=torch.float64)
    x = x.detach().double()
    return torch.stack([x.norm(), x.mean(), x.std(correction=0), x.min(), x.max()]).cpu()


def write_dump(path: Path, entries: Sequence[tuple[str, Tensor, torch.dtype, tuple[int, ...]]], *, statistics_only: bool) -> None:
    """Write one file.

    Args:
        path: of the file; its folder is made.
        entries: (key, tensor or its statistics, dtype and shape of the tensor), in the order of time.
        statistics_only: whether tensors are statistics.

    Raises:
        ImportError: the extra ``compare`` is not installed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = [{"key": key, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape)} for key, _, dtype, shape in entries]
    metadata = {"format": _FORMAT, "entries": json.dumps(facts), "statistics": str(int(statistics_only))}
    _safetensors().save_file({key: tensor.contiguous() for key, tensor, _, _ in entries}, str(path), metadata=metadata)


def read_entries(folder: str | Path) -> dict[str, DumpEntry]:
    """What a dump holds, by key; tensors stay on disk.

    Args:
        folder: of the files of all ranks that wrote, or one file.

    Raises:
        DumpError: no dump there, or a tensor that two files hold.
        ImportError: the extra ``compare`` is not installed.
    """
    folder = Path(folder)
    paths = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise DumpError(f"{folder} holds no .safetensors file; pass the folder that TensorRecorder wrote")
    entries: dict[str, DumpEntry] = {}
    for path in paths:
        for entry in _entries(path):
            if entry.key in entries:
                raise DumpError(
                    f"{entry.key} is in {entries[entry.key].path.name} and in {path.name}; keep the dumps of two runs in two folders"
                )
            entries[entry.key] = entry
    return entries


def read_tensor(entry: DumpEntry) -> Tensor:
    """The tensor, or its statistics."""
    with _safetensors_reader(entry.path) as file:
        return file.get_tensor(entry.key)


def num_layers(entries: Mapping[str, DumpEntry]) -> int:
    """Layers of the model, as far as the names tell."""
    numbers = [int(match[1]) for entry in entries.values() if (match := re.search(r"(?:^|\.)layers\.(\d+)", entry.name))]
    return max(numbers, default=-1) + 1


def _entries(path: Path) -> list[DumpEntry]:
    with _safetensors_reader(path) as file:
        metadata = file.metadata() or {}
        held = set(file.keys())
    if metadata.get("format") != _FORMAT:
        raise DumpError(f"{path} is no dump of TensorRecorder (format {metadata.get('format')!r}); pass a folder that it wrote")
    entries = []
    try:
        for position, fact in enumerate(json.loads(metadata["entries"])):
            phase, call, name = fact["key"].split("/", 2)
            dtype = getattr(torch, fact["dtype"])
            if phase not in PHASES or fact["key"] not in held or not isinstance(dtype, torch.dtype):
                raise ValueError(fact["key"])
            shape, whole = tuple(fact["shape"]), metadata["statistics"] == "0"
            place: dict[str, Any] = {"phase": phase, "name": name, "call": int(call), "position": position, "path": path}
            entries.append(DumpEntry(**place, shape=shape, dtype=dtype, is_statistics=not whole))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DumpError(f"{path} has a damaged list of entries ({error}); write the dump again") from None
    return entries


def _safetensors_reader(path: Path) -> Any:
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise DumpError(f"{path} cannot be read: {error}") from None


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("dumps need safetensors; install mcore-parallel[compare]") from None
    return safetensors.torch
