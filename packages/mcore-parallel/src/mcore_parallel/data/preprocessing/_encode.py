# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Batches of documents into token ids, by several processes or by the tokenizer's own threads; and pieces of a corpus under way, each
finished or not there, until all are joined."""

import contextlib
import glob
import json
import multiprocessing
import os
import shutil
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._errors import DataError, DocumentError
from mcore_parallel.data._files import atomic_file
from mcore_parallel.data.corpus import merge_indexed
from mcore_parallel.data.preprocessing._documents import RawBatch, decode
from mcore_parallel.data.tokenizers import RoleTokenizer, Tokenizer, check_ids


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """How documents become ids."""

    tokenizer: Tokenizer
    eod: int | None
    """Ends every document that has ids; None adds nothing."""
    dtype: np.dtype
    json_key: str
    encoding_errors: str


@dataclass(frozen=True, kw_only=True)
class EncodedBatch:
    """Ids of documents."""

    tokens: NDArray[Any]
    """[sum(lengths)] back to back."""
    lengths: NDArray[np.int64]
    """[documents], 0 for one without text."""
    num_bytes: float
    """See `RawBatch`."""


class Encoder:
    """Encodes batches in their order with a bounded number under way; a context manager that ends its workers.

    One worker is this process: while the tokenizer's threads encode a batch, the next one is read and the last one is packed.
    """

    def __init__(self, encoding: Encoding, workers: int) -> None:
        self._workers = workers
        self._pool: Executor
        if workers == 1:
            # Libraries bear two threads, so that one packs ids while the other encodes; a tokenizer from elsewhere need not.
            known = isinstance(encoding.tokenizer, RoleTokenizer)
            self._here = encoding, nullcontext() if known else threading.Lock()
            self._pool = ThreadPoolExecutor(2)
        else:
            # Not fork: the tokenizer's threads would not survive it.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(encoding,))

    def __enter__(self) -> "Encoder":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def encode(self, batches: Iterable[RawBatch]) -> Iterator[EncodedBatch]:
        """What each batch holds, in order.

        Raises:
            DocumentError: text is unreadable, or a worker died.
            TokenizerError: text has no ids.
        """
        pending: deque[Future[EncodedBatch]] = deque()
        try:
            for batch in batches:
                pending.append(self._submit(batch))
                if len(pending) > 2 * self._workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DocumentError(f"one of {self._workers} workers died, perhaps for lack of memory; lower workers") from error
        finally:
            for future in pending:
                future.cancel()

    def _submit(self, batch: RawBatch) -> Future[EncodedBatch]:
        if self._workers == 1:
            return self._pool.submit(_encode, *self._here, batch)
        return self._pool.submit(_work, batch)


def _encode(encoding: Encoding, lock: AbstractContextManager[Any], batch: RawBatch) -> EncodedBatch:
    texts = decode(batch, encoding.json_key, encoding.encoding_errors)
    with lock:
        ids = encoding.tokenizer.tokenize_batch(texts)
    if encoding.eod is not None:
        for document in ids:
            if document:
                document.append(encoding.eod)
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    vocab_size = encoding.tokenizer.vocab_size
    try:
        tokens = np.fromiter(chain.from_iterable(ids), encoding.dtype, int(lengths.sum()))
    except OverflowError:  # an id that the dtype cannot hold is none of the vocabulary
        check_ids(list(chain.from_iterable(ids)), vocab_size)
        raise
    if tokens.size:
        check_ids([int(tokens.min()), int(tokens.max())], vocab_size)
    return EncodedBatch(tokens=tokens, lengths=lengths, num_bytes=batch.num_bytes)


_worker: list[Any] = []
"""What a worker process was started with; stays empty in the main process."""


def _start_worker(encoding: Encoding) -> None:
    # Each worker has a core; threads of the tokenizer in every one of them would fight for all.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker[:] = [encoding]


def _work(batch: RawBatch) -> EncodedBatch:
    return _encode(_worker[0], nullcontext(), batch)


Counts = dict[str, int]


class PieceFolder:
    """The folder ``<output_prefix>.pieces``, where pieces numbered from 0 lie until they are joined.

    A piece is finished when its counts are there, which are written last. Any process may make any piece; the folder says
    what all of them are made from, and pieces made from something else are never joined.

    Args:
        output_prefix: of the whole corpus.
        job: what the pieces are made from and how; JSON.

    Raises:
        DataError: the folder cannot be written, or holds pieces of another job.
    """

    def __init__(self, output_prefix: str, job: Mapping[str, Any]) -> None:
        self._prefix, self._folder = output_prefix, output_prefix + ".pieces"
        path = os.path.join(self._folder, "job.json")
        try:
            os.makedirs(self._folder, exist_ok=True)
            if not os.path.exists(path):
                with atomic_file(path) as file:
                    file.write(json.dumps(job, indent=1).encode())
            with open(path, encoding="utf-8") as file:
                stored = dict(json.load(file))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"cannot use {self._folder}: {error}; name a writable folder, or remove this one") from error
        wanted = json.loads(json.dumps(job))
        differing = [name for name in wanted if stored.get(name) != wanted[name]]
        if differing:
            raise DataError(
                f"{self._folder} holds pieces made with another {', '.join(differing)}; "
                "repeat the command that began them, or remove the folder"
            )

    def prefix(self, number: int) -> str:
        """Path prefix of a piece."""
        return os.path.join(self._folder, str(number))

    def counts(self, number: int) -> Counts | None:
        """What a finished piece holds, None for one that is not finished."""
        try:
            with open(self.prefix(number) + ".json", encoding="utf-8") as file:
                return {str(name): int(count) for name, count in json.load(file).items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, TypeError):
            return None  # damaged: making the piece again repairs it

    def begin(self, number: int) -> None:
        """Remove what an attempt that was killed has left of a piece."""
        for path in glob.glob(glob.escape(self.prefix(number)) + ".*.partial"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def finish(self, number: int, counts: Counts) -> None:
        """Mark a piece whose corpus is in place."""
        with atomic_file(self.prefix(number) + ".json") as file:
            file.write(json.dumps(counts).encode())

    def join(self, count: int) -> None:
        """Write the corpus of all pieces and remove them."""
        merge_indexed([self.prefix(number) for number in range(count)], self._prefix)
        self.remove()

    def remove(self) -> None:
        """Remove all pieces."""
        shutil.rmtree(self._folder, ignore_errors=True)
