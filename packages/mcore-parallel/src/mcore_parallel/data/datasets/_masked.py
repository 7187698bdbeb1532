# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Samples of which some tokens are hidden, to be predicted from those on both sides."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._blend import SampleSource
from mcore_parallel.data.datasets._word_masking import NGRAM_CHOICES, hide_words, ngram_shares


@dataclass(frozen=True, kw_only=True)
class MaskedTokensConfig:
    """How tokens are hidden (Devlin et al., 2018).

    Raises:
        DataError: a share outside its range, a negative id.
    """

    mask_token: int
    """Id that stands in the place of a hidden token; text does not use it."""
    probability: float = 0.15
    """Of a token to be hidden."""
    random_share: float = 0.1
    """Of the hidden tokens, how many another token takes the place of."""
    kept_share: float = 0.1
    """How many are predicted though they stay."""
    max_ngram: int = 1
    """Most neighbouring words that are hidden together."""
    ngram_choice: str = "inverse"
    """Chance of n words, up to ``max_ngram``: "inverse" 1 / n, "longer" the other way round, "geometric" 0.2 * 0.8^(n-1)."""

    def __post_init__(self) -> None:
        if self.mask_token < 0:
            raise DataError(f"mask_token={self.mask_token} must not be negative; give the id of the mask token")
        if not 0.0 < self.probability <= 1.0:
            raise DataError(f"probability={self.probability} must lie in (0, 1]; 0.15 is usual")
        random, same = self.random_share, self.kept_share
        if min(random, same) < 0.0 or random + same > 1.0:
            raise DataError(f"random_share={random} and kept_share={same} must be at least 0 and at most 1 together; 0.1 each is usual")
        if self.max_ngram < 1 or self.ngram_choice not in NGRAM_CHOICES:
            raise DataError(
                f"max_ngram={self.max_ngram} must be at least 1, and ngram_choice={self.ngram_choice!r} one of {', '.join(NGRAM_CHOICES)}"
            )


# S tokens a sample.
class MaskedTokensDataset(Dataset[dict[str, Tensor]]):
    """The samples of another dataset with hidden tokens; which ones depends on ``seed`` and the number of the sample only.

    A sample holds ``tokens`` [S] with what stands in the places of hidden ones, ``labels`` [S] as they were and ``loss_mask`` [S], 1 at
    the hidden ones (at least one, where any may be) and 0 where the other dataset's is; the rest of it is the other dataset's. Each
    token is hidden by chance, or, with ``word_starts`` or ``max_ngram`` above 1, whole words are, until the share is reached.

    Args:
        dataset: whose ``tokens`` are read, and ``loss_mask``, where 0 is padding.
        config: shares.
        vocab_size: ids of text lie in [0, vocab_size); others that take a place are drawn from these.
        seed: of the choices.
        special_tokens: ids that are never hidden.
        word_starts: [vocab_size] bool, which ids begin a word, see `word_starts`; None takes each token for one.

    Raises:
        DataError: an empty vocabulary, or ``word_starts`` of another size.
    """

    def __init__(
        self,
        dataset: SampleSource,
        config: MaskedTokensConfig,
        *,
        vocab_size: int,
        seed: int,
        special_tokens: Sequence[int] = (),
        word_starts: Tensor | None = None,
    ) -> None:
        if vocab_size < 1:
            raise DataError(f"vocab_size={vocab_size} must be at least 1")
        if word_starts is not None and word_starts.shape != (vocab_size,):
            raise DataError(f"word_starts of shape {tuple(word_starts.shape)} must have one entry for each of vocab_size={vocab_size}")
        by_word = word_starts is not None or config.max_ngram > 1
        self._starts = word_starts.numpy() if word_starts is not None else np.ones(vocab_size, dtype=np.bool_)
        self._shares = ngram_shares(config.ngram_choice, config.max_ngram) if by_word else None
        self.dataset, self.config, self.vocab_size, self.seed = dataset, config, vocab_size, seed
        self._special = torch.tensor([*special_tokens], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        config, sample = self.config, self.dataset[idx]
        labels = sample["tokens"]
        source = torch.Generator().manual_seed(int(np.random.SeedSequence((self.seed, idx)).generate_state(1, np.uint64)[0] >> 1))
        allowed = (sample["loss_mask"] > 0) & ~torch.isin(labels, self._special)
        if self._shares is not None:
            hidden = self._words(labels.numpy(), allowed.numpy(), idx)
        else:
            draws = torch.rand(labels.shape, generator=source).masked_fill(~allowed, 2.0)
            # The lowest draw is hidden in any case, so that no sample goes without.
            hidden = (draws < config.probability) | ((draws == draws.min()) & allowed)
        fate = torch.rand(labels.shape, generator=source)
        others = torch.randint(self.vocab_size, labels.shape, generator=source)
        shown = torch.where(fate < config.random_share + config.kept_share, labels, config.mask_token)
        shown = torch.where(fate < config.random_share, others, shown)
        chosen = {"tokens": torch.where(hidden, shown, labels), "labels": labels, "loss_mask": hidden.to(sample["loss_mask"].dtype)}
        return {**sample, **chosen}

    def _words(self, ids: NDArray[np.int64], allowed: NDArray[np.bool_], idx: int) -> Tensor:
        assert self._shares is not None
        source = np.random.default_rng((self.seed, idx))
        begins = self._starts[np.where(allowed, ids, 0)]
        return torch.from_numpy(hide_words(begins, allowed, self.config.probability, self._shares, source))
