# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The one protocol that saving and loading see of a disk, an object store or memory."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

__all__ = ["FileRecord", "Folder", "StoredFile", "digest_file", "num_cores", "write_hashed"]

CHUNK_BYTES = 16 * 2**20
"""Between hashing and writing: small enough to stay in cache and under the limit of one write call."""

_WORTH_A_THREAD = 2**20


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


def write_hashed(file: StoredFile, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
    """Write a new file and return its length and SHA-256, taken on the way.

    Raises:
        FileExistsError: there is such a file.
        OSError: what the storage says.
    """
    digest, total = hashlib.sha256(), 0

    def hashed(pool: ThreadPoolExecutor) -> Iterator[memoryview]:
        nonlocal total
        for part in parts:
            view = memoryview(part).cast("B")
            for begin in range(0, len(view), CHUNK_BYTES):
                piece = view[begin : begin + CHUNK_BYTES]
                total += len(piece)
                if len(piece) < _WORTH_A_THREAD:
                    digest.update(piece)
                    yield piece
                else:
                    # Hashed while whoever asked for the piece writes it.
                    done = pool.submit(digest.update, piece)
                    yield piece
                    done.result()

    with ThreadPoolExecutor(1, "hash") as pool:
        file.folder.write(file.name, hashed(pool))
    return FileRecord(total, digest.hexdigest())


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digest_file(file: StoredFile) -> FileRecord:
    """Length and SHA-256 of a stored file, read in bounded memory."""
    digest, size = hashlib.sha256(), file.size()
    for begin in range(0, size, CHUNK_BYTES):
        digest.update(file.read(begin, min(begin + CHUNK_BYTES, size)))
    return FileRecord(size, digest.hexdigest())
