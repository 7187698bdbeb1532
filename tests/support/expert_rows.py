# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows of experts, as grouped GEMMs are told of them."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor


def ends_of(rows_per_expert: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """int32 [N], the rows of each expert and of all before it."""
    return torch.tensor(list(itertools.accumulate(rows_per_expert)), dtype=torch.int32, device=device)
