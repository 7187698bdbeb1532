# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Our tensors as a Hugging Face folder, one tensor at a time."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core import as_sharded, check_files, read_manifest, read_tensor
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._storage import WatchedFolder, dtype_code, open_folder, write_file, write_safetensors
from mcore_ckpt.chunks import Box
from mcore_ckpt.hf._config import complete, measure, to_hf_config
from mcore_ckpt.hf._draft import drafted_folder
from mcore_ckpt.hf._families import find_family
from mcore_ckpt.hf._fields import Family
from mcore_ckpt.hf._rules import sites as sites_of
from mcore_ckpt.hf._rules import split
from mcore_ckpt.hf._stored_adapter import StoredAdapter
from mcore_ckpt.hf._tokenizer import put_tokenizer, tokenizer_files

__all__ = ["export_checkpoint_hf", "export_hf"]


def export_hf(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    directory: str | Path,
    *,
    family: str | Family,
    config: Mapping[str, Any],
    max_shard_bytes: int = 4 * 2**30,
    dtype: torch.dtype | None = None,
    hf_config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` of the family's class in transformers loads. Not collective: call it on one rank.

    Tensors are taken one at a time; host memory holds at most one file's worth and one tensor. The folder appears under its
    name only when it is complete.

    Args:
        tensors: our global names and whole tensors, in any order. For parts use `export_checkpoint_hf`.
        directory: must not exist, or be empty.
        family: name of one, as an import gives it or the table of families lists it, or a `Family` of your own.
        config: the model's sizes in our field names.
        max_shard_bytes: data a file holds before the next is begun; a larger tensor gets a file of its own.
        dtype: convert to this; None to keep.
        hf_config: further entries of config.json, for instance max_position_embeddings or token ids; they win.
        tokenizer: a folder whose tokenizer's files (`tokenizer_files`) come along, beside the weights.

    Raises:
        CheckpointingException: missing, unexpected or misshapen tensors, by name; one in a floating-point format of one byte.
        ValueError: an unknown family, a config it cannot express, or a folder with content.
    """
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    _write(
        tensors, directory, _Form(find_family(family), config, max_shard_bytes, dtype, hf_config), partial(_put_files, list(files.values()))
    )


def _put_files(files: Iterable[Path], folder: Path) -> None:
    for file in files:
        write_file(folder / file.name, [file.read_bytes()])


@dataclass(frozen=True)
class _Form:
    """What `export_hf` is told of the folder."""

    family: Family
    config: Mapping[str, Any]
    max_shard_bytes: int
    dtype: torch.dtype | None
    hf_config: Mapping[str, Any] | None


def _write(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
    directory: str | Path,
    form: _Form,
    put_more: Callable[[Path], None],
) -> None:
    """`export_hf`; ``put_more`` may add to the folder before it gets its name."""
    described, config, dtype = form.family, form.config, form.dtype
    full = complete(config, described)
    sites = {site.name: site for site in sites_of(described.rules, measure(full), full)}
    with drafted_folder(directory) as draft:
        shards = _Shards(draft, form.max_shard_bytes)
        seen: set[str] = set()
        unexpected: set[str] = set()
        for name, value in _pairs(tensors):
            if name not in sites:
                unexpected.add(name)
                continue
            site, stored = sites[name], sites[name].rule.forms[0]
            tensor = _whole(name, value)
            if name in seen or tuple(tensor.shape) != site.shape:
                problem = (
                    "given twice"
                    if name in seen
                    else f"has shape {list(tensor.shape)}, family {described.name} with this config has {list(site.shape)}"
                )
                raise CheckpointingException(f"{name} {problem}")
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
                raise CheckpointingException(
                    f"{name} is in {tensor.dtype}, a format whose scales are no part of it; export the weights as they were before rounding"
                )
            seen.add(name)
            for (their_name, _), part in zip(site.parts(stored), split(tensor, stored, site), strict=True):
                shards.add(their_name, part.to(device="cpu", dtype=site.dtype(dtype), copy=True).contiguous())
        missing = sites.keys() - seen
        if missing or unexpected:
            raise CheckpointingException(_mismatch(missing, unexpected))
        shards.finish()
        text = {**to_hf_config(full, described, str(shards.dtype).removeprefix("torch.")), **(form.hf_config or {})}
        write_file(draft / "config.json", [json.dumps(text, indent=2).encode()])
        put_more(draft)


def export_checkpoint_hf(
    checkpoint: str | Path,
    directory: str | Path,
    *,
    family: str | Family,
    config: Mapping[str, Any],
    prefix: str = "",
    verify: bool = True,
    max_shard_bytes: int = 4 * 2**30,
    dtype: torch.dtype | None = None,
    hf_config: Mapping[str, Any] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """`export_hf` of the model inside a checkpoint, whatever layout wrote it; other tensors in it, such as optimizer state, stay out.

    Of a checkpoint that holds adapters alone (`StoredAdapter`) it is the base model with the adapters added. Files that the checkpoint
    keeps under ``tokenizer/`` (see `tokenizer_files`) come along, beside the weights.

    Args:
        checkpoint: folder of one committed checkpoint.
        family: as of `export_hf`.
        prefix: what precedes the model's names there, for instance "model.".
        verify: compare the SHA-256 of the files that hold the model first.
        on_bytes: told of bytes as they are compared and, of the stored tensors, as they are taken over.

    Raises:
        CheckpointingException: as `export_hf`, or the checkpoint is damaged.
    """
    described = find_family(family)
    form = _Form(described, config, max_shard_bytes, dtype, hf_config)
    manifest = read_manifest(checkpoint)
    adapter = StoredAdapter.of(checkpoint)
    if adapter is not None:
        if prefix:
            raise ValueError(f"prefix={prefix!r}: {checkpoint} holds adapters, which have none; leave it out")
        _write(adapter.merged(verify=verify), directory, form, partial(put_tokenizer, checkpoint, manifest))
        return
    full = complete(config, described)
    names = [site.name for site in sites_of(described.rules, measure(full), full)]
    missing = {prefix + name for name in names} - manifest.tensors.keys()
    if missing:
        raise CheckpointingException(f"{checkpoint} lacks {list_names(missing, manifest.tensors)}; is prefix={prefix!r} right?")
    # A layer the config does not count would be left out in silence.
    roots = tuple(sorted({prefix + name.split(".")[0] + "." for name in names}))
    unexpected = {name for name in manifest.tensors if name.startswith(roots)} - {prefix + name for name in names}
    if unexpected:
        raise CheckpointingException(_mismatch(set(), unexpected))
    folder = open_folder(checkpoint) if on_bytes is None else WatchedFolder(open_folder(checkpoint), on_bytes)
    check_files(folder, manifest, {c.file for name in names for c in manifest.tensors[prefix + name].chunks}, digests=verify)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor = read_tensor(checkpoint, prefix + name, manifest)
            yield name, tensor
            if on_bytes is not None:
                on_bytes(tensor.nbytes)

    _write(stream(), directory, form, partial(put_tokenizer, checkpoint, manifest))


def _pairs(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    pairs: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
    yield from pairs


def _whole(name: str, value: Any) -> Tensor:
    shard = as_sharded(name, value)
    if shard.box != Box.whole(shard.global_shape):
        raise CheckpointingException(f"{name} is only a part of its tensor on this rank; save a checkpoint and use export_checkpoint_hf")
    return shard.data


def _mismatch(missing: set[str], unexpected: set[str]) -> str:
    lines = []
    if missing:
        lines.append(f"missing weights: {list_names(missing, unexpected)}")
    if unexpected:
        lines.append(f"weights this model does not have: {list_names(unexpected, missing)}")
    return "; ".join(lines)


class _Shards:
    """Tensors collected into files of bounded size."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_shard_bytes={max_bytes} must be at least 1")
        self._folder, self._max_bytes = folder, max_bytes
        self._waiting: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._total_bytes = 0
        self.dtype = torch.float32
        """Of the first tensor."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor that nobody else writes to."""
        if not self._total_bytes:
            self.dtype = tensor.dtype
        if self._waiting and sum(one.nbytes for one in self._waiting.values()) + tensor.nbytes > self._max_bytes:
            self._flush()
        self._waiting[name] = tensor
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        def entry(name: str, tensor: Tensor) -> tuple[str, str, tuple[int, ...], Any]:
            return name, dtype_code(tensor.dtype), tuple(tensor.shape), partial(self._waiting.__getitem__, name)

        write_safetensors(self._part(len(self._files)), [entry(*item) for item in self._waiting.items()], {"format": "pt"})
        self._files.append(list(self._waiting))
        self._waiting.clear()

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}"

    def finish(self) -> None:
        """Write what is left, give the files their final names, and the index."""
        self._flush()
        count = len(self._files)
        if count == 1:
            os.replace(self._part(0), self._folder / "model.safetensors")
            return
        weight_map = {}
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self._part(number), self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(self._folder / "model.safetensors.index.json", [json.dumps(index, indent=2).encode()])
