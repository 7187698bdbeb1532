# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where each gradient lies in a flat buffer and which stretch is summed at once."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketRange:
    """A stretch of a flat buffer, holding whole parameters."""

    start: int
    end: int
    members: tuple[int, ...]
    """Indices of its parameters, in buffer order."""


def lay_out_buckets(numels: Sequence[int], bucket_size: int) -> tuple[BucketRange, ...]:
    """Cut consecutive parameters into buckets; one closes as soon as it holds ``bucket_size`` elements.

    A pure function of sizes, so that all ranks agree.

    Example:
        >>> [bucket.members for bucket in lay_out_buckets([3, 3, 10, 1], 6)]
        [(0, 1), (2,), (3,)]
    """
    buckets: list[BucketRange] = []
    start = end = 0
    members: list[int] = []
    for index, numel in enumerate(numels):
        end += numel
        members.append(index)
        if end - start >= bucket_size or index == len(numels) - 1:
            buckets.append(BucketRange(start, end, tuple(members)))
            start, members = end, []
    return tuple(buckets)
