# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Packed sequences that go on behind another one: which, and the scores that they need beside their own."""

import itertools
from collections.abc import Iterator, Sequence

from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.context_parallel._tiles import Tile, Window, plan_tiles
from mcore_parallel.context_parallel._zigzag import Segment, SequenceSplitError, segments


@internal_api
def sequence_prefixes(prefixes: Tensor, num_sequences: int) -> tuple[int, ...]:
    """For each packed sequence the number of the one in front of it, -1 for none.

    Args:
        prefixes: [N] integers on the host.
        num_sequences: N.

    Raises:
        SequenceSplitError: another number of entries, a prefix that is not an earlier sequence, or that has a prefix itself.
    """
    numbers = prefixes.tolist()
    if prefixes.dim() != 1 or len(numbers) != num_sequences:
        raise SequenceSplitError(f"prefixes of shape {tuple(prefixes.shape)} must have an entry for each of the {num_sequences} sequences")
    for number, prefix in enumerate(numbers):
        if not -1 <= prefix < number or (prefix >= 0 and numbers[prefix] >= 0):
            raise SequenceSplitError(
                f"prefixes={numbers}: sequence {number} must name an earlier sequence that has no prefix, or -1, found {prefix}"
            )
    return tuple(numbers)


@internal_api
def plan_prefixed(lengths: Sequence[int], prefixes: Sequence[int], window: Window) -> list[Tile]:
    """The tiles of packed sequences of which some see another one in front of their own tokens.

    Without a limit on the left, neighbours behind one prefix are one block of queries against its keys; with one, each of them is a
    block of a tile of its own, because no tile reads a key twice.

    Args:
        lengths: of the sequences.
        prefixes: as of ``sequence_prefixes``.
        window: as of ``plan_tiles``; a sequence that has a prefix stands behind it.
    """
    own = [part for [part] in segments(lengths, 1, 0)]
    tiles = plan_tiles([[part] for part in own], [[part] for part in own], window)
    behind: dict[int, list[Segment]] = {}
    for prefix, queries in _behind(own, prefixes, joined=window[0] < 0):
        behind.setdefault(prefix, []).append(queries)
    for turn in itertools.zip_longest(*behind.values()):
        pairs = [(queries, own[prefix]) for prefix, queries in zip(behind, turn, strict=True) if queries is not None]
        tiles += plan_tiles([[queries] for queries, _ in pairs], [[keys] for _, keys in pairs], window)
    return tiles


def _behind(own: Sequence[Segment], prefixes: Sequence[int], *, joined: bool) -> Iterator[tuple[int, Segment]]:
    """Queries that stand behind a prefix, with its number: sequence by sequence, or all neighbours at once."""
    for (prefix, _), run in itertools.groupby(enumerate(own), lambda item: (prefixes[item[0]], None if joined else item[0])):
        if prefix >= 0:
            parts = [part for _, part in run]
            yield prefix, Segment(own[prefix].length, parts[0].row, sum(part.length for part in parts))
