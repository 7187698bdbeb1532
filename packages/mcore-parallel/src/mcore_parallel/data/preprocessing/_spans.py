# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files cut into stretches of about equal size, to be read apart and joined again in their order."""

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mcore_parallel.data._errors import DocumentError, reason_of
from mcore_parallel.data.preprocessing._compressed import PACKED_ENDINGS
from mcore_parallel.data.preprocessing._parquet import row_groups

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
