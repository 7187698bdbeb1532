# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What attention is told when it takes the projection's result as it is."""

from dataclasses import dataclass

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
