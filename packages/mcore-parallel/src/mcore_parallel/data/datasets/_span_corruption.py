# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Samples whose spans are replaced by sentinels in the encoder's text, and written out behind them in the decoder's (T5)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._blend import SampleSource
from mcore_parallel.data.datasets._masked import NGRAM_CHOICES, hide_words, ngram_shares


@dataclass(frozen=True, kw_only=True)
class SpanCorruptionConfig:
    """Which spans are replaced, and by what (Raffel et al., 2019).

    Raises:
        DataError: no sentinels, a repeated or negative id, a number outside its range.
    """

    sentinels: tuple[int, ...]
    """Ids that stand for the first span, the second one ...; text does not use them."""
    bos_token: int
    """Id that the decoder's input begins with."""
    eos_token: int
    """Id that its labels end with."""
    pad_token: int = 0
    """Id behind both."""
    decoder_length: int
    """Tokens of the decoder."""
    probability: float = 0.15
    """Share of the tokens that are replaced."""
    max_ngram: int = 10
    """Most neighbouring words of a span; spans that touch become one."""
    ngram_choice: str = "geometric"
    """As of ``MaskedTokensConfig``."""

    def __post_init__(self) -> None:
        ids = (*self.sentinels, self.bos_token, self.eos_token, self.pad_token)
        if not self.sentinels or len(set(self.sentinels)) < len(self.sentinels) or min(ids) < 0:
            raise DataError(f"sentinels={self.sentinels} must be distinct ids, at least one, and no id negative")
        if self.decoder_length < 3:
            raise DataError(f"decoder_length={self.decoder_length} must be at least 3: bos_token, a sentinel and a token")
        if not 0.0 < self.probability < 1.0:
            raise DataError(f"probability={self.probability} must lie in (0, 1); 0.15 is usual")
        if self.max_ngram < 1 or self.ngram_choice not in NGRAM_CHOICES:
            raise DataError(
                f"max_ngram={self.max_ngram} must be at least 1, and ngram_choice={self.ngram_choice!r} one of {', '.join(NGRAM_CHOICES)}"
            )


# S tokens a sample of the encoder, R of the decoder.
class SpanCorruptionDataset(Dataset[dict[str, Tensor]]):
    """The samples of another dataset for ``T5Model``; which spans are replaced depends on ``seed`` and the number of the sample only.

    A text ``a b c d e`` whose ``b`` and ``d e`` are replaced gives the encoder ``a <0> c <1>``, the decoder ``bos <0> b <1> d e`` and
    the labels ``<0> b <1> d e eos``. Spans for which sentinels or ``decoder_length`` do not suffice stay in the text.

    Args:
        dataset: whose ``tokens`` [S] are read; zeros at the end of its ``loss_mask`` are padding.
        config: spans and special ids.
        vocab_size: ids of text lie in [0, vocab_size).
        seed: of the choices.
        special_tokens: ids that are never replaced.
        word_starts: [vocab_size] bool, which ids begin a word, see `word_starts`; None takes each token for one.

    Raises:
        DataError: ``word_starts`` of another size.
    """

    def __init__(
        self,
        dataset: SampleSource,
        config: SpanCorruptionConfig,
        *,
        vocab_size: int,
        seed: int,
        special_tokens: Sequence[int] = (),
        word_starts: Tensor | None = None,
    ) -> None:
        if word_starts is not None and word_starts.shape != (vocab_size,):
            raise DataError(f"word_starts of shape {tuple(word_starts.shape)} must have one entry for each of vocab_size={vocab_size}")
        self.dataset, self.config, self.seed = dataset, config, seed
        self._starts = word_starts.numpy() if word_starts is not None else np.ones(vocab_size, dtype=np.bool_)
        self._shares = ngram_shares(config.ngram_choice, config.max_ngram)
        self._special = np.array([*special_tokens], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        """One sample.

        Returns:
            ``tokens`` and ``labels`` [R] int64 of the decoder, ``loss_mask`` [R] float32; ``encoder_tokens`` [S] int64; masks, True at
            padding: ``encoder_mask`` [1, 1, S], which the decoder's attention to the encoder has too, and ``attention_mask`` [1, 1, R].
        """
        config, sample = self.config, self.dataset[idx]
        tokens, counted = sample["tokens"].numpy(), np.flatnonzero(sample["loss_mask"].numpy() > 0)
        text = tokens[: counted[-1] + 1] if counted.size else tokens[:0]
        encoder, decoder = self._corrupt(text, idx)
        R = config.decoder_length
        named = {
            "tokens": _padded([config.bos_token, *decoder], R, config.pad_token),
            "labels": _padded([*decoder, config.eos_token], R, config.pad_token),
            "encoder_tokens": _padded(encoder, tokens.size, config.pad_token),
        }
        used = len(decoder) + 1
        return {
            **named,
            "loss_mask": (torch.arange(R) < (used if counted.size else 0)).float(),
            "encoder_mask": torch.arange(tokens.size)[None, None] >= max(1, len(encoder)),
            "attention_mask": torch.arange(R)[None, None] >= used,
        }

    def _corrupt(self, text: NDArray[np.int64], idx: int) -> tuple[list[int], list[int]]:
        """Text of the encoder, and of the decoder without its first and last special token."""
        config = self.config
        allowed = ~np.isin(text, self._special)
        begins = self._starts[np.where(allowed, text, 0)]
        hidden = hide_words(begins, allowed, config.probability, self._shares, np.random.default_rng((self.seed, idx)))
        edges = np.flatnonzero(np.diff(np.concatenate([[False], hidden, [False]]).astype(np.int8)))
        encoder: list[int] = []
        decoder: list[int] = []
        last = 0
        for (begin, end), sentinel in zip(edges.reshape(-1, 2).tolist(), config.sentinels, strict=False):
            end = min(end, begin + config.decoder_length - len(decoder) - 2)
            if end <= begin:
                break
            encoder += [*text[last:begin].tolist(), sentinel]
            decoder += [sentinel, *text[begin:end].tolist()]
            last = end
        return [*encoder, *text[last:].tolist()], decoder


def _padded(ids: list[int], length: int, pad: int) -> Tensor:
    return torch.tensor(ids + [pad] * (length - len(ids)), dtype=torch.int64)
