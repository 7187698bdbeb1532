# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Text into a tokenised corpus on disk."""

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._builder import IndexedDatasetBuilder
from mcore_parallel.data._documents import document_files, read_documents
from mcore_parallel.data._errors import DataError, DocumentError
from mcore_parallel.data._index_file import token_dtype
from mcore_parallel.data._tokenizer import Tokenizer
from mcore_parallel.data._tokenizer_files import build_tokenizer

_BATCH_DOCUMENTS = 2048
_BATCH_CHARACTERS = 1 << 22

Encoded = tuple[NDArray[Any], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class PreprocessReport:
    """What was written."""

    num_documents: int
    num_tokens: int
    num_skipped: int
    """Documents without any text."""
    dtype: str
    seconds: float

    @property
    def documents_per_second(self) -> float:
        return self.num_documents / max(self.seconds, 1e-9)


def preprocess(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer | str,
    *,
    append_eod: bool = False,
    json_key: str = "text",
    encoding_errors: str = "strict",
    workers: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> PreprocessReport:
    """Write ``<output_prefix>.bin`` and ``.idx`` from the documents of ``inputs``, in their order.

    Documents are tokenised in batches; the result does not depend on ``workers``. If anything fails no dataset appears.

    Args:
        inputs: files and folders, see `read_documents`.
        output_prefix: folder and stem of the output; the folder is made.
        tokenizer: a tokenizer, or a name or path for `build_tokenizer`.
        append_eod: end every document with the tokenizer's eod id.
        workers: processes that tokenise; 1 leaves it to this process and the tokenizer's own threads.
        on_progress: told (documents, tokens) so far after each batch.

    Raises:
        DocumentError: text is missing, unreadable or empty, or a worker died.
        TokenizerError: the tokenizer is unknown, or has no eod while ``append_eod`` asks for it.
        IndexedDatasetError: the output cannot be written.
    """
    if not inputs:
        raise DocumentError("no input given; name at least one file or folder")
    if workers < 1:
        raise DataError(f"workers={workers} must be at least 1")
    for path in inputs:
        document_files(path)  # a wrong path shows before hours of work
    chosen = build_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    eod = chosen.eod if append_eod else None
    if append_eod and eod is None:
        raise DataError("append_eod=True needs a tokenizer with an eod id; name its eod token, or leave append_eod out")
    dtype = token_dtype(chosen.vocab_size)
    documents = chain.from_iterable(read_documents(path, json_key=json_key, encoding_errors=encoding_errors) for path in inputs)
    prefix = os.fspath(output_prefix)
    os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)
    started = time.perf_counter()
    num_documents = num_tokens = num_skipped = 0
    with IndexedDatasetBuilder(prefix + ".bin", dtype=dtype) as builder:
        for tokens, lengths in _encode_all(chosen, _batched(documents), eod, dtype, workers):
            kept = lengths[lengths > 0]
            builder.add_documents(tokens, kept)
            num_documents += kept.size
            num_tokens += tokens.size
            num_skipped += lengths.size - kept.size
            if on_progress is not None:
                on_progress(num_documents, num_tokens)
        if num_documents == 0:
            names = ", ".join(os.fspath(path) for path in inputs)
            raise DocumentError(f"{names}: no document with text ({num_skipped} empty ones); nothing was written, give other input")
        builder.finalize(prefix + ".idx")
    return PreprocessReport(
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_skipped=num_skipped,
        dtype=dtype.name,
        seconds=time.perf_counter() - started,
    )


def _batched(documents: Iterable[str]) -> Iterator[list[str]]:
    """Batches bounded in documents and in characters, so that memory stays flat on long ones."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if len(batch) >= _BATCH_DOCUMENTS or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode(tokenizer: Tokenizer, texts: list[str], eod: int | None, dtype: np.dtype) -> Encoded:
    """Ids of all texts back to back and how many each has; a text without ids gets no eod either."""
    ids = tokenizer.tokenize_batch(texts)
    if eod is not None:
        for document in ids:
            if document:
                document.append(eod)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(chain.from_iterable(ids), dtype, int(lengths.sum())), lengths


def _encode_all(tokenizer: Tokenizer, batches: Iterator[list[str]], eod: int | None, dtype: np.dtype, workers: int) -> Iterator[Encoded]:
    """Batches encoded in order; with several workers a bounded number is under way."""
    if workers == 1:
        for texts in batches:
            yield _encode(tokenizer, texts, eod, dtype)
        return
    # Not fork: the tokenizer's threads would not survive it.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(tokenizer, eod, dtype))
    pending: deque[Future[Encoded]] = deque()
    try:
        for texts in batches:
            pending.append(pool.submit(_work, texts))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise DocumentError(f"one of {workers} workers died, perhaps for lack of memory; lower workers") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: list[Any] = []
"""What a worker process was started with; stays empty in the main process."""


def _start_worker(*job: Any) -> None:
    _worker[:] = job


def _work(texts: list[str]) -> Encoded:
    tokenizer, eod, dtype = _worker
    return _encode(tokenizer, texts, eod, dtype)
