# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Samples of which some tokens are hidden, whole words together, to be predicted from those on both sides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._blend import SampleSource

# S tokens of a sample, W words in it, V ids


NGRAM_CHOICES = ("inverse", "longer", "geometric")
_BLANKS = (" ", "\u0120", "\u2581")
_BREAKS = ("\u0109", "\u010a", "\u010d")
"""Tab, line feed and carriage return of byte-level BPE."""
_GEOMETRIC = 0.2
"""Of SpanBERT (Joshi et al., 2019)."""


def word_starts(vocab: Mapping[str, int], vocab_size: int) -> Tensor:
    """Which ids begin a word, [V] bool, from how a vocabulary marks it.

    Either pieces that go on with a word begin with ``##`` (WordPiece), or those that begin one do with a blank: as itself, as
    U+0120 (byte-level BPE) or as U+2581 (SentencePiece). There, line ends, tabs and ASCII punctuation begin one too.

    Args:
        vocab: token to id, as ``HuggingFaceTokenizer.vocab``.
        vocab_size: V; ids without a token begin a word.

    Raises:
        DataError: no token carries any of the marks.
    """
    inside = [number for token, number in vocab.items() if token.startswith("##") and len(token) > 2]
    begins = torch.ones(vocab_size, dtype=torch.bool)
    if not inside:
        if not any(token.startswith(_BLANKS) for token in vocab):
            raise DataError("no token marks where words begin (## or a blank); leave word_starts out")
        plain = [(token, number) for token, number in vocab.items() if token and not token.startswith((*_BLANKS, *_BREAKS))]
        inside = [number for token, number in plain if token[0].isalnum() or not token[0].isascii()]
    begins[[number for number in inside if number < vocab_size]] = False
    return begins


def ngram_shares(choice: str, max_ngram: int) -> NDArray[np.float64]:
    """Chance of each number of words from 1: 1 / n ("inverse"), the other way round ("longer"), or 0.2 * 0.8^(n-1), all normalised."""
    sizes = np.arange(1, max_ngram + 1)
    weights = _GEOMETRIC * (1 - _GEOMETRIC) ** (sizes - 1) if choice == "geometric" else 1.0 / sizes
    weights = weights[::-1] if choice == "longer" else weights
    return weights / weights.sum()


def hide_words(
    begins_S: NDArray[np.bool_], allowed_S: NDArray[np.bool_], probability: float, shares: NDArray[np.float64], source: np.random.Generator
) -> NDArray[np.bool_]:
    """Hide runs of whole words until ``probability`` of the tokens that may be hidden are.

    Runs begin at random words, have random lengths, cross no token that may not be hidden, and never exceed the
    budget, but for one word where that alone does: a sample never goes without.

    Args:
        begins_S: whether a word begins with the token.
        allowed_S: whether the token may be hidden.
        probability: share to hide.
        shares: chance of each number of words in a run, from 1.
        source: of the choices.

    Returns:
        [S] which tokens are hidden.
    """
    hidden_S = np.zeros(allowed_S.size, dtype=np.bool_)
    after_gap = np.concatenate([[True], ~allowed_S[:-1]])
    first_W = np.flatnonzero(allowed_S & (begins_S | after_gap))
    if not first_W.size:
        return hidden_S
    # What follows the last token of a word is a word or a token that may not be hidden.
    stops = np.flatnonzero(np.concatenate([~allowed_S | begins_S, [True]]))
    end_W = stops[np.searchsorted(stops, first_W, side="right")]
    stretch_W = np.cumsum(after_gap[first_W])
    budget = max(1, round(probability * int(allowed_S.sum())))
    sizes = source.choice(shares.size, first_W.size, p=shares) + 1
    used_W = np.zeros(first_W.size, dtype=np.bool_)
    total = 0
    order = source.permutation(first_W.size).tolist()
    for word in order:
        for size in range(int(sizes[word]), 0, -1):
            last = word + size - 1
            if last >= first_W.size or stretch_W[last] != stretch_W[word] or used_W[word : last + 1].any():
                continue
            cost = int(end_W[last] - first_W[word])
            if total + cost <= budget:
                used_W[word : last + 1] = True
                hidden_S[first_W[word] : end_W[last]] = True
                total += cost
                break
        if total >= budget:
            break
    if not total:
        hidden_S[first_W[order[0]] : end_W[order[0]]] = True
    return hidden_S


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
