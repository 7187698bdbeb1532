# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text into a tokenised corpus on disk."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_parallel.data._errors import DataError, DocumentError
from mcore_parallel.data.corpus import IndexedDatasetBuilder, token_dtype
from mcore_parallel.data.preprocessing._documents import RawBatch, check_encoding_errors, document_files, read_batches
from mcore_parallel.data.preprocessing._encode import Counts, Encoder, Encoding, PieceFolder
from mcore_parallel.data.preprocessing._source_files import FileSpan, cut_spans, whole
from mcore_parallel.data.tokenizers import Tokenizer, build_tokenizer

_PIECE_BYTES = 1 << 30

OnProgress = Callable[[int, int, float], None]


@dataclass(frozen=True, kw_only=True)
class PreprocessReport:
    """What was written."""

    num_documents: int
    num_tokens: int
    num_skipped: int
    """Documents without any text."""
    dtype: str
    seconds: float
    num_resumed: int = 0
    """Of the documents, how many an earlier run had already made."""

    @property
    def documents_per_second(self) -> float:
        return (self.num_documents - self.num_resumed) / max(self.seconds, 1e-9)


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer | str,
    *,
    append_eod: bool = False,
    json_key: str = "text",
    encoding_errors: str = "strict",
    workers: int = 1,
    partitions: int | None = None,
    partition: int | None = None,
    on_progress: OnProgress | None = None,
) -> PreprocessReport:
    """Write ``<output_prefix>.bin`` and ``.idx`` from the documents of ``inputs``, in their order.

    Documents are tokenised in batches. The result does not depend on ``workers`` and ``partitions``. If anything fails no
    dataset appears. Several partitions are pieces in the folder ``<output_prefix>.pieces`` until the last one is there:
    the same call after one that was killed makes those that are missing, and joins them.

    Args:
        inputs: files and folders, see `read_documents`.
        output_prefix: folder and stem of the output; the folder is made.
        tokenizer: a tokenizer, or a name or path for `build_tokenizer`.
        append_eod: end every document with the tokenizer's eod id.
        json_key: which field of a line, or column of a Parquet file, is the text.
        encoding_errors: "strict" or "replace", see `read_documents`.
        workers: processes that tokenise; 1 leaves it to this process and the tokenizer's own threads.
        partitions: pieces of about equal size in bytes; None makes one for each GiB of input.
        partition: number from 0 of the one piece to make, so that several machines share the work; None makes all that are
            missing and joins them.
        on_progress: told (documents, tokens, share of the work from 0 to 1) of this call after each batch.

    Raises:
        DocumentError: text is missing, unreadable or empty, or a worker died.
        TokenizerError: the tokenizer is unknown.
        DataError: numbers out of range, no eod while ``append_eod`` asks for it, or pieces of another job lie there.
        IndexedDatasetError: the output cannot be written.
    """
    if not inputs:
        raise DocumentError("no input given; name at least one file or folder")
    if workers < 1:
        raise DataError(f"workers={workers} must be at least 1")
    check_encoding_errors(encoding_errors)
    spans = [whole(name) for path in inputs for name in document_files(path)]  # a wrong path shows before hours of work
    chosen = build_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if append_eod and chosen.eod is None:
        raise DataError("append_eod=True needs a tokenizer with an eod id; name its eod token, or leave append_eod out")
    count = _count(spans, partitions, partition)
    encoding = Encoding(
        tokenizer=chosen,
        eod=chosen.eod if append_eod else None,
        dtype=token_dtype(chosen.vocab_size),
        json_key=json_key,
        encoding_errors=encoding_errors,
    )
    prefix = os.fspath(output_prefix)
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    started = time.perf_counter()
    resumed = 0
    with Encoder(encoding, workers) as encoder:
        writer = _Writer(encoder, encoding, on_progress)
        if count == 1:
            counts = writer.write(prefix, spans, sum(span.num_bytes for span in spans), keep_empty=False)
        else:
            folder = PieceFolder(prefix, _job(spans, encoding, count))
            counts, resumed = _write_pieces(writer, folder, cut_spans(spans, count), partition)
            if partition is None:
                if not counts["num_documents"]:
                    folder.remove()
                    raise _no_text(spans, counts["num_skipped"])
                folder.join(count)
    seconds = time.perf_counter() - started
    return PreprocessReport(**counts, dtype=encoding.dtype.name, seconds=seconds, num_resumed=resumed)


def _count(spans: Sequence[FileSpan], partitions: int | None, partition: int | None) -> int:
    if partitions is None:
        if partition is not None:
            raise DataError(f"partition={partition} needs partitions; say how many there are")
        return max(1, -(-sum(span.num_bytes for span in spans) // _PIECE_BYTES))
    if partitions < 1 or not 0 <= (partition or 0) < partitions:
        raise DataError(f"partitions={partitions} must be at least 1, and partition={partition} lie in 0..{partitions - 1}")
    return partitions


def _job(spans: Sequence[FileSpan], encoding: Encoding, count: int) -> dict[str, Any]:
    """What tells the pieces of one run from those of another; machines may have mounted the input in different places."""
    return {
        "input": [[os.path.basename(span.path), span.num_bytes] for span in spans],
        "tokenizer": encoding.tokenizer.unique_identifiers,
        "append_eod": encoding.eod is not None,
        "json_key": encoding.json_key,
        "encoding_errors": encoding.encoding_errors,
        "partitions": count,
    }


def _write_pieces(writer: "_Writer", folder: PieceFolder, parts: list[list[FileSpan]], partition: int | None) -> tuple[Counts, int]:
    """Make the pieces asked for that are missing; counts of all asked for, and the documents of those that were there."""
    numbers = range(len(parts)) if partition is None else [partition]
    done = {number: counts for number in numbers if (counts := folder.counts(number)) is not None}
    resumed = sum(counts["num_documents"] for counts in done.values())
    total = sum(span.num_bytes for number in numbers if number not in done for span in parts[number])
    for number in numbers:
        if number not in done:
            folder.begin(number)
            done[number] = writer.write(folder.prefix(number), parts[number], total, keep_empty=True)
            folder.finish(number, done[number])
    return {name: sum(counts[name] for counts in done.values()) for name in _COUNTS}, resumed


_COUNTS = ("num_documents", "num_tokens", "num_skipped")


class _Writer:
    """Writes one corpus after the other and tells how far the whole is."""

    def __init__(self, encoder: Encoder, encoding: Encoding, on_progress: OnProgress | None) -> None:
        self._encoder, self._encoding, self._on_progress = encoder, encoding, on_progress
        self._documents = self._tokens = 0
        self._bytes = 0.0

    def write(self, prefix: str, spans: Sequence[FileSpan], total: int, *, keep_empty: bool) -> Counts:
        """Write the documents of ``spans``; ``total`` bytes are the work of the whole."""
        counts: Counter[str] = Counter()
        with IndexedDatasetBuilder(prefix + ".bin", dtype=self._encoding.dtype) as builder:
            for batch in self._encoder.encode(self._batches(spans)):
                nonempty = batch.lengths[batch.lengths > 0]
                builder.add_documents(batch.tokens, nonempty)
                counts.update(num_documents=nonempty.size, num_tokens=batch.tokens.size, num_skipped=batch.lengths.size - nonempty.size)
                self._tell(nonempty.size, batch.tokens.size, batch.num_bytes, total)
            if not counts["num_documents"] and not keep_empty:
                raise _no_text(spans, counts["num_skipped"])
            builder.finalize(prefix + ".idx")
        return {name: int(counts[name]) for name in _COUNTS}

    def _batches(self, spans: Sequence[FileSpan]) -> Iterator[RawBatch]:
        for span in spans:
            yield from read_batches(span, self._encoding.json_key)

    def _tell(self, documents: int, tokens: int, num_bytes: float, total: int) -> None:
        self._documents += documents
        self._tokens += tokens
        self._bytes += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._documents, self._tokens, min(1.0, self._bytes / max(1, total)))


def _no_text(spans: Sequence[FileSpan], num_skipped: int) -> DocumentError:
    names = ", ".join(span.path for span in spans[:4])
    return DocumentError(f"{names}: no document with text ({num_skipped} empty ones); nothing was written, give other input")
