# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Samples of two stretches of text, in the order of the document or the other way round."""

# S tokens a sample, N samples

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._array_cache import Arrays, as_run, fingerprint
from mcore_parallel.data.datasets._blend import BlendedMegatronDatasetConfig
from mcore_parallel.data.datasets._corpus_dataset import CorpusDataset

_FRAME = 3
"""Special tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class SentencePairConfig(BlendedMegatronDatasetConfig):
    """What stands around two stretches of text, and where text may be cut.

    Raises:
        DataError: fields contradict each other or leave their range.
    """

    cls_token: int
    """Id before the first stretch."""
    sep_token: int
    """Id behind each."""
    pad_token: int = 0
    """Id behind the last."""
    sentence_ends: tuple[int, ...] = ()
    """Ids after which the first stretch may end, such as that of a full stop; without one in the text it may end anywhere."""
    short_share: float = 0.1
    """Of the samples, how many are cut to a random length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_length < 2 * _FRAME:
            raise DataError(f"sequence_length={self.sequence_length} must be at least {2 * _FRAME}: three tokens, three special ones")
        for name in ("cls_token", "sep_token", "pad_token"):
            if getattr(self, name) < 0:
                raise DataError(f"{name}={getattr(self, name)} must not be negative; give the id of a token")
        if not 0.0 <= self.short_share <= 1.0:
            raise DataError(f"short_share={self.short_share} must lie in [0, 1]; 0.1 is usual")


class SentencePairDataset(CorpusDataset[SentencePairConfig]):
    """``[cls] A [sep] B [sep]`` of neighbouring stretches A, B of one document, swapped in half of the samples.

    A model learns which (sentence order prediction; Lan et al., 2019) beside the tokens that `MaskedTokensDataset` hides in
    these samples. A document longer than a sample gives several, of about equal length. What a sample holds follows from
    ``random_seed`` and its number alone.

    Args:
        indexed_dataset: the corpus.
        dataset_path: its path prefix; None keeps the index in memory unless ``path_to_cache`` is set.
        indexed_indices: sequence numbers that belong to this split.
        num_samples: samples wanted; None is one epoch. The dataset may hold more, to the end of its last epoch.
        index_split: which split this is.
        config: see `SentencePairConfig`.

    Raises:
        DataError: no document has two tokens.
    """

    sample_index: NDArray[Any]
    """[samples, 3]: sequence number, first token, tokens."""

    def _plan(self, documents: NDArray[np.integer], num_samples: int | None) -> tuple[Callable[[], Arrays], Mapping[str, Any]]:
        config, lengths = self.config, self.dataset.sequence_lengths[as_run(documents)]

        def build() -> dict[str, NDArray[Any]]:
            rows = _stretches(documents, lengths, config.sequence_length - _FRAME)
            if not rows.size:
                raise DataError(f"none of the {documents.size} documents of this split has two tokens; add text")
            generator = np.random.RandomState(config.random_seed)
            epochs = 1 if num_samples is None else max(1, -(-num_samples // len(rows)))
            return {"sample_index": np.concatenate([rows[generator.permutation(len(rows))] for _ in range(epochs)])}

        return build, {"lengths": fingerprint(lengths), "documents": fingerprint(documents)}

    def __len__(self) -> int:
        return self.sample_index.shape[0]

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        """One sample.

        Returns:
            ``tokens`` and ``labels`` [S] int64, the same; ``loss_mask`` [S] float32, 1 at text; ``token_types`` [S] int64, 1 at the
            second stretch and the ``sep_token`` behind it; ``attention_mask`` [1, 1, S] bool, True at padding; ``is_random`` int64
            scalar, 1 where the stretches are swapped.
        """
        number = self._number(idx)
        config, S = self.config, self.config.sequence_length
        source = np.random.default_rng((config.random_seed, number))
        document, begin, length = self.sample_index[number].tolist()
        if source.random() < config.short_share:
            length = int(source.integers(2, length + 1))
        text = self.dataset.get(document, begin, length)
        ends = np.flatnonzero(np.isin(text[:-1], config.sentence_ends)) + 1
        cut = int(source.choice(ends)) if ends.size else int(source.integers(1, length))
        parts = [text[:cut], text[cut:]]
        swapped = int(source.random() < 0.5)
        first, second = parts[::-1] if swapped else parts
        tokens = np.full(S, config.pad_token, dtype=np.int64)
        loss_mask, types = np.zeros(S, np.float32), np.zeros(S, np.int64)
        middle, end = first.size + 2, length + _FRAME
        tokens[0], tokens[middle - 1], tokens[end - 1] = config.cls_token, config.sep_token, config.sep_token
        tokens[1 : middle - 1], tokens[middle : end - 1] = first, second
        loss_mask[1 : middle - 1] = loss_mask[middle : end - 1] = 1.0
        types[middle:end] = 1
        arrays = {"tokens": tokens, "labels": tokens.copy(), "loss_mask": loss_mask, "token_types": types}
        padding = torch.arange(S)[None, None] >= end
        named = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {**named, "attention_mask": padding, "is_random": torch.tensor(swapped)}


def _stretches(documents: NDArray[np.integer], lengths: NDArray[np.int32], room: int) -> NDArray[np.integer]:
    """(document, first token, tokens) [N, 3] of stretches of 2 to ``room`` tokens, at least 3; only documents of one token are left out."""
    long_enough = lengths > 1
    numbers, sizes = documents[long_enough], lengths[long_enough].astype(np.int64)
    counts = -(-sizes // room)
    part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes, repeats = np.repeat(sizes, counts), np.repeat(counts, counts)
    begins, ends = part * sizes // repeats, (part + 1) * sizes // repeats
    return np.stack([np.repeat(numbers, counts), begins, ends - begins], axis=1)
