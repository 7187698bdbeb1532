# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Samples in which a middle part is moved to the end, to be filled in from what stands around it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._corpus_dataset import pad_id
from mcore_parallel.data.datasets._gpt import GPTDataset, GPTDatasetConfig

_ROLES = ("prefix", "middle", "suffix")
_OPTIONAL_ROLES = ("pad", "eod")


@dataclass(frozen=True, kw_only=True)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """How often and in which form documents are rearranged (Bavarian et al., 2022).

    Raises:
        DataError: a rate outside of [0, 1], a token that the tokenizer does not write as one id, fields that contradict each other.
    """

    fim_rate: float
    """Share of documents to rearrange."""
    fim_extra_tokens: Mapping[str, str]
    """Token of each role: ``prefix``, ``middle``, ``suffix``, and ``pad`` and ``eod`` where they are not the tokenizer's own."""
    fim_spm_rate: float = 0.5
    """Of the rearranged ones, share that begins with the suffix."""
    fim_split_sample: str | None = None
    """Token that cuts a document into fragments, such as the files of a repository; each is then rearranged by itself."""
    fim_fragment_rate: float | None = None
    """Share of fragments to rearrange, in a document that ``fim_rate`` chose; goes with ``fim_split_sample``."""
    fim_no_prefix: str | None = None
    """Documents that begin with this text stay as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0.0 <= rate <= 1.0:
                raise DataError(f"{name}={rate} must lie in [0, 1]")
        if (self.fim_split_sample is None) != (self.fim_fragment_rate is None):
            raise DataError("fim_split_sample and fim_fragment_rate go together; set both or neither")
        missing = [role for role in _ROLES if role not in self.fim_extra_tokens]
        unknown = sorted(set(self.fim_extra_tokens) - {*_ROLES, *_OPTIONAL_ROLES})
        if missing or unknown:
            raise DataError(
                f"fim_extra_tokens lacks {missing} and has unknown {unknown}; give prefix, middle, suffix, and pad, eod if needed"
            )
        ids = _role_ids(self)
        if len(set(ids.values())) < len(ids):
            raise DataError(f"fim_extra_tokens give {ids}; prefix, middle, suffix, eod and fim_split_sample must differ from each other")


class GPTFIMDataset(GPTDataset):
    """A `GPTDataset` whose documents are, at random, rearranged for filling in the middle.

    A document, as far as it lies in the sample, is cut at two characters into prefix, middle and suffix and becomes
    ``[prefix] prefix [suffix] suffix [middle] middle`` or, suffix first, ``[prefix] [suffix] suffix [middle] prefix middle``.
    The sample is then cut or padded to its length; padding has no loss. The choices follow from ``random_seed`` and the
    number of the sample alone, whatever the workers and the order of reading. A text that spells a role's token out stays as it is.

    Args:
        indexed_dataset: the corpus.
        dataset_path: its path prefix, see `GPTDataset`.
        indexed_indices: sequence numbers that belong to this split.
        num_samples: samples wanted; None is one epoch.
        index_split: which split this is.
        config: see `GPTFIMDatasetConfig`.

    Raises:
        DataError: the split has too few tokens for one sample.
    """

    config: GPTFIMDatasetConfig

    @cached_property
    def _ids(self) -> dict[str, int]:
        return _role_ids(self.config)

    def _padding(self) -> int:
        token = self.config.fim_extra_tokens.get("pad")
        others = {f"fim {role}": number for role, number in self._ids.items()}
        pad = None if token is None else _single_id(self.config, "pad", token)
        return pad_id(self.config.tokenizer, allow_ambiguous=self.config.allow_ambiguous_pad_tokens, pad=pad, others=others)

    def _text(self, idx: int) -> NDArray[np.int64]:
        text = super()._text(idx)
        length = text.size
        while length and text[length - 1] == self._pad_id:
            length -= 1
        generator = np.random.Generator(np.random.Philox(key=np.array([self.config.random_seed, idx], dtype=np.uint64)))
        ids: list[int] = []
        for number, document in enumerate(_cut(text[:length].tolist(), self._ids["eod"])):
            ids += [self._ids["eod"]] if number else []
            ids += self._document(document, generator) if document else []
        result = np.full(text.size, self._pad_id, dtype=np.int64)
        head = ids[: text.size]
        result[: len(head)] = head
        return result

    def _document(self, ids: list[int], generator: np.random.Generator) -> list[int]:
        config, split = self.config, self._ids.get("split")
        if generator.random() >= config.fim_rate:
            return ids
        if split is None or split not in ids:
            return self._rearranged(ids, generator)
        assert config.fim_fragment_rate is not None
        result: list[int] = []
        for number, fragment in enumerate(_cut(ids, split)):
            result += [split] if number else []
            chosen = fragment and generator.random() < config.fim_fragment_rate
            result += self._rearranged(fragment, generator) if chosen else fragment
        return result

    def _rearranged(self, ids: list[int], generator: np.random.Generator) -> list[int]:
        config, tokenizer = self.config, self.config.tokenizer
        text = tokenizer.detokenize(ids)
        if config.fim_no_prefix is not None and text.startswith(config.fim_no_prefix):
            return ids
        first, last = sorted(generator.integers(0, len(text) + 1, size=2).tolist())
        suffix_first = generator.random() < config.fim_spm_rate
        prefix, middle, suffix = (tokenizer.tokenize(part) for part in (text[:first], text[first:last], text[last:]))
        # Text may spell a token out, and tokenizers that parse it would end a document or a part early.
        if not set(self._ids.values()).isdisjoint((*prefix, *middle, *suffix)):
            return ids
        at_prefix, at_middle, at_suffix = (self._ids[role] for role in _ROLES)
        if suffix_first:
            return [at_prefix, at_suffix, *suffix, at_middle, *prefix, *middle]
        return [at_prefix, *prefix, at_suffix, *suffix, at_middle, *middle]


def _cut(ids: list[int], token: int) -> Iterator[list[int]]:
    """Parts between occurrences of ``token``, empty ones too, so that joining them by it gives ``ids`` again."""
    start = 0
    for place, number in enumerate(ids):
        if number == token:
            yield ids[start:place]
            start = place + 1
    yield ids[start:]


def _role_ids(config: GPTFIMDatasetConfig) -> dict[str, int]:
    """Ids of prefix, middle, suffix, eod and, if set, split."""
    ids = {role: _single_id(config, role, config.fim_extra_tokens[role]) for role in _ROLES}
    eod = config.fim_extra_tokens.get("eod")
    number = config.tokenizer.eod if eod is None else _single_id(config, "eod", eod)
    if number is None:
        raise DataError("fim_extra_tokens names no eod and the tokenizer has none; name the token that ends a document")
    ids["eod"] = number
    if config.fim_split_sample is not None:
        ids["split"] = _single_id(config, "fim_split_sample", config.fim_split_sample)
    return ids


def _single_id(config: GPTFIMDatasetConfig, role: str, token: str) -> int:
    if config.tokenizer is None:
        raise DataError("filling in the middle works on text; set tokenizer")
    ids = config.tokenizer.tokenize(token)
    if len(ids) != 1:
        raise DataError(f"{role}={token!r} is {len(ids)} ids to the tokenizer, not one; add it as a special token, or name another")
    return ids[0]
