# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensors that flow through a model, written to disk in the order in which they come about, and read back."""

import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mcore_parallel._backward import in_backward
from mcore_parallel.comm import all_gather
from mcore_parallel.groups import ProcessGroups, ShardSpec, named_shards
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


# T tokens, D model
class TensorRecorder:
    """A context in which the outputs of a model's blocks and their gradients are kept, and at whose end they are written.

    Kept are the hidden states [T, D] of the embedding, of each layer, its norms, mixer and feed-forward, and of the final norm, whole in
    every layout: shares of the tokens under sequence parallelism are gathered. One rank of each pipeline stage writes, that of the first
    replica, so runs with the same sequences in their first replica have dumps that ``compare_dumps`` can compare.

    Each kept tensor is copied to the host, which waits for the device: for steps that are looked at, not for training on.

    Args:
        model: a stage, or its chunks (``ModelChunks``).
        folder: of the files.
        groups: the layout; None for ``model.groups``, or a single rank where there is none.
        statistics_only: keep norm, mean, deviation, and range of each tensor in place of the tensor.

    Raises:
        ValueError: context parallelism, whose ranks hold tokens in an order of their own.
    """

    def __init__(self, model: nn.Module, folder: str | Path, *, groups: ProcessGroups | None = None, statistics_only: bool = False) -> None:
        process_groups: Any = getattr(model, "groups", None) if groups is None else groups
        self.groups: ProcessGroups = process_groups if isinstance(process_groups, ProcessGroups) else ProcessGroups.single()
        if self.groups.cp.size > 1:
            raise ValueError(f"cp={self.groups.cp.size} gives each rank other tokens of a sequence; record a run with cp=1")
        self.model, self.folder, self.statistics_only = model, Path(folder), statistics_only
        self._entries: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {}
        self._calls: Counter[str] = Counter()
        self._handles: list[Any] = []

    def __enter__(self) -> "TensorRecorder":
        for name, module in self.model.named_modules():
            if _is_block(name):
                self._handles.append(module.register_forward_hook(functools.partial(self._see, name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if kind is None:
            self.write()

    def add(self, phase: Literal["gradient", "parameter"], tensors: Mapping[str, Tensor]) -> None:
        """Keep gradients or parameters by global name, gathered from the tp and ep ranks that hold parts; every rank calls this.

        Args:
            phase: which of the two they are.
            tensors: this rank's parts, for instance ``sync.gradients()`` between the sum and the update. Gradients of a distributed
                optimizer are complete in slices only and cannot be recorded.

        Raises:
            ValueError: a name that is no parameter, another shape than the rank's part has.
        """
        specs = {shard.name: shard.spec for shard in named_shards(self.model)}
        if unknown := tensors.keys() - specs.keys():
            raise ValueError(f"tensors holds {sorted(unknown)[:3]}, which are no parameters of {type(self.model).__name__}")
        for name, spec in specs.items():
            if name not in tensors:
                continue
            local = tensors[name].detach()
            if tuple(local.shape) != spec.local_shape(self.groups):
                raise ValueError(f"{name} has the shape {tuple(local.shape)}, this rank holds {spec.local_shape(self.groups)}")
            whole = self._gathered(local, spec)
            if spec.pipeline_copy(self.groups) == 0:
                self._keep(entry_key(phase, 0, name), whole)

    def write(self) -> None:
        """Write what was kept so far; leaving the context does so too.

        Raises:
            ImportError: the extra ``compare`` is not installed.
        """
        groups = self.groups
        if groups.tp.is_first and groups.dp_cp.is_first and self._entries:
            entries = [(key, *entry) for key, entry in self._entries.items()]
            write_dump(self.folder / f"stage{groups.pp.rank}.safetensors", entries, statistics_only=self.statistics_only)

    def _see(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if in_backward():
            return
        call = self._calls[name]
        self._calls[name] += 1
        tensor = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return
        self._keep(entry_key("forward", call, name), self._all_tokens(tensor.detach()))
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self._keep(entry_key("backward", call, name), self._all_tokens(grad.detach())))

    def _all_tokens(self, x: Tensor) -> Tensor:
        return all_gather(x, self.groups.tp) if self.groups.sequence_parallel and x.dim() == 2 else x

    def _gathered(self, local: Tensor, spec: ShardSpec) -> Tensor:
        for axis, dim in spec.shards.items():
            local = all_gather(local.contiguous(), self.groups.axis(spec.view, axis), dim)
        return local

    def _keep(self, key: str, tensor: Tensor) -> None:
        # A clone: what is on the host already would change with the model.
        value = statistics(tensor) if self.statistics_only else tensor.detach().to("cpu", copy=True)
        self._entries[key] = (value, tensor.dtype, tuple(tensor.shape))


def _is_block(name: str) -> bool:
    """Modules between which hidden states travel, as all layouts have them."""
    parts = name.split(".")
    if parts[0] in ("layers", "mtp"):
        return len(parts) in (2, 3) and parts[1].isdigit()
    return len(parts) == 1 and parts[0] in ("embedding", "final_norm")
