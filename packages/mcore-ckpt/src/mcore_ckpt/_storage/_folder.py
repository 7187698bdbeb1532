# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The one protocol that saving and loading see of a disk, an object store or memory."""

import hashlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mcore_ckpt._storage._stream import CHUNK_BYTES, cut, hash_pieces

__all__ = [
    "BLOCK_BYTES",
    "ByteRangeSink",
    "FileRecord",
    "Folder",
    "HashingFolder",
    "ReadIntoFolder",
    "StoredFile",
    "WatchedFolder",
    "digest_file",
    "num_cores",
    "write_hashed",
]

BLOCK_BYTES = 4 * 2**20
"""Read at a time of what is only hashed."""
_AHEAD = 2
"""Pieces that are read or wait while one is hashed."""
_WORTH_A_READ = 2**20


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
    """A folder that hashes what it writes itself."""

    def write_hashed(self, name: str, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
        """`Folder.write` that returns length and SHA-256."""
        ...


@runtime_checkable
class ReadIntoFolder(Protocol):
    """A folder that reads into existing memory."""

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
        """See `ReadIntoFolder.read_into`; any folder will do."""
        if isinstance(self.folder, ReadIntoFolder):
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


@dataclass(frozen=True)
class ByteRangeSink:
    """Receives a byte range of a file: into memory of that length, or through a function, which keeps no reference.

    A function gets at most ``BLOCK_BYTES`` at a time.
    """

    begin: int
    end: int
    target: memoryview | Callable[[memoryview], None]


def digest_file(file: StoredFile, sinks: Iterable[ByteRangeSink] = ()) -> FileRecord:
    """Length and SHA-256 of a stored file, read once in bounded memory: the next pieces while one is hashed.

    Args:
        file: where it lies.
        takers: disjoint, in the order of their bytes: given theirs on the way, before anybody knows whether they are sound. Long memory is
            read into directly.
    """
    digest, size = hashlib.sha256(), file.size()

    def finish(piece: _ReadBlock, view: memoryview, done: "Future[None] | None" = None) -> None:
        if done is not None:
            done.result()
        digest.update(view)
        for sink in piece.sinks:
            part = view[sink.begin - piece.begin : sink.end - piece.begin]
            if isinstance(sink.target, memoryview):
                sink.target[:] = part
            else:
                sink.target(part)

    if size <= BLOCK_BYTES:
        # Not worth a thread.
        view = memoryview(bytearray(size))
        file.read_into(0, view)
        finish(_ReadBlock(0, size, None, tuple(sinks)), view)
        return FileRecord(size, digest.hexdigest())
    blocks = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(_AHEAD + 1)]
    reading: deque[tuple[_ReadBlock, memoryview, Future[None]]] = deque()
    with ThreadPoolExecutor(1, "read") as pool:
        for number, piece in enumerate(_read_blocks(size, sinks)):
            if len(reading) > _AHEAD:
                finish(*reading.popleft())
            view = blocks[number % len(blocks)][: piece.end - piece.begin] if piece.target is None else piece.target
            reading.append((piece, view, pool.submit(file.read_into, piece.begin, view)))
        while reading:
            finish(*reading.popleft())
    return FileRecord(size, digest.hexdigest())


@dataclass(frozen=True)
class _ReadBlock:
    """Bytes of a file that are read at once: into ``target``, or into a block that is copied to ``sinks``."""

    begin: int
    end: int
    target: memoryview | None = None
    sinks: tuple[ByteRangeSink, ...] = ()


def _read_blocks(size: int, sinks: Iterable[ByteRangeSink]) -> Iterator[_ReadBlock]:
    """A file of ``size`` bytes in consecutive pieces; short neighbours share one."""
    begin, held = 0, []
    for sink in sinks:
        # Bytes without a sink, up to the next sink.
        while sink.begin - begin > BLOCK_BYTES:
            yield _ReadBlock(begin, begin + BLOCK_BYTES, None, tuple(held))
            begin, held = begin + BLOCK_BYTES, []
        # Long memory is read into; the rest shares blocks.
        memory = sink.target if isinstance(sink.target, memoryview) and len(sink.target) >= _WORTH_A_READ else None
        if begin < sink.begin and (memory is not None or sink.end - begin > BLOCK_BYTES):
            yield _ReadBlock(begin, sink.begin, None, tuple(held))
            begin, held = sink.begin, []
        if memory is None:
            held.append(sink)
            continue
        for low in range(0, len(memory), CHUNK_BYTES):
            part = memory[low : low + CHUNK_BYTES]
            yield _ReadBlock(begin + low, begin + low + len(part), part)
        begin = sink.end
    for low in range(begin, size, BLOCK_BYTES):
        yield _ReadBlock(low, min(size, low + BLOCK_BYTES), None, tuple(held) if low == begin else ())


class WatchedFolder:
    """Wraps a `Folder` and reports bytes written to files and read from them.

    Args:
        folder: what does the work.
        on_bytes: called with a number of bytes after each piece, on the thread that moved them; what it raises ends the write or read, and
            the unfinished file is removed.
    """

    def __init__(self, folder: Folder, on_bytes: Callable[[int], None]) -> None:
        self._folder, self._on_bytes = folder, on_bytes

    def __str__(self) -> str:
        return str(self._folder)

    @property
    def address(self) -> str:
        return self._folder.address

    def child(self, name: str) -> "WatchedFolder":
        return WatchedFolder(self._folder.child(name), self._on_bytes)

    def names(self) -> list[str]:
        return self._folder.names()

    def size(self, name: str) -> int | None:
        return self._folder.size(name)

    def create(self) -> None:
        self._folder.create()

    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        self._folder.write(name, self._watch(parts))

    def write_hashed(self, name: str, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
        return write_hashed(StoredFile(self._folder, name), self._watch(cut(parts)))

    def _watch(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        for part in parts:
            length = len(part)
            yield part
            self._on_bytes(length)

    def sync(self) -> None:
        self._folder.sync()

    def publish(self, name: str, content: bytes) -> None:
        self._folder.publish(name, content)

    def read(self, name: str, begin: int, end: int) -> memoryview:
        content = self._folder.read(name, begin, end)
        self._on_bytes(len(content))
        return content

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        StoredFile(self._folder, name).read_into(begin, target)
        self._on_bytes(len(target))

    def remove(self, name: str) -> None:
        self._folder.remove(name)

    def remove_all(self, *, only_empty: bool = False) -> None:
        self._folder.remove_all(only_empty=only_empty)
