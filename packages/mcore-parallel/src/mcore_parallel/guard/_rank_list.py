# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks as people write them."""

from collections.abc import Iterable


def rank_list(ranks: Iterable[int]) -> str:
    """Sorted ranks with runs joined: ``rank 3``, ``ranks 0-2, 5``.

    Example:
        >>> rank_list([5, 0, 1, 2])
        'ranks 0-2, 5'
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text or 'none'}"
