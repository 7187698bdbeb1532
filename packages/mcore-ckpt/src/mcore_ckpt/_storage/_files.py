# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Durable files by path, where only a local disk will do."""

from collections.abc import Iterable
from pathlib import Path

from mcore_ckpt._storage._folder import FileRecord, digest_file, write_hashed
from mcore_ckpt._storage._local import LocalFolder
from mcore_ckpt._storage._open import as_file

__all__ = ["file_digest", "sync_folder", "write_file"]


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
