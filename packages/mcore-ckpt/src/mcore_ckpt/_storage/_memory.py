# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder in the memory of this process."""

from collections.abc import Iterable

__all__ = ["MemoryFolder"]


class MemoryFolder:
    """A `Folder` that lives as long as this object: for tests, and for checkpoints that need not outlive the process.

    Ranks do not share it: in a group of several, a save says so.

    Args:
        name: for messages.
    """

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._files: dict[str, bytes] = {}
        self._folders: dict[str, MemoryFolder] = {}

    def __str__(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        return f"memory:{self._name}"

    def child(self, name: str) -> "MemoryFolder":
        return self._folders.setdefault(name, MemoryFolder(f"{self._name}/{name}"))

    def names(self) -> list[str]:
        return sorted([*self._files, *(name for name, folder in self._folders.items() if folder.names())])

    def size(self, name: str) -> int | None:
        return len(self._files[name]) if name in self._files else None

    def create(self) -> None:
        """Nothing to do: a folder is its files."""

    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        if name in self._files:
            raise FileExistsError(f"{self._name}/{name} exists")
        self._files[name] = b"".join(parts)

    def sync(self) -> None:
        """Nothing to do."""

    def publish(self, name: str, content: bytes) -> None:
        self._files[name] = bytes(content)

    def read(self, name: str, begin: int, end: int) -> memoryview:
        if name not in self._files:
            raise FileNotFoundError(f"{self._name}/{name}: no such file")
        if end > len(self._files[name]):
            raise OSError(f"{self._name}/{name}: bytes {begin} to {end} of {len(self._files[name])}")
        return memoryview(bytearray(self._files[name][begin:end]))

    def remove(self, name: str) -> None:
        self._files.pop(name, None)

    def remove_all(self, *, only_empty: bool = False) -> None:
        if only_empty and self.names():
            raise OSError(f"{self._name} is not empty")
        self._files.clear()
        for folder in self._folders.values():
            folder.remove_all()
