# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Documents read from text files, folders of them, JSON lines and Parquet."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_parallel.data._errors import DocumentError, reason_of
from mcore_parallel.data.preprocessing._source_files import (
    LINE_ENDINGS,
    PARQUET_ENDING,
    FileSpan,
    opened,
    plain_name,
    read_column,
    read_rows,
    row_groups,
    whole,
)

_TEXT_ENDINGS = (".py", ".txt", ".md")
_FOLDER_ENDINGS = (*_TEXT_ENDINGS, ".jsonl", PARQUET_ENDING)
_BATCH_BYTES = 1 << 20


def read_documents(path: str | os.PathLike[str], *, json_key: str = "text", encoding_errors: str = "strict") -> Iterator[str]:
    """Documents of a file or, in order of their names, of all files of a folder.

    A file ending in .jsonl or .json holds one JSON object a line, one ending in .parquet one row a document (extra ``parquet``), any
    other file is one document. Text and lines may be packed, with .gz, .bz2, .xz or .zst (extra ``zstd``) after their ending. A folder is
    searched to any depth for .py, .txt, .md, .jsonl and .parquet files.

    Args:
        path: file or folder.
        json_key: which field of a JSON object, or column of a Parquet file, is the text.
        encoding_errors: "strict" refuses text that is not UTF-8, "replace" puts a replacement character.

    Raises:
        DocumentError: nothing is there, a file cannot be read or decoded, a line is no JSON object or lacks the field.
    """
    check_encoding_errors(encoding_errors)
    for name in document_files(path):
        for batch in read_batches(whole(name), json_key):
            yield from decode(batch, json_key, encoding_errors)


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """Documents as a file holds them, cheap to read and to send to another process."""

    path: str
    kind: str
    """"lines" of JSON, "rows" of a column, or a whole "file"."""
    items: Sequence[bytes | None]
    first: int
    """Line or row of the first item in what was read of the file, from 1."""
    place: str = ""
    """Where that began, if not at the start."""
    num_bytes: float
    """Share of the file's bytes on the disk that it took to read them."""


def read_batches(span: FileSpan, json_key: str) -> Iterator[RawBatch]:
    """The documents of a span, some at a time.

    Raises:
        DocumentError: the file cannot be read.
    """
    name = plain_name(span.path)
    if name.endswith(PARQUET_ENDING):
        yield from _row_batches(span, json_key)
        return
    with opened(span.path) as (file, raw):
        if not name.endswith(LINE_ENDINGS):
            yield RawBatch(path=span.path, kind="file", items=[file.read()], first=1, num_bytes=span.num_bytes)
            return
        place, at = "", 0
        if span.begin:
            file.seek(span.begin - 1)
            file.readline()  # a line belongs to the span that it begins in
            at = file.tell()
            place = f" after byte {at}"
        first, position = 1, raw.tell()
        while span.end is None or at < span.end:
            lines = file.readlines(_BATCH_BYTES)
            if not lines:
                return
            at += sum(map(len, lines))
            while span.end is not None and at - len(lines[-1]) >= span.end:
                at -= len(lines.pop())
            num_bytes = raw.tell() - position
            yield RawBatch(path=span.path, kind="lines", items=lines, first=first, place=place, num_bytes=num_bytes)
            first += len(lines)
            position += num_bytes


def _row_batches(span: FileSpan, column: str) -> Iterator[RawBatch]:
    rows = row_groups(span.path)
    groups = range(span.begin, len(rows) if span.end is None else span.end)
    first, total = 1 + sum(rows[: span.begin]), sum(rows[group] for group in groups)
    for texts in read_column(span.path, column, groups):
        yield RawBatch(path=span.path, kind="rows", items=texts, first=first, num_bytes=span.num_bytes * len(texts) / total)
        first += len(texts)


def decode(batch: RawBatch, json_key: str, encoding_errors: str) -> list[str]:
    """The texts of a batch.

    Raises:
        DocumentError: text is not UTF-8, a line is no JSON object or lacks the field, a row has no text.
    """
    if batch.kind == "lines":
        return [_field(place, line, entry, json_key, encoding_errors) for place, line, entry in _entries(batch, encoding_errors)]
    texts = []
    for number, data in enumerate(batch.items, start=batch.first):
        place = batch.path if batch.kind == "file" else f"{batch.path} row {number}"
        if data is None:
            raise DocumentError(f"{place} has no text in column {json_key!r}; choose the field with --json-key, or remove such rows")
        texts.append(_decode(data, place, encoding_errors))
    return texts


def read_entries(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """JSON objects or Parquet rows of a file or of all .jsonl and .parquet files of a folder, each with its place as ``file:line``.

    A Parquet column has one type, the union of its rows': entries that a row has not are null there, and left out.

    Raises:
        DocumentError: a file cannot be read, or a line is no JSON object.
    """
    for name in document_files(path):
        if plain_name(name).endswith(PARQUET_ENDING):
            for number, row in enumerate(read_rows(name), start=1):
                yield f"{name} row {number}", _without_nulls(row)
            continue
        if not plain_name(name).endswith(LINE_ENDINGS):
            if os.path.isdir(path):
                continue
            endings = ", ".join((*LINE_ENDINGS, PARQUET_ENDING))
            raise DocumentError(f"{name} ends in none of {endings}; conversations are read from JSON lines and Parquet")
        for batch in read_batches(whole(name), ""):
            for place, _, entry in _entries(batch, "strict"):
                yield place, entry


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def document_files(path: str | os.PathLike[str]) -> list[str]:
    """Files `read_documents` would read.

    Raises:
        DocumentError: the path does not exist or the folder has no file of a known kind.
    """
    top = os.fspath(path)
    if os.path.isfile(top):
        return [top]
    if not os.path.isdir(top):
        raise DocumentError(f"cannot read {top}: no such file or folder; check the path")

    def stop(error: OSError) -> None:
        raise DocumentError(f"cannot read {error.filename}: {reason_of(error)}; check its rights") from error

    files_inside = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(top, onerror=stop)
        for name in names
        if plain_name(name).endswith(_FOLDER_ENDINGS)
    ]
    if not files_inside:
        known = ", ".join(_FOLDER_ENDINGS[:-1])
        raise DocumentError(f"{top} holds no {known} or {_FOLDER_ENDINGS[-1]} file; name the files themselves")
    return sorted(files_inside)


def check_encoding_errors(choice: str) -> None:
    """Raise `DocumentError` for a choice that is none."""
    if choice not in ("strict", "replace"):
        raise DocumentError(f"encoding_errors={choice!r} must be strict or replace")


def _entries(batch: RawBatch, encoding_errors: str) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Place, line and object of each line that is not blank."""
    for number, line in enumerate(batch.items, start=batch.first):
        if line is None or line.isspace():
            continue
        place = f"{batch.path}:{number}{batch.place}"
        try:
            entry = json.loads(_decode(line, place, encoding_errors))
        except ValueError as error:
            if isinstance(error, DocumentError):
                raise
            raise DocumentError(f"{place} is no JSON: {error}; each line must hold one object") from error
        if not isinstance(entry, dict):
            raise DocumentError(f"{place} holds a {type(entry).__name__}, expected an object")
        yield place, line, entry


def _field(place: str, line: bytes, entry: dict[str, Any], json_key: str, encoding_errors: str) -> str:
    text = entry.get(json_key)
    if not isinstance(text, str):
        reason = f"it is a {type(text).__name__}" if json_key in entry else f"fields are {', '.join(sorted(entry)[:8]) or 'none'}"
        raise DocumentError(f"{place} has no text in the field {json_key!r} ({reason}); choose the field with --json-key")
    return _without_surrogates(text, place, encoding_errors) if b"\\ud" in line or b"\\uD" in line else text


def _decode(data: bytes, place: str, encoding_errors: str) -> str:
    try:
        return data.decode("utf-8", encoding_errors).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{place} is not UTF-8: byte 0x{data[error.start]:02x} at {error.start}; convert it, or use encoding_errors=replace"
        ) from error


def _without_surrogates(text: str, place: str, encoding_errors: str) -> str:
    """JSON escapes can hold half a surrogate pair, which no encoder can write."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError as error:
        if encoding_errors == "replace":
            return text.encode("utf-8", "replace").decode()
        where = f"half a surrogate pair at character {error.start}"
        raise DocumentError(f"{place} escapes {where}; repair it, or use encoding_errors=replace") from error
