# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Samples on disk: shards of equally shaped arrays, found by a digest of their tokens."""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcore_parallel._stability import internal_api
from mcore_parallel.training._batch import Batch

KEY_BYTES = 16
_KEYS = "keys"
_SETTINGS = "store.json"
C = TypeVar("C")


@internal_api
@dataclass(frozen=True, kw_only=True)
class StoreLayout:
    """What a store holds."""

    seq_len: int
    """Tokens of a sample."""
    arrays: Mapping[str, tuple[Any, tuple[int, ...]]]
    """Of each array its dtype and the shape of one sample."""
    error: type[ValueError]
    """What is raised."""
    again: str
    """What is to be done about a damaged shard."""

    @property
    def all_arrays(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        arrays = {_KEYS: (np.uint8, (KEY_BYTES,)), **self.arrays}
        return {name: (np.dtype(dtype), shape) for name, (dtype, shape) in arrays.items()}


class ShardWriter:
    """Adds samples to a folder; each goes to the disk as it comes, into a shard that is renamed into place when it is complete.

    Whatever is killed, the folder holds whole shards, and a writer of the same name goes on behind them.

    Args:
        folder: exists.
        layout: of the samples.
        name: of this writer; many may write to one folder, each under a name of its own (letters, digits, _).
        shard_samples: samples of a shard.

    Raises:
        ValueError: a name with other characters, a size below 1.
    """

    def __init__(self, folder: Path, layout: StoreLayout, *, name: str, shard_samples: int) -> None:
        if not name.isidentifier() and not name.isdigit():
            raise ValueError(f"name={name!r} must consist of letters, digits and _")
        if shard_samples < 1:
            raise ValueError(f"shard_samples={shard_samples} must be at least 1")
        self.folder, self.layout, self.name, self.shard_samples = folder, layout, name, shard_samples
        self.known = {key for shard in open_shards(folder, layout) for key in shard.samples()}
        self._files: dict[str, BinaryIO] = {}
        self._count = 0

    def add(self, key: bytes, values: Mapping[str, NDArray[Any]]) -> None:
        """One sample, unless it is there."""
        if key in self.known:
            return
        if not self._files:
            self._begin()
        for name, value in {_KEYS: np.frombuffer(key, dtype=np.uint8), **values}.items():
            dtype, shape = self.layout.all_arrays[name]
            assert value.shape == shape, f"{name} of shape {value.shape} in a store of {shape}"
            self._files[name].write(np.ascontiguousarray(value, dtype=dtype).tobytes())
        self.known.add(key)
        self._count += 1
        if self._count == self.shard_samples:
            self.close()

    def close(self) -> None:
        """Complete the shard that was begun."""
        if not self._files:
            return
        for name, file in self._files.items():
            # Room for any number of rows was left in the header.
            file.seek(0)
            self._header(file, name, self._count)
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._files, self._count = {}, 0
        partial = self._partial()
        os.replace(partial, self.folder / self._next())
        sync_folder(self.folder)

    def _begin(self) -> None:
        partial = self._partial()
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for name in self.layout.all_arrays:
            self._files[name] = (partial / f"{name}.npy").open("wb")
            self._header(self._files[name], name, 0)

    def _header(self, file: BinaryIO, name: str, rows: int) -> None:
        dtype, shape = self.layout.all_arrays[name]
        descr = np.lib.format.dtype_to_descr(dtype)
        np.lib.format.write_array_header_1_0(file, {"shape": (rows, *shape), "fortran_order": False, "descr": descr})

    def _next(self) -> str:
        numbers = [int(path.name.rpartition("-")[2]) for path in self.folder.glob(f"shard-{self.name}-*")]
        return f"shard-{self.name}-{1 + max(numbers, default=-1):06d}"

    def _partial(self) -> Path:
        return self.folder / f".{self._next()}.partial"


@internal_api
class StoreWriter(Generic[C]):
    """What the writers of stores have in common: settings, whose samples are there, and an end.

    Args:
        folder: of the store; made if it does not exist.
        config: a dataclass, equal to that of the samples that are there.
        layout: of the samples.
        name: as of ``ShardWriter``.
        shard_samples: as of ``ShardWriter``.

    Raises:
        layout.error: the folder holds samples made otherwise.
        ValueError: as of ``ShardWriter``.
    """

    def __init__(self, folder: str | Path, config: C, layout: StoreLayout, *, name: str, shard_samples: int) -> None:
        self.folder, self.config = Path(folder), config
        place_settings(self.folder, config, layout.error, name=name)
        self._shards = ShardWriter(self.folder, layout, name=name, shard_samples=shard_samples)

    def holds(self, batch: Batch) -> bool:
        """Whether all samples of a batch are there, or wait to be written."""
        return self._shards.known.issuperset(self._keys(batch))

    def close(self) -> None:
        """Complete the shard that was begun."""
        self._shards.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keys(self, batch: Batch) -> list[bytes]:
        return sample_keys(batch, self._shards.layout)


@internal_api
class Shard:
    """Samples in one folder, mapped into memory."""

    def __init__(self, folder: Path, layout: StoreLayout) -> None:
        expected = layout.all_arrays
        try:
            arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in expected}
        except (OSError, ValueError, EOFError) as error:
            raise layout.error(f"{folder} is damaged: {error}; {layout.again}") from error
        rows = len(arrays[_KEYS])
        kinds = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        wanted = {name: (dtype, (rows, *shape)) for name, (dtype, shape) in expected.items()}
        if kinds != wanted:
            raise layout.error(f"{folder} is damaged: its arrays are {kinds}, not {wanted}; {layout.again}")
        self._arrays = arrays

    def __getitem__(self, name: str) -> NDArray[Any]:
        """[samples, ...] of an array."""
        return self._arrays[name]

    def samples(self) -> list[bytes]:
        """Their keys, in order."""
        return [row.tobytes() for row in self._arrays[_KEYS]]


@internal_api
def open_shards(folder: Path, layout: StoreLayout) -> list[Shard]:
    """The shards of a store, in the order of their names.

    Raises:
        layout.error: a damaged one.
    """
    return [Shard(path, layout) for path in sorted(folder.glob("shard-*"))]


def place_settings(folder: Path, config: Any, error: type[ValueError], *, name: str) -> None:
    """Make the folder and write what its samples are, or see that they are the same.

    Args:
        folder: of the store.
        config: a dataclass.
        error: raised when the folder was made otherwise.
        name: of the writer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / _SETTINGS
    if settings.exists():
        if (stored := read_settings(folder, type(config), error)) != config:
            raise error(f"{folder} was made with {stored}, not with {config}; write to another folder")
        return
    partial = settings.with_name(f".{_SETTINGS}.{name}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, settings)
    sync_folder(folder)


@internal_api
def read_settings(folder: Path, kind: type[C], error: type[ValueError]) -> C:
    """What the samples of a store are.

    Args:
        folder: of the store.
        kind: the dataclass that was written; lists become tuples.
        error: raised when there is no store, or a damaged one.
    """
    path = folder / _SETTINGS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})
    except FileNotFoundError:
        raise error(f"{folder} is no store: it has no {_SETTINGS}; write one with record") from None
    except (ValueError, TypeError, AttributeError) as problem:
        raise error(f"{path} is damaged: {problem}") from problem


def sample_keys(batch: Batch, layout: StoreLayout) -> list[bytes]:
    """Of each sample, a digest of its tokens.

    Raises:
        layout.error: packed or cut samples, or of another length.
    """
    if batch.context_size > 1 or batch.cu_seqlens is not None:
        raise layout.error("samples of a store are whole rows of one sequence each; give batches without cu_seqlens, before context_share")
    if batch.tokens.shape[1] != layout.seq_len:
        raise layout.error(f"samples of {batch.tokens.shape[1]} tokens do not fit a store with seq_len={layout.seq_len}")
    rows = batch.tokens.cpu().numpy().astype("<i8")
    return [hashlib.blake2b(row.tobytes(), digest_size=KEY_BYTES).digest() for row in rows]


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
