# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files of text: unpacked, as Parquet columns, or cut into spans of about equal size that are read apart and joined in their order."""

import bz2
import contextlib
import gzip
import io
import itertools
import lzma
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from mcore_parallel.data._errors import DocumentError, reason_of

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


_BATCH_ROWS = 1024


def row_groups(name: str) -> list[int]:
    """Rows of each row group of a file.

    Raises:
        DocumentError: pyarrow is missing, or the file is unreadable or no Parquet.
    """
    with _opened(name) as file:
        return [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]


def read_column(name: str, column: str, groups: Sequence[int]) -> Iterator[list[bytes | None]]:
    """Texts of a column as UTF-8, some rows at a time, None where a row has none.

    Raises:
        DocumentError: as for `row_groups`; no such column, or it holds no text.
    """
    with _opened(name) as file:
        import pyarrow

        schema = file.schema_arrow
        if column not in schema.names:
            columns = ", ".join(schema.names[:8]) or "none"
            raise DocumentError(f"{name} has no column {column!r} (columns are {columns}); choose the field with --json-key")
        kind = schema.field(column).type
        kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if not any(kind.equals(text) for text in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())):
            raise DocumentError(f"{name} has {kind} in column {column!r}, expected text; choose the field with --json-key")
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=list(groups), columns=[column]):
            # As bytes, since text that is not UTF-8 must be told apart from a damaged file.
            yield batch.column(0).cast(pyarrow.string()).cast(pyarrow.binary()).to_pylist()


def read_rows(name: str) -> Iterator[dict[str, Any]]:
    """Rows of a file as mappings of columns to plain values, nested ones too.

    Raises:
        DocumentError: as for `row_groups`.
    """
    with _opened(name) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            yield from batch.to_pylist()


@contextlib.contextmanager
def _opened(name: str) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DocumentError(
            f"cannot read {name}: pyarrow is missing; pip install 'mcore-parallel[parquet]', or write JSON lines"
        ) from error
    try:
        with parquet.ParquetFile(name) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise DocumentError(f"cannot read {name}: {str(error).rstrip('.')}; check its rights, or write it again") from error


LINE_ENDINGS = (".jsonl", ".json")
PARQUET_ENDING = ".parquet"


@dataclass(frozen=True, kw_only=True)
class FileSpan:
    """A part of a file: the lines that begin in bytes [begin, end), the row groups [begin, end) of Parquet, or all of it."""

    path: str
    begin: int = 0
    end: int | None = None
    """None reads to the end."""
    num_bytes: int
    """What it takes on the disk, about."""


def whole(path: str) -> FileSpan:
    """All of a file.

    Raises:
        DocumentError: it cannot be looked at.
    """
    try:
        return FileSpan(path=path, num_bytes=os.path.getsize(path))
    except OSError as error:
        raise DocumentError(f"cannot read {path}: {reason_of(error)}; check the path") from error


def cut_spans(files: Sequence[FileSpan], count: int) -> list[list[FileSpan]]:
    """Parts whose spans, one part after the other, hold what ``files`` hold in the same order.

    Only JSON lines that nothing packed, and the row groups of Parquet, are cut; any other file goes to the part its start lies in.

    Raises:
        DocumentError: a Parquet file is unreadable.
    """
    total = max(1, sum(file.num_bytes for file in files))
    bounds = [total * number // count for number in range(1, count)]
    parts: list[list[FileSpan]] = [[] for _ in range(count)]
    start = 0
    for file in files:
        for span, offset in _pieces(file, [bound - start for bound in bounds if start < bound < start + file.num_bytes]):
            parts[sum(bound <= start + offset for bound in bounds)].append(span)
        start += file.num_bytes
    return parts


def _pieces(file: FileSpan, cuts: list[int]) -> Iterator[tuple[FileSpan, int]]:
    """Spans of a file between ``cuts``, bytes into it, each with the byte it is counted from."""
    name, size = file.path.lower(), file.num_bytes
    if not cuts or name.endswith(PACKED_ENDINGS) or not name.endswith((*LINE_ENDINGS, PARQUET_ENDING)):
        yield file, 0
        return
    edges = [0, *cuts, size]
    if name.endswith(PARQUET_ENDING):
        rows = row_groups(file.path)
        # A row group is counted from where it would begin if all rows took the same.
        starts = [size * sum(rows[:group]) // max(1, sum(rows)) for group in range(len(rows))]
        for begin, end in itertools.pairwise(edges):
            groups = [group for group, start in enumerate(starts) if begin <= start < end]
            if groups:
                yield FileSpan(path=file.path, begin=groups[0], end=groups[-1] + 1, num_bytes=end - begin), begin
        return
    for begin, end in itertools.pairwise(edges):
        yield FileSpan(path=file.path, begin=begin, end=end, num_bytes=end - begin), begin
