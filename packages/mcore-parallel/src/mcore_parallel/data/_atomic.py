# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files that appear whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import BinaryIO


def partial_name(path: str) -> str:
    """A name beside ``path``, in the same folder so that a rename is atomic, that no other writer uses."""
    return f"{path}.{os.getpid()}-{secrets.token_hex(4)}.partial"


def commit(partial: str, path: str) -> None:
    """Rename a closed and synced file into place and make the rename durable."""
    os.replace(partial, path)
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[BinaryIO]:
    """Open a file for writing that takes the name ``path`` only when the block ends without an exception."""
    partial = partial_name(path)
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        commit(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
