# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A path or an address as a folder or a file, and durable files by path."""

import os
from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt._storage._folder import FileRecord, Folder, StoredFile, digest_file, write_hashed
from mcore_ckpt._storage._local import LocalFolder
from mcore_ckpt._storage._object import ObjectFolder

__all__ = ["as_file", "file_digest", "open_folder", "sync_folder", "write_file"]


def open_folder(directory: str | Path | Folder) -> Folder:
    """The folder of a path, of an address such as ``s3://bucket/run``, or the folder itself.

    Raises:
        ImportError: the library for this kind of address is not installed.
        ValueError: an address of an unknown kind, or neither of these.
    """
    if isinstance(directory, Path):
        return LocalFolder(directory)
    if isinstance(directory, str):
        if directory.startswith("file://"):
            return LocalFolder(directory.removeprefix("file://"))
        return ObjectFolder(directory) if "://" in directory else LocalFolder(directory)
    if isinstance(directory, Folder):
        return directory
    raise ValueError(f"directory is {type(directory).__name__}; give a path, an address such as s3://bucket/run, or a Folder")


def as_file(path: Path | StoredFile) -> StoredFile:
    """A path as a file in a local folder. A link is followed: who names a file means what it points to."""
    if isinstance(path, StoredFile):
        return path
    # Unlike `Path.resolve` this ends at a link that leads to itself; whoever opens the file then says that there is none.
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    return StoredFile(LocalFolder(path.parent), path.name)


def write_file(path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
    """Create ``path`` from ``parts``, wait until it is on the disk, and return its length and SHA-256.

    The folder entry is not yet durable: call `sync_folder` after the last file.

    Raises:
        FileExistsError: there is such a file.
        OSError: what the disk says.
    """
    return write_hashed(as_file(path), parts)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    LocalFolder(folder).sync()


def file_digest(path: Path) -> FileRecord:
    """Length and SHA-256 of an existing file, read in bounded memory."""
    return digest_file(as_file(path))
