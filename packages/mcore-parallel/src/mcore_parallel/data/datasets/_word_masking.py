# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which tokens to hide when neighbouring words go together."""

# S tokens of a sample, W words in it, V ids

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mcore_parallel.data._errors import DataError

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
