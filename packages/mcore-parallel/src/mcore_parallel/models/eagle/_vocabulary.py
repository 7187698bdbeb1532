# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The part of a vocabulary that a draft head can propose."""

import torch
from torch import Tensor


# V tokens of the target, v tokens of the head.
class DraftVocabulary:
    """The v tokens of a head, in rising order of their ids in the target.

    Args:
        token_ids: [v] integers, which tokens; no two equal.
        vocab_size: V.

    Raises:
        ValueError: ids out of range or twice.

    Example:
        >>> vocabulary = DraftVocabulary.from_counts(torch.tensor([5, 0, 3, 9]), 2)
        >>> vocabulary.token_ids.tolist(), vocabulary.d2t.tolist(), vocabulary.t2d.tolist()
        ([0, 3], [0, 2], [True, False, False, True])
    """

    def __init__(self, token_ids: Tensor, vocab_size: int) -> None:
        ids = token_ids.detach().to("cpu", torch.int64).sort().values
        if ids.dim() != 1 or not len(ids) or int(ids[0]) < 0 or int(ids[-1]) >= vocab_size or bool((ids.diff() == 0).any()):
            raise ValueError(f"token_ids of shape {tuple(ids.shape)} must be different ids in [0, vocab_size={vocab_size})")
        self.token_ids, self.vocab_size = ids, vocab_size

    @classmethod
    def from_counts(cls, counts: Tensor, size: int) -> "DraftVocabulary":
        """The most frequent tokens; of equally frequent ones those with the lower ids.

        Args:
            counts: [V] how often each token occurs (``torch.bincount`` of the text, ``minlength=V``).
            size: v.

        Raises:
            ValueError: v outside 1 to V.
        """
        if counts.dim() != 1 or not 1 <= size <= len(counts):
            raise ValueError(f"draft_vocab_size={size} must lie between 1 and the {len(counts)} tokens that were counted")
        return cls(counts.cpu().argsort(descending=True, stable=True)[:size], len(counts))

    def __len__(self) -> int:
        """v."""
        return len(self.token_ids)

    @property
    def d2t(self) -> Tensor:
        """[v] int64: what is added to a token's number in the head to give its id in the target."""
        return self.token_ids - torch.arange(len(self))

    @property
    def t2d(self) -> Tensor:
        """[V] bool: whether the head has the token."""
        return torch.zeros(self.vocab_size, dtype=torch.bool).index_fill_(0, self.token_ids, True)
