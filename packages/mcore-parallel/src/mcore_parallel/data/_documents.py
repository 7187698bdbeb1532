# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Documents read from text files, folders of them, and JSON lines."""

import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from mcore_parallel.data._errors import DocumentError

_TEXT_ENDINGS = (".py", ".txt", ".md")
_LINE_ENDINGS = (".jsonl", ".json")


def read_documents(path: str | os.PathLike[str], *, json_key: str = "text", encoding_errors: str = "strict") -> Iterator[str]:
    """Documents of a file or, in order of their names, of all files of a folder.

    A file ending in .jsonl or .json holds one JSON object a line, any other file is one document; either may be
    gzipped, with .gz after its ending. A folder is searched to any depth for .py, .txt, .md and .jsonl files.

    Args:
        path: file or folder.
        json_key: which field of a JSON object is the text.
        encoding_errors: "strict" refuses text that is not UTF-8, "replace" puts a replacement character.

    Raises:
        DocumentError: nothing is there, a file cannot be read or decoded, a line is no JSON object or lacks the field.
    """
    if encoding_errors not in ("strict", "replace"):
        raise DocumentError(f"encoding_errors={encoding_errors!r} must be strict or replace")
    for name in document_files(path):
        with _opened(name) as file:
            if _plain_name(name).endswith(_LINE_ENDINGS):
                yield from _lines(file, name, json_key, encoding_errors)
            else:
                yield _decode(file.read(), name, encoding_errors)


def read_entries(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """JSON objects of a file or of all .jsonl files of a folder, each with its place as ``file:line``.

    Raises:
        DocumentError: a file cannot be read, or a line is no JSON object.
    """
    for name in document_files(path):
        if os.path.isdir(path) and not _plain_name(name).endswith(_LINE_ENDINGS):
            continue
        with _opened(name) as file:
            for place, _, entry in _entries(file, name, "strict"):
                yield place, entry


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
        raise DocumentError(f"cannot read {error.filename}: {error.strerror}; check its rights") from error

    found = [
        os.path.join(folder, name)
        for folder, _, names in os.walk(top, onerror=stop)
        for name in names
        if _plain_name(name).endswith((*_TEXT_ENDINGS, ".jsonl"))
    ]
    if not found:
        raise DocumentError(f"{top} holds no {', '.join(_TEXT_ENDINGS)} or .jsonl file; name the files themselves")
    return sorted(found)


def _plain_name(name: str) -> str:
    return name.lower().removesuffix(".gz")


@contextlib.contextmanager
def _opened(name: str) -> Iterator[BinaryIO]:
    """The file, unpacked; what goes wrong while it is read names it."""
    try:
        with cast(BinaryIO, gzip.open(name, "rb")) if name.lower().endswith(".gz") else open(name, "rb") as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DocumentError(f"cannot read {name}: {reason}; check its rights, or copy it again") from error


def _entries(file: BinaryIO, name: str, encoding_errors: str) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """Place, line and object of each line that is not blank."""
    for number, line in enumerate(file, start=1):
        if line.isspace():
            continue
        place = f"{name}:{number}"
        try:
            entry = json.loads(_decode(line, place, encoding_errors))
        except ValueError as error:
            if isinstance(error, DocumentError):
                raise
            raise DocumentError(f"{place} is no JSON: {error}; each line must hold one object") from error
        if not isinstance(entry, dict):
            raise DocumentError(f"{place} holds a {type(entry).__name__}, expected an object")
        yield place, line, entry


def _lines(file: BinaryIO, name: str, json_key: str, encoding_errors: str) -> Iterator[str]:
    for place, line, entry in _entries(file, name, encoding_errors):
        text = entry.get(json_key)
        if not isinstance(text, str):
            found = f"it is a {type(text).__name__}" if json_key in entry else f"fields are {', '.join(sorted(entry)[:8]) or 'none'}"
            raise DocumentError(f"{place} has no text in the field {json_key!r} ({found}); choose the field with --json-key")
        yield _without_surrogates(text, place, encoding_errors) if b"\\ud" in line or b"\\uD" in line else text


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
