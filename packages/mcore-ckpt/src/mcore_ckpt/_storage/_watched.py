# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder that tells how many bytes pass through it."""

from collections.abc import Callable, Iterable, Iterator

from mcore_ckpt._storage._folder import FileRecord, Folder, StoredFile, write_hashed
from mcore_ckpt._storage._stream import cut

__all__ = ["WatchedFolder"]


class WatchedFolder:
    """A `Folder` that does what another does, and reports bytes written to files and read from them.

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
