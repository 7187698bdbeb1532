# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights in memory that their sender writes again."""

from collections.abc import Iterator, Sequence

from mcore_inference import WeightSlice


def lent(parts: Sequence[tuple[str, WeightSlice]]) -> Iterator[tuple[str, WeightSlice]]:
    """By three in memory that is overwritten when the next ones are asked for."""
    for at in range(0, len(parts), 3):
        some = parts[at : at + 3]
        tensors = [part.tensor.clone() for _, part in some]
        for number, ((name, part), tensor) in enumerate(zip(some, tensors, strict=True), 1):
            yield name, WeightSlice(tensor=tensor, offsets=part.offsets, ends_buffer=number == len(some))
        for tensor in tensors:
            tensor.fill_(9.0)
