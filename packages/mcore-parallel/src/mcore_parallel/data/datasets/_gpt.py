# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Documents cut into fixed-length samples for next-token prediction."""

# S tokens a sample, e = 1 when samples carry one token more for the labels

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._array_cache import Arrays, as_run, fingerprint
from mcore_parallel.data.datasets._blend_config import BlendedMegatronDatasetConfig, Split
from mcore_parallel.data.datasets._corpus_dataset import CorpusDataset
from mcore_parallel.data.datasets._gpt_indices import build_gpt_indices, plan_epochs
from mcore_parallel.data.datasets._pad import pad_id


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
