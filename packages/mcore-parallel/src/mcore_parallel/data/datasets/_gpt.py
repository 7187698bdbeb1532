# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Documents cut into fixed-length samples for next-token prediction, by three indices in vectorised numpy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._array_cache import Arrays, as_run, fingerprint
from mcore_parallel.data.datasets._blend import BlendedMegatronDatasetConfig, Split
from mcore_parallel.data.datasets._corpus_dataset import CorpusDataset, pad_id

# N documents of the split, E epochs, S tokens a sample, e = 1 when samples carry one token more for the labels


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


# S tokens a sample, e = 1 when samples carry one token more for the labels


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """How samples are cut and masked.

    Raises:
        DataError: fields contradict each other or leave their range.
    """

    reset_position_ids: bool = False
    """Count positions from 0 again after each eod."""
    reset_attention_mask: bool = False
    """Hide earlier documents in the attention mask; goes with ``create_attention_mask``."""
    eod_mask_loss: bool = False
    """Give no loss to what is predicted from an eod token."""
    inter_document_masking: bool = False
    """Add ``cu_seqlens``, bounds of the documents in the sample: attention and positions stay within each, without a mask of S x S."""
    create_attention_mask: bool = False
    """Add ``attention_mask`` [1, S, S]; off by default because the attention cores build causal masks themselves."""
    drop_last_partial_validation_sequence: bool = True
    """Drop the last short sample of valid and test; otherwise it is padded. Train always drops it."""
    add_extra_token_to_sequence: bool = True
    """Read S + 1 tokens so that each of the S has its label; otherwise the last label is padding."""
    allow_ambiguous_pad_tokens: bool = False
    """Use the tokenizer's pad id even when it is also another special token, whose positions then lose their loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_eod = [
            name
            for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "inter_document_masking")
            if getattr(self, name)
        ]
        if needs_eod and getattr(self.tokenizer, "eod", None) is None:
            raise DataError(f"{needs_eod[0]}=True needs a tokenizer with an eod id; set tokenizer")
        if self.reset_attention_mask and not self.create_attention_mask:
            raise DataError("reset_attention_mask=True has no effect without the mask; set create_attention_mask=True")


class GPTDataset(CorpusDataset[GPTDatasetConfig]):
    """Samples of one split of one corpus, in a fixed shuffled order, repeated for as many epochs as asked.

    Each epoch uses every token once, but for the e-token overlaps and a tail shorter than a sample. Indices are kept
    under ``path_to_cache`` (or beside the corpus) and found again by a hash of everything they follow from; processes
    need no barrier among themselves.

    Args:
        indexed_dataset: the corpus.
        dataset_path: its path prefix; None keeps the indices in memory unless ``path_to_cache`` is set.
        indexed_indices: sequence numbers that belong to this split.
        num_samples: samples wanted; None is one epoch. The dataset may hold a few more.
        index_split: which split this is.
        config: see `GPTDatasetConfig`.

    Raises:
        DataError: the split has too few tokens for one sample.
    """

    document_index: NDArray[Any]
    """Sequence numbers in the order of reading, epoch by epoch."""
    sample_index: NDArray[Any]
    """[samples + 1, 2], where each begins: place in ``document_index``, token in that sequence."""
    shuffle_index: NDArray[Any]
    """[samples], the order of the samples."""
    _cache_name: ClassVar[str | None] = "GPTDataset"

    def _plan(self, documents: NDArray[np.integer], num_samples: int | None) -> tuple[Callable[[], Arrays], Mapping[str, Any]]:
        config = self.config
        self._extra = int(config.add_extra_token_to_sequence)
        self._pad_id = self._padding()
        drop_last = self.index_split is Split.train or config.drop_last_partial_validation_sequence
        chosen = as_run(documents)

        def build() -> dict[str, NDArray[Any]]:
            lengths = self.dataset.sequence_lengths[chosen]
            plan = plan_epochs(
                tokens_per_epoch=int(lengths.sum(dtype=np.int64)),
                num_samples=num_samples,
                seq_len=config.sequence_length,
                extra=self._extra,
                drop_last=drop_last,
            )
            indices = build_gpt_indices(
                documents, lengths, plan, seq_len=config.sequence_length, extra=self._extra, seed=config.random_seed
            )
            return {"document_index": indices.documents, "sample_index": indices.samples, "shuffle_index": indices.shuffle}

        return build, self._facts(chosen)

    def __len__(self) -> int:
        return self.shuffle_index.shape[0]

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """One sample; None gives a sample of the right shapes that carries no loss.

        Returns:
            ``tokens`` and ``labels`` [S] int64, ``loss_mask`` [S] float32 of 0 and 1, ``position_ids`` [S] int64 and, if
            configured, ``attention_mask`` [1, S, S] bool, True where attention is forbidden, and ``cu_seqlens`` int32 of 0, the
            ends of documents and S. All are fresh tensors.
        """
        text = self._text(self._number(idx))
        S = self.config.sequence_length
        if not self._extra:
            text = np.append(text, self._pad_id)
        tokens, labels = text[:S].copy(), text[1:]
        loss_mask = np.full(S, 0.0 if idx is None else 1.0, dtype=np.float32)
        is_pad = text == self._pad_id
        any_pad = bool(is_pad.any())
        if any_pad:
            loss_mask[is_pad[1:]] = 0.0
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": np.arange(S)}
        sample = {name: torch.from_numpy(array) for name, array in arrays.items()}
        config = self.config
        if config.reset_position_ids or config.eod_mask_loss or config.inter_document_masking or config.create_attention_mask:
            self._mask_documents(sample)
        if any_pad:
            tokens[is_pad[:S]] = 0
            labels[is_pad[1:]] = 0
        return sample

    def _mask_documents(self, sample: dict[str, Tensor]) -> None:
        config, tokens = self.config, sample["tokens"]
        eod = getattr(config.tokenizer, "eod", None)
        is_eod = tokens == eod if eod is not None else torch.zeros_like(tokens, dtype=torch.bool)
        if config.eod_mask_loss:
            sample["loss_mask"][is_eod] = 0.0
        # document number of each token; an eod belongs to the document it ends
        document = is_eod.cumsum(0) - is_eod.long()
        first = torch.cat([torch.ones(1, dtype=torch.bool), is_eod[:-1]])
        starts = torch.arange(tokens.numel())[first]
        if config.reset_position_ids or config.inter_document_masking:
            sample["position_ids"] = sample["position_ids"] - starts[document]
        if config.inter_document_masking:
            sample["cu_seqlens"] = torch.cat([starts, torch.tensor([tokens.numel()])]).int()
        if config.create_attention_mask:
            mask = torch.ones(tokens.numel(), tokens.numel(), dtype=torch.bool).triu(1)
            if config.reset_attention_mask:
                mask |= document[:, None] != document[None, :]
            sample["attention_mask"] = mask[None]

    def _padding(self) -> int:
        """Id that marks padding inside of a sample."""
        return pad_id(self.config.tokenizer, allow_ambiguous=self.config.allow_ambiguous_pad_tokens)

    def _text(self, idx: int) -> NDArray[np.int64]:
        """[S + e] tokens of a sample, padded at the end."""
        row = int(self.shuffle_index[idx])
        (first, begin), (last, end) = self.sample_index[row : row + 2].tolist()
        text = np.empty(self.config.sequence_length + self._extra, dtype=np.int64)
        filled = self.dataset.gather(self.document_index[first : last + 1], begin, end + self._extra, text)
        text[filled:] = self._pad_id
        return text

    def _facts(self, documents: NDArray[np.integer] | slice) -> dict[str, Any]:
        """What the indices follow from beside the seed and the sizes, and what tells one use of them from another."""
        config, lengths = self.config, self.dataset.sequence_lengths
        return {
            "split": config.split,
            "split_matrix": config.split_matrix,
            "tokenizer": getattr(config.tokenizer, "unique_identifiers", None),
            "add_extra_token_to_sequence": config.add_extra_token_to_sequence,
            "drop_last_partial_validation_sequence": config.drop_last_partial_validation_sequence,
            # A corpus rewritten under the same name must not meet old indices.
            "corpus": fingerprint(lengths),
            "documents": fingerprint(documents),
        }
