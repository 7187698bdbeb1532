# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files that appear whole or not at all, and files of an object store, read by ranges of bytes through fsspec (extra ``s3``)."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from mcore_parallel.data._errors import IndexedDatasetError


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


def is_url(path: str) -> bool:
    """Whether a path names a protocol, as ``s3://bucket/corpus`` does."""
    return "://" in path


class RemoteFile:
    """One file, never copied to a disk; reading it needs no open handle, so any process and thread may.

    Args:
        url: what fsspec understands.
        options: for its file system, such as ``endpoint_url``.

    Raises:
        IndexedDatasetError: fsspec or the library of the protocol is missing, or the protocol is unknown.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._url, self._options = url, dict(options)
        self._process, self._system, self._path = self._connected()

    def _connected(self) -> tuple[int, Any, str]:
        """This process, its file system, and the path there."""
        try:
            from fsspec.core import url_to_fs

            system, path = url_to_fs(self._url, **self._options)
        except (ImportError, ValueError) as error:
            remedy = "pip install 'mcore-parallel[s3]', or copy the corpus to a disk"
            raise IndexedDatasetError(f"cannot read {self._url}: {error}; {remedy}") from error
        return os.getpid(), system, path

    def _reach(self) -> Any:
        """The file system; a forked worker makes its own, as connections do not survive a fork."""
        if self._process != os.getpid():
            self._process, self._system, self._path = self._connected()
        return self._system

    def exists(self) -> bool:
        """Whether it is there."""
        return bool(self._reach().exists(self._path))

    def size(self) -> int:
        """Bytes of the file.

        Raises:
            IndexedDatasetError: it is not there or cannot be reached.
        """
        try:
            return int(self._reach().size(self._path) or 0)
        except OSError as error:
            raise IndexedDatasetError(f"cannot open {self._url}: {error}; check the name and the rights") from error

    def read(self, begin: int, end: int) -> bytes:
        """Exactly the bytes [begin, end), in one request.

        Raises:
            IndexedDatasetError: the store fails or gives fewer.
        """
        if begin >= end:
            return b""
        try:
            data = self._reach().cat_file(self._path, start=begin, end=end)
        except OSError as error:
            raise IndexedDatasetError(f"cannot read bytes {begin} to {end} of {self._url}: {error}") from error
        return self._checked(data, begin, end)

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each range [begin, end), asked for at once where the store allows it.

        Raises:
            IndexedDatasetError: the store fails or gives fewer.
        """
        begins, ends = [begin for begin, _ in ranges], [end for _, end in ranges]
        try:
            contents = self._reach().cat_ranges([self._path] * len(ranges), begins, ends)
        except OSError as error:
            raise IndexedDatasetError(f"cannot read {len(ranges)} ranges of {self._url}: {error}") from error
        for data in contents:
            if isinstance(data, Exception):  # as some stores report what failed
                raise IndexedDatasetError(f"cannot read {len(ranges)} ranges of {self._url}: {data}") from data
        return [self._checked(data, begin, end) for data, begin, end in zip(contents, begins, ends, strict=True)]

    def _checked(self, data: bytes, begin: int, end: int) -> bytes:
        if len(data) != end - begin:
            raise IndexedDatasetError(f"{self._url} gave {len(data)} of {end - begin} bytes at {begin}: it shrank; restore it")
        return data
