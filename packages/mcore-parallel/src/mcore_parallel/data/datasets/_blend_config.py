# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files, weights and splits of a blend of corpora."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from mcore_parallel.data._errors import DataError

Blend = tuple[list[str], list[float] | None]


class Split(Enum):
    """Parts of a corpus, in file order."""

    train = 0
    valid = 1
    test = 2


@dataclass(frozen=True, kw_only=True)
class BlendedMegatronDatasetConfig:
    """Corpora, shares and splits; `GPTDatasetConfig` adds how samples are cut.

    Raises:
        DataError: fields contradict each other or leave their range.
    """

    random_seed: int
    """Seed of every order; the same seed gives the same order on any machine."""
    sequence_length: int
    """S, tokens of a sample."""
    blend: Blend | None = None
    """(path prefixes, weights); weights None reads every corpus whole."""
    blend_per_split: list[Blend | None] | None = None
    """A blend for each of train, valid, test; excludes ``blend`` and ``split``."""
    split: str | None = None
    """Shares of train, valid, test as in "99,1,0"; they need not sum to anything. Goes with ``blend``."""
    num_dataset_builder_threads: int = 1
    """Corpora whose indices are built at the same time."""
    path_to_cache: str | None = None
    """Folder of built indices; None puts them beside each corpus and keeps blends in memory."""
    mmap_bin_files: bool = True
    """Map .bin files rather than read them call by call."""
    tokenizer: Any = None
    """Gives eod and pad ids and enters the cache's name; None when neither matters."""
    mid_level_dataset_surplus: float = 0.005
    """Extra share of samples built for each corpus of a blend, so that rounding never runs one dry."""

    def __post_init__(self) -> None:
        _require(self.sequence_length > 0, f"sequence_length={self.sequence_length} must be positive")
        _require(0 <= self.random_seed < 2**32, f"random_seed={self.random_seed} must lie in 0..2**32 - 1")
        _require(self.num_dataset_builder_threads > 0, f"num_dataset_builder_threads={self.num_dataset_builder_threads} must be positive")
        _require(self.mid_level_dataset_surplus >= 0, f"mid_level_dataset_surplus={self.mid_level_dataset_surplus} must not be negative")
        if self.blend_per_split is not None:
            _require(self.blend is None and self.split is None, "blend_per_split excludes blend and split; set one kind")
            _require(len(self.blend_per_split) == len(Split), f"blend_per_split needs train, valid, test; got {len(self.blend_per_split)}")
        elif self.blend is not None:
            _require(self.split is not None, 'blend needs split; set for instance split="99,1,0"')
        for blend in (self.blend, *(self.blend_per_split or ())):
            if blend is not None:
                _check_blend(blend)
        if self.split is not None:
            parse_split(self.split)

    @property
    def split_matrix(self) -> list[tuple[float, float] | None]:
        """Begin and end share of each split, None for an empty one."""
        if self.split is None:
            return [(0.0, 1.0)] * len(Split)
        return parse_split(self.split)


def parse_split(split: str) -> list[tuple[float, float] | None]:
    """Begin and end share of train, valid and test.

    Example:
        >>> parse_split("3,1")
        [(0.0, 0.75), (0.75, 1.0), None]
    """
    remedy = f'split={split!r} must be up to three non-negative numbers, not all 0, such as "99,1,0"'
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError as error:
        raise DataError(remedy) from error
    _require(0 < len(shares) <= len(Split) and min(shares) >= 0 and 0 < sum(shares) < float("inf"), remedy)
    shares += [0.0] * (len(Split) - len(shares))
    total, begin, matrix = sum(shares), 0.0, []
    for number, share in enumerate(shares):
        # The last bookend is exactly 1, so that rounding loses no document.
        end = begin + share / total if any(shares[number + 1 :]) else 1.0
        matrix.append((begin, end) if share > 0 else None)
        begin = end if share > 0 else begin
    return matrix


def parse_blend(words: list[str]) -> Blend:
    """Blend of a command line: prefixes alone, or weight and prefix in turn.

    Example:
        >>> parse_blend(["3", "wiki", "1", "code"])
        (['wiki', 'code'], [3.0, 1.0])
        >>> parse_blend(["wiki", "code"])
        (['wiki', 'code'], None)
    """
    _require(len(words) > 0, "the blend is empty; name at least one path prefix")
    weights = [_number(word) for word in words[0::2]]
    if len(words) % 2 or None in weights:
        return list(words), None
    return list(words[1::2]), [weight for weight in weights if weight is not None]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_blend(blend: Blend) -> None:
    prefixes, weights = blend
    _require(len(prefixes) > 0, "blend names no path prefix; give at least one")
    if weights is not None:
        _require(len(weights) == len(prefixes), f"blend has {len(prefixes)} prefixes and {len(weights)} weights; give one weight a prefix")
        for prefix, weight in zip(prefixes, weights, strict=True):
            _require(0 < weight < float("inf"), f"weight={weight} of {prefix} must be positive; remove the corpus to leave it out")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DataError(message)
