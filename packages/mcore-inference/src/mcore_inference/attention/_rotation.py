# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who turns heads between the projection and attention."""

from typing import Protocol

from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_parallel.nn import PackedHeads


# T tokens of a step, A query heads, K key-value heads, d width of a head.
@experimental_api
class HeadRotation(Protocol):
    """Turns queries and keys between the projection and attention, in place of this package's kernel."""

    required: bool
    """Whether every step is to be turned by it; else those with prompts, where turning is a kernel of its own."""

    def rotate(self, heads: PackedHeads) -> tuple[Tensor, Tensor, Tensor]:
        """Of heads with tables and without norms: queries [T, A, d], keys and values [T, K, d]."""
        ...
