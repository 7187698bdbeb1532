# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Durable files: written through to the disk, hashed on the way, named into place at once."""

import contextlib
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FileRecord", "file_digest", "remove_file", "replace_file", "sync_folder", "write_file"]

_CHUNK_BYTES = 16 * 2**20
"""Between hashing and writing: small enough to stay in cache and under the limit of one write call."""


@dataclass(frozen=True)
class FileRecord:
    """Length and digest of a file that was written."""

    bytes: int
    sha256: str


def write_file(path: Path, parts: Iterable[bytes | bytearray | memoryview]) -> FileRecord:
    """Create ``path`` from ``parts``, wait until it is on the disk, and return its length and SHA-256.

    The folder entry is not yet durable: call `sync_folder` after the last file.

    Raises:
        FileExistsError: there is such a file.
        OSError: what the disk says.
    """
    digest, total = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        for part in parts:
            view = memoryview(part).cast("B")
            for begin in range(0, len(view), _CHUNK_BYTES):
                piece = view[begin : begin + _CHUNK_BYTES]
                digest.update(piece)
                total += len(piece)
                while piece:
                    piece = piece[os.write(handle, piece) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return FileRecord(total, digest.hexdigest())


def replace_file(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` in one step: a reader sees the old file or the new one, also after a power cut."""
    draft = path.with_name(path.name + ".partial")
    remove_file(draft)
    write_file(draft, [content])
    os.replace(draft, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_file(path: Path) -> None:
    """Remove ``path`` if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def file_digest(path: Path) -> FileRecord:
    """Length and SHA-256 of an existing file, read in bounded memory."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileRecord(file.tell(), digest.hexdigest())
