# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A folder of an object store, by way of fsspec."""

import contextlib
from collections.abc import Iterable
from typing import Any

__all__ = ["ObjectFolder"]


class ObjectFolder:
    """A `Folder` of whatever fsspec reaches: S3, Google Cloud Storage, Azure ...

    A store that makes an object visible when its upload is complete, as these do, makes ``publish`` one step.

    Args:
        url: such as ``s3://bucket/run``.
        options: for the file system of fsspec, such as ``endpoint_url``.

    Raises:
        ImportError: fsspec, or the library of this protocol, is not installed; names it and says how to get it.
        ValueError: an unknown protocol.
    """

    def __init__(self, url: str, **options: Any) -> None:
        try:
            from fsspec.core import url_to_fs

            self._system, self._path = url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            remedy = 'pip install "mcore-ckpt[s3]"' if url.startswith("s3://") else "install the library that fsspec names"
            raise ImportError(f"{url} cannot be reached: {error}; {remedy}") from error
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        return self._url

    @property
    def address(self) -> str:
        return self._url

    def child(self, name: str) -> "ObjectFolder":
        inner = object.__new__(ObjectFolder)
        inner._system, inner._path, inner._url = self._system, self._at(name), f"{self._url}/{name}"
        return inner

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(self._path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        file_names = {entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.rstrip("/") != self._path.rstrip("/")}
        return sorted(file_names)

    def size(self, name: str) -> int | None:
        self._system.invalidate_cache()
        try:
            entry = self._system.info(self._at(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def create(self) -> None:
        # Object stores have no folders; what has them makes one.
        self._system.makedirs(self._path, exist_ok=True)

    def write(self, name: str, parts: Iterable[memoryview]) -> None:
        if self.size(name) is not None:
            raise FileExistsError(f"{self._url}/{name} exists")
        file = self._system.open(self._at(name), "wb")
        try:
            for part in parts:
                while part:
                    # None means all of it was taken.
                    part = part[len(part) if (taken := file.write(part)) is None else taken :]
        except BaseException:
            # Closing would finish the upload and show half a file.
            with contextlib.suppress(Exception):
                file.discard()
            with contextlib.suppress(AttributeError):
                file.closed = True
            with contextlib.suppress(Exception):
                self.remove(name)
            raise
        file.close()

    def sync(self) -> None:
        """Nothing to do: a store that has answered has it."""

    def publish(self, name: str, content: bytes) -> None:
        self._system.pipe_file(self._at(name), content)

    def read(self, name: str, begin: int, end: int) -> memoryview:
        if begin >= end:
            return memoryview(bytearray())
        content = self._system.cat_file(self._at(name), start=begin, end=end)
        if len(content) != end - begin:
            raise OSError(f"{self._url}/{name}: {len(content)} bytes where {begin} to {end} were asked for")
        return memoryview(bytearray(content))

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._at(name))

    def remove_all(self, *, only_empty: bool = False) -> None:
        if only_empty:
            if self.names():
                raise OSError(f"{self._url} is not empty")
            with contextlib.suppress(FileNotFoundError):
                self._system.rmdir(self._path)
        else:
            self._system.rm(self._path, recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"
