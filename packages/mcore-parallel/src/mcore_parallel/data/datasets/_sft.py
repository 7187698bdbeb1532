# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Samples for supervised fine-tuning: whole conversations packed into a fixed length."""

import bisect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.corpus import HAS_LOSS, IndexedDataset
from mcore_parallel.data.datasets._array_cache import Arrays, fingerprint
from mcore_parallel.data.datasets._blend import BlendedMegatronDatasetConfig
from mcore_parallel.data.datasets._corpus_dataset import CorpusDataset


def pack_best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of numbers into ``lengths`` whose lengths sum to ``capacity`` at most: best fit, longest first (Johnson, 1973).

    At most 11/9 of the fewest groups possible, and one. Lengths must lie in [1, capacity]; equal ones keep their order.

    Example:
        >>> pack_best_fit([3, 5, 2, 4], 7)
        [[1, 2], [3, 0]]
    """
    groups: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # those that some group has, rising
    for number in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable").tolist():
        length = lengths[number]
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            group, room = len(groups), capacity
            groups.append([])
        else:
            room = rooms[at]
            group = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        groups[group].append(number)
        if left := room - length:
            if left not in with_room:
                with_room[left] = []
                bisect.insort(rooms, left)
            with_room[left].append(group)
    return groups


def build_packs(
    lengths: NDArray[np.integer], num_samples: int | None, capacity: int, seed: int
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Documents in reading order and where the samples begin among them, for as many epochs as it takes.

    Each epoch packs anew: which of equal lengths meet, and the order of samples, come from one legacy generator of numpy.

    Args:
        lengths: [N] tokens that each document takes, in [1, capacity].
        num_samples: least samples; None is one epoch.
        capacity: tokens of a sample.
        seed: of the orders.

    Returns:
        (document numbers [N * epochs], bounds [samples + 1]).
    """
    generator = np.random.RandomState(seed)
    order: list[int] = []
    bounds = [0]
    while len(bounds) == 1 or (num_samples is not None and len(bounds) <= num_samples):
        documents = generator.permutation(lengths.size)
        groups = pack_best_fit(lengths[documents].tolist(), capacity)
        for group in generator.permutation(len(groups)).tolist():
            order += documents[groups[group]].tolist()
            bounds.append(len(order))
    return np.array(order, dtype=np.int32), np.array(bounds, dtype=np.int64)


# S tokens a sample, N conversations in it


@dataclass(frozen=True, kw_only=True)
class SFTDatasetConfig(BlendedMegatronDatasetConfig):
    """How conversations become samples.

    Raises:
        DataError: fields contradict each other or leave their range.
    """

    sequence_multiple: int = 1
    """Each conversation is padded to a multiple of it; context parallelism needs 2 cp."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sequence_multiple < 1 or self.sequence_length % self.sequence_multiple:
            raise DataError(f"sequence_multiple={self.sequence_multiple} must divide sequence_length={self.sequence_length}")


class SFTDataset(CorpusDataset[SFTDatasetConfig]):
    """Conversations packed so that none is cut and little room is left; attention and positions stay within each.

    Every epoch holds each conversation once. One that is longer than S is cut at S, of which a warning tells once.

    Args:
        indexed_dataset: what `preprocess_conversations` wrote, opened with its modes.
        dataset_path: its path prefix; None keeps the packing in memory unless ``path_to_cache`` is set.
        indexed_indices: numbers of the documents of this split.
        num_samples: samples wanted; None is one epoch. The dataset may hold more, to the end of its last epoch.
        index_split: which split this is.
        config: see `SFTDatasetConfig`.

    Raises:
        DataError: the corpus has no modes, or the split no conversation.
    """

    document_index: NDArray[Any]
    """Documents in the order in which they are packed."""
    sample_index: NDArray[Any]
    """[samples + 1], where each begins in ``document_index``."""

    def _plan(self, documents: NDArray[np.integer], num_samples: int | None) -> tuple[Callable[[], Arrays], Mapping[str, Any]]:
        config, corpus = self.config, self.dataset
        if corpus.sequence_modes is None:
            raise DataError(f"{corpus.path_prefix} is open without modes; pass multimodal=True")
        bounds, lengths = corpus.document_indices, corpus.sequence_lengths
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        sizes = ends[bounds[documents + 1]] - ends[bounds[documents]]
        usable = documents[sizes > 1]
        if not usable.size:
            raise DataError(f"none of the {documents.size} documents of this split has two tokens; add conversations")
        overlong = int((sizes > config.sequence_length).sum())
        if overlong:
            warnings.warn(
                f"{overlong} of {sizes.size} conversations exceed sequence_length={config.sequence_length}; cut there", stacklevel=3
            )

        def build() -> dict[str, NDArray[Any]]:
            rooms = _rounded(np.minimum(sizes[sizes > 1], config.sequence_length), config.sequence_multiple)
            order, starts = build_packs(rooms, num_samples, config.sequence_length, config.random_seed)
            return {"document_index": usable[order].astype(np.int32), "sample_index": starts}

        facts = {"sequence_multiple": config.sequence_multiple, "sizes": fingerprint(sizes), "documents": fingerprint(documents)}
        return build, facts

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> IndexedDataset:
        """Open the corpus that samples are packed from."""
        return IndexedDataset(dataset_path, multimodal=True, mmap=config.mmap_bin_files)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Documents, which splits are counted in."""
        return low_level_dataset.document_indices.size - 1

    def __len__(self) -> int:
        return self.sample_index.size - 1

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """One sample; None gives one of the right shapes that carries no loss.

        Returns:
            ``tokens`` and ``labels`` [S] int64, ``loss_mask`` [S] float32, 1 where the label is to be learnt,
            ``position_ids`` [S] int64 from 0 in each conversation, and ``cu_seqlens`` int32 of 0, the ends of the
            conversations and S. Padding is 0 and has no loss.
        """
        row = self._number(idx)
        S = self.config.sequence_length
        tokens, labels = np.zeros(S, np.int64), np.zeros(S, np.int64)
        loss_mask, positions = np.zeros(S, np.float32), np.zeros(S, np.int64)
        begin, bounds = 0, [0]
        for document in self.document_index[self.sample_index[row] : self.sample_index[row + 1]].tolist():
            ids, has_loss = self._conversation(document)
            end = begin + ids.size
            tokens[begin:end] = ids
            labels[begin : end - 1] = ids[1:]
            loss_mask[begin : end - 1] = has_loss[1:]
            begin += int(_rounded(ids.size, self.config.sequence_multiple))
            bounds.append(begin)
        if begin < S:
            bounds.append(S)
        for first, last in itertools.pairwise(bounds):
            positions[first:last] = np.arange(last - first)
        if idx is None:
            loss_mask[:] = 0.0
        arrays = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": positions}
        sample = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return {**sample, "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}

    def _conversation(self, document: int) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Ids [n] and which of them have a loss [n]; n is at most S."""
        first, last = self.dataset.document_indices[document : document + 2].tolist()
        parts = self.dataset[first:last]
        ids = np.concatenate([part for part, _ in parts])[: self.config.sequence_length]
        has_loss = np.concatenate([np.full(part.size, mode == HAS_LOSS) for part, mode in parts])
        return ids, has_loss[: ids.size]


def _rounded(size: Any, multiple: int) -> Any:
    """``size`` up to the next multiple."""
    return -(-size // multiple) * multiple
