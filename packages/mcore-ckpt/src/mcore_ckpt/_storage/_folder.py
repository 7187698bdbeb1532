# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The one protocol that saving and loading see of a disk, an object store or memory."""

import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mcore_ckpt._storage._stream import hash_pieces

__all__ = ["FileRecord", "FillingFolder", "Folder", "HashingFolder", "StoredFile", "digest_file", "num_cores", "write_hashed"]


_READ_BYTES = 4 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """Length and digest of a file that was written; no digest where another system wrote it without."""

    bytes: int
    sha256: str


@runtime_checkable
class Folder(Protocol):
    """Files by name, in one place. Failures are `OSError`.

    A save creates the folder, writes files under names that never existed, syncs, then publishes the manifest: only ``publish`` must be
    atomic, so a disk, an object store and memory can all keep the promise that a checkpoint exists or does not. Several files may be
    written or read at a time, on threads.
    """

    @property
    def address(self) -> str:
        """Equal for equal places, whoever asks."""
        ...

    def child(self, name: str) -> "Folder":
        """The folder ``name`` inside, which need not exist."""
        ...

    def names(self) -> list[str]:
        """Files and folders directly inside, sorted; none where the folder does not exist."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none, or something that is not a plain file."""
        ...

    def create(self) -> None:
        """Make the folder, durably. It may exist."""
        ...

    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        """Write a new file from its consecutive parts; when this returns, its content is durable."""
        ...

    def sync(self) -> None:
        """Make the names of all files durable."""
        ...

    def publish(self, name: str, content: bytes) -> None:
        """Put ``content`` under ``name``, durably and in one step: a reader sees all of it or what was there before."""
        ...

    def read(self, name: str, begin: int, end: int) -> memoryview:
        """Bytes ``begin`` to ``end`` of a file, in memory that may be written to without changing the file.

        Raises:
            OSError: no such file, or it is shorter.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        ...

    def remove_all(self, *, only_empty: bool = False) -> None:
        """Remove the folder and what is in it; with ``only_empty`` only where nothing is."""
        ...


@runtime_checkable
class HashingFolder(Protocol):
    """A folder that takes the digest of what it writes by itself."""

    def write_hashed(self, name: str, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
        """`Folder.write` that returns length and SHA-256."""
        ...


@runtime_checkable
class FillingFolder(Protocol):
    """A folder that reads into memory that is there already."""

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes of a file from ``begin`` on.

        Raises:
            OSError: no such file, or it is shorter.
        """
        ...


@dataclass(frozen=True)
class StoredFile:
    """A file in a folder."""

    folder: Folder
    name: str

    def __str__(self) -> str:
        return os.path.join(str(self.folder), self.name)

    def size(self) -> int:
        """Bytes.

        Raises:
            FileNotFoundError: no plain file.
        """
        size = self.folder.size(self.name)
        if size is None:
            raise FileNotFoundError(f"{self}: missing, or not a plain file")
        return size

    def read(self, begin: int, end: int) -> memoryview:
        """See `Folder.read`."""
        return self.folder.read(self.name, begin, end)

    def read_into(self, begin: int, target: memoryview) -> None:
        """See `FillingFolder.read_into`; any folder will do."""
        if isinstance(self.folder, FillingFolder):
            self.folder.read_into(self.name, begin, target)
        else:
            target[:] = self.folder.read(self.name, begin, begin + len(target))


def write_hashed(file: StoredFile, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
    """Write a new file and return its length and SHA-256, taken on the way.

    Raises:
        FileExistsError: there is such a file.
        OSError: what the storage says.
    """
    if isinstance(file.folder, HashingFolder):
        return file.folder.write_hashed(file.name, parts)
    digest, total = hashlib.sha256(), 0

    def counted() -> Iterator[memoryview]:
        nonlocal total
        for piece in hash_pieces(parts, digest):
            total += len(piece)
            yield piece

    file.folder.write(file.name, counted())
    return FileRecord(total, digest.hexdigest())


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digest_file(file: StoredFile) -> FileRecord:
    """Length and SHA-256 of a stored file, read in bounded memory: the next piece while one is hashed."""
    digest, size = hashlib.sha256(), file.size()
    blocks = [memoryview(mmap.mmap(-1, _READ_BYTES)) for _ in range(2)]

    def fetch(begin: int) -> memoryview:
        piece = blocks[begin // _READ_BYTES % 2][: size - begin]
        file.read_into(begin, piece)
        return piece

    with ThreadPoolExecutor(1, "read") as pool:
        ahead = pool.submit(fetch, 0)
        for begin in range(0, size, _READ_BYTES):
            piece = ahead.result()
            if begin + _READ_BYTES < size:
                ahead = pool.submit(fetch, begin + _READ_BYTES)
            digest.update(piece)
    return FileRecord(size, digest.hexdigest())
