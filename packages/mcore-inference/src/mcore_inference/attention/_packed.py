# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What attention is told when it takes the projection's result as it is."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from mcore_inference._stability import experimental_api


@experimental_api
@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """RMS norms of the query and key heads, d channels each."""

    query: Tensor
    """[d]."""
    key: Tensor
    """[d]."""
    epsilon: float
    shift: float
    """Added to the weights."""

    @property
    def parts(self) -> tuple[Tensor, Tensor, float, float]:
        return self.query, self.key, self.epsilon, self.shift


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PackedHeads:
    """T tokens of a step between the projection and attention."""

    qkv: Tensor
    """[T, K, G + 2, d] contiguous: of each key-value head its G query heads, its key, its value."""
    tables: tuple[Tensor, Tensor] | None
    """cos and sin [T, d] that turn queries and keys, or None."""
    norms: HeadNorms | None


# A query heads.
@experimental_api
class HeadRotation(Protocol):
    """Turns queries and keys between the projection and attention, in place of this package's kernel."""

    required: bool
    """Whether every step is to be turned by it; else those with prompts, where turning is a kernel of its own."""

    def rotate(self, heads: PackedHeads) -> tuple[Tensor, Tensor, Tensor]:
        """Of heads with tables and without norms: queries [T, A, d], keys and values [T, K, d]."""
        ...
