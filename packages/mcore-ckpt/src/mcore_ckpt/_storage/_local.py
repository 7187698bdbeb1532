# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder on a disk of this machine, or on a file system that the machines share."""

import contextlib
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from mcore_ckpt._storage._stream import write_stream

__all__ = ["LocalFolder", "is_link"]

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""What the system answers where no path leads; a link that leads to itself leads nowhere."""


class LocalFolder:
    """A `Folder` of the file system; what it writes is synced to the disk, names included.

    Args:
        path: need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def address(self) -> str:
        return str(self.path.absolute())

    def child(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return []

    def size(self, name: str) -> int | None:
        try:
            status = os.lstat(self.path / name)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def create(self) -> None:
        missing = [folder for folder in (self.path, *self.path.absolute().parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for folder in missing or [self.path]:
                _sync(folder.parent)
        except BaseException:
            # What may not outlast a power cut goes at once, the innermost first; what another process has used meanwhile stays.
            for folder in missing:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise

    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        write_stream(str(self.path / name), parts)

    def sync(self) -> None:
        _sync(self.path)

    def publish(self, name: str, content: bytes) -> None:
        draft = name + ".partial"
        self.remove(draft)
        self.write(draft, [memoryview(content)])
        try:
            os.replace(self.path / draft, self.path / name)
        except BaseException:
            with contextlib.suppress(OSError):
                self.remove(draft)
            raise
        self.sync()

    def read(self, name: str, begin: int, end: int) -> memoryview:
        if begin >= end:
            return memoryview(bytearray())
        start = begin - begin % mmap.ALLOCATIONGRANULARITY
        with self._open(name, begin, end) as handle:
            # Copy-on-write: torch wants a writable buffer, and the file can never be changed through this one.
            return memoryview(mmap.mmap(handle, end - start, access=mmap.ACCESS_COPY, offset=start))[begin - start :]

    def read_into(self, name: str, begin: int, target: memoryview) -> None:
        end = begin + len(target)
        with self._open(name, begin, end) as handle:
            while target:
                length = os.preadv(handle, [target], end - len(target))
                if not length:
                    raise OSError(f"{self.path / name}: became shorter while it was read")
                target = target[length:]

    @contextlib.contextmanager
    def _open(self, name: str, begin: int, end: int) -> Iterator[int]:
        handle = os.open(self.path / name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
        try:
            size = os.fstat(handle).st_size
            if end > size:
                raise OSError(f"{self.path / name}: bytes {begin} to {end} of {size}")
            yield handle
        finally:
            os.close(handle)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path / name)

    def remove_all(self, *, only_empty: bool = False) -> None:
        if only_empty:
            os.rmdir(self.path)
            return
        for last in (False, False, True):
            try:
                shutil.rmtree(self.path)
                return
            except FileNotFoundError:
                # A writer that lost its training process may take its file away at the same time.
                if last or not self.path.exists():
                    raise


def is_link(folder: object) -> bool:
    """Whether a folder is a link to another, which what is removed through it would be taken from."""
    return isinstance(folder, LocalFolder) and folder.path.is_symlink()


def _sync(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
