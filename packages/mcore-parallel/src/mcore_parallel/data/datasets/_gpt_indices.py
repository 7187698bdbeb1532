# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The three indices that turn documents into fixed-length samples, in vectorised numpy."""

# N documents of the split, E epochs, S tokens a sample, e = 1 when samples carry one token more for the labels

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._errors import DataError

_STRETCH = 1 << 16
"""Documents whose ends are searched together."""


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How many passes over the documents a request needs, and whether the last is shuffled apart."""

    num_epochs: int
    num_samples: int
    """Whole samples that fit into all epochs."""
    samples_before_last: int | None
    """When the last epoch is shuffled apart: samples that come before it. None: one shuffle over everything."""


@dataclass(frozen=True, kw_only=True)
class GPTIndices:
    """The arrays of one dataset; sample k of the dataset is walk number ``shuffle[k]``."""

    documents: NDArray[np.int32]
    """[N * E] document numbers in reading order."""
    samples: NDArray[np.integer]
    """[samples + 1, 2] (position in ``documents``, token offset) where each sample starts and the last one ends."""
    shuffle: NDArray[np.integer]
    """[samples] permutation."""


def plan_epochs(*, tokens_per_epoch: int, num_samples: int | None, seq_len: int, extra: int, drop_last: bool = True) -> EpochPlan:
    """Passes needed for ``num_samples`` samples of ``seq_len + extra`` tokens that overlap by ``extra``.

    The last pass is usually needed in part only. When less than four fifths of it are, shuffling it together with the
    others would spread a few repeats over the whole run and leave documents of earlier passes unread, so it is kept apart.

    Raises:
        DataError: there are no tokens, or not enough for one sample.
    """
    if tokens_per_epoch <= 0:
        raise DataError("the documents of this split hold 0 tokens; add text, or give the split a larger share")
    if num_samples is None:
        num_epochs = 1
    else:
        num_epochs = max(1, -(-(num_samples * seq_len + extra) // tokens_per_epoch))
    available = num_epochs * tokens_per_epoch - extra
    total = available // seq_len if drop_last else -(-available // seq_len)
    if total <= 0:
        raise DataError(
            f"the documents of this split hold {tokens_per_epoch} tokens, one sample needs {seq_len + extra}; "
            "lower sequence_length, add text, or give the split a larger share"
        )
    before = None
    if num_epochs > 1 and num_samples is not None:
        whole = ((num_epochs - 1) * tokens_per_epoch - extra) // seq_len
        per_epoch = (tokens_per_epoch - extra) // seq_len
        if num_samples - whole < int(0.80 * per_epoch):
            before = whole
    return EpochPlan(num_epochs=num_epochs, num_samples=total, samples_before_last=before)


def build_gpt_indices(
    documents: NDArray[np.integer], lengths: NDArray[np.int32], plan: EpochPlan, *, seq_len: int, extra: int, seed: int
) -> GPTIndices:
    """Indices over ``documents`` [N] of ``lengths`` [N] tokens.

    Orders come from numpy's legacy generator, whose stream numpy keeps frozen: first the documents, then the samples.
    """
    generator = np.random.RandomState(seed)
    apart = plan.samples_before_last is not None
    order, order_lengths = _document_order(documents, lengths, plan.num_epochs, apart, generator)
    samples = build_sample_index(order_lengths, plan.num_samples, seq_len=seq_len, extra=extra)
    parts = (plan.samples_before_last, plan.num_samples) if plan.samples_before_last is not None else (plan.num_samples,)
    return GPTIndices(documents=order, samples=samples, shuffle=_shuffle(parts, generator))


def build_sample_index(lengths: NDArray[np.int32], num_samples: int, *, seq_len: int, extra: int) -> NDArray[np.integer]:
    """Where samples start in a reading order of documents whose lengths are ``lengths``.

    Seen as one stream, sample k starts at token k * S. Its row names the document that holds the last token of the
    sample before, token k * S + e - 1: with e = 1 that is the shared token itself; with e = 0 a start at the very end
    of a document stays in it. The last row may be short of a full sample and then points at the end of the stream.

    Returns:
        [num_samples + 1, 2] int32, or int64 for as many documents or for wider lengths.
    """
    wide = lengths.size > np.iinfo(np.int32).max or lengths.dtype.itemsize > 4
    rows = np.empty((num_samples + 1, 2), dtype=np.int64 if wide else np.int32)
    rows[0] = 0
    done, before = 1, 0
    # A stretch of documents at a time, so that sums and searches stay in the processor's cache.
    for first in range(0, lengths.size, _STRETCH):
        sizes = lengths[first : first + _STRETCH]
        ends = np.cumsum(sizes, dtype=np.int64)
        stop = min(num_samples, (before + int(ends[-1]) - extra) // seq_len) + 1
        if stop > done:
            tokens = np.arange(done, stop, dtype=np.int64)
            tokens *= seq_len
            tokens += extra - 1 - before
            at = np.searchsorted(ends, tokens, side="right")
            rows[done:stop, 0] = at + first
            rows[done:stop, 1] = tokens - (ends[at] - sizes[at]) + (1 - extra)
            done = stop
        before += int(ends[-1])
    if done == num_samples:
        last = lengths.size - 1
        while not lengths[last]:
            last -= 1
        rows[done] = last, lengths[last] - extra
    return rows


def _document_order(
    documents: NDArray[np.integer], lengths: NDArray[np.int32], num_epochs: int, apart: bool, generator: np.random.RandomState
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Shuffled document numbers [N * E] and, as a view with gaps, their lengths.

    Number and length ride in one 8-byte word: numpy swaps those fastest, and no gather from random places follows.
    """
    groups = (num_epochs - 1, 1) if apart else (num_epochs,)
    pairs = np.empty((num_epochs, documents.size, 2), dtype=np.int32)
    pairs[..., 0] = documents
    pairs[..., 1] = lengths
    words = pairs.reshape(-1).view(np.int64)
    start = 0
    for count in groups:
        end = start + count * documents.size
        generator.shuffle(words[start:end])
        start = end
    flat = pairs.reshape(-1, 2)
    return np.ascontiguousarray(flat[:, 0]), flat[:, 1]


def _shuffle(bounds: tuple[int, ...], generator: np.random.RandomState) -> NDArray[np.integer]:
    """Permutation of [0, bounds[-1]) that keeps each stretch between bounds to itself."""
    dtype = np.uint32 if bounds[-1] < np.iinfo(np.uint32).max - 1 else np.int64
    result = np.arange(bounds[-1], dtype=dtype)
    start = 0
    for bound in bounds:
        generator.shuffle(result[start:bound])
        start = bound
    return result
