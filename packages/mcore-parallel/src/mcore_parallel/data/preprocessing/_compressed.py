# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files read unpacked, whatever packed them."""

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from mcore_parallel.data._errors import DocumentError

PACKED_ENDINGS = (".gz", ".bz2", ".xz", ".zst")
_BLOCK_BYTES = 1 << 18


def plain_name(name: str) -> str:
    """The name in lower case, without the ending of what packed the file."""
    lower = name.lower()
    return next((lower.removesuffix(ending) for ending in PACKED_ENDINGS if lower.endswith(ending)), lower)


@contextlib.contextmanager
def opened(name: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """The file unpacked, and as it lies on the disk, whose position says how far the first one is.

    Raises:
        DocumentError: it cannot be read or unpacked, here or while it is read; the message names it.
    """
    try:
        with open(name, "rb") as raw:
            yield _unpacked(raw, name.lower()), raw
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"cannot read {name}: {reason}; check its rights, or copy it again") from error


def _unpacked(raw: BinaryIO, name: str) -> BinaryIO:
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if name.endswith(".bz2"):
        return cast(BinaryIO, bz2.BZ2File(raw))
    if name.endswith(".xz"):
        return cast(BinaryIO, lzma.LZMAFile(raw))
    return cast(BinaryIO, io.BufferedReader(_Zstandard(raw), _BLOCK_BYTES)) if name.endswith(".zst") else raw


class _Zstandard(io.RawIOBase):
    """Frames of Zstandard back to back, by way of its library (extra ``zstd``); unlike that library's reader it minds a lost end."""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DocumentError(
                f"cannot read {raw.name}: zstandard is missing; pip install 'mcore-parallel[zstd]', or unpack it"
            ) from error
        self._raw, self._error = raw, zstandard.ZstdError
        # The widest window that its format has: what was packed with --long must open too.
        self._frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            packed = self._rest or self._raw.read(_BLOCK_BYTES)
            self._rest = b""
            if not packed:
                if self._frame is not None:
                    raise EOFError("the last frame lacks its end")
                return 0
            self._frame = self._frame or self._frames.decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(packed))
            except self._error as error:
                raise OSError(str(error)) from error
            if self._frame.eof:
                self._frame, self._rest = None, self._frame.unused_data
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
