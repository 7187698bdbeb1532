# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rotary tables of the positions of a step, computed once."""

import torch
from torch import Tensor

from mcore_parallel.models import GPTModel

__all__ = ["RotaryTables"]

_MAX_BYTES = 32 * 2**20
"""Of all positions; tables that are larger are computed in each step."""


# T tokens, L positions, D channels of a head that turn.
class RotaryTables:
    """cos and sin of every position, which a step reads in one kernel; to compute them takes about nine.

    Args:
        model: whose positions are numbers.
        num_positions: L, below which all positions are; 0 where that is unknown.
    """

    def __init__(self, model: GPTModel, num_positions: int) -> None:
        self._model = model
        device = next(model.parameters()).device
        self._tables_2LD = {window: self._all(window, num_positions, device) for window in (False, True)}

    def at(self, positions_T: Tensor, *, window: bool = False) -> tuple[Tensor, Tensor] | None:
        """What ``GPTModel.rotary`` gives."""
        tables_2LD = self._tables_2LD[window]
        if tables_2LD is None:
            return self._model.rotary(positions_T, window=window)
        cos_TD, sin_TD = tables_2LD.index_select(1, positions_T)
        return cos_TD, sin_TD

    def _all(self, window: bool, num_positions: int, device: torch.device) -> Tensor | None:
        one = self._model.rotary(torch.zeros(1, dtype=torch.int64, device=device), window=window)
        if one is None or not num_positions or 2 * num_positions * one[0].numel() * one[0].element_size() > _MAX_BYTES:
            return None
        tables = self._model.rotary(torch.arange(num_positions, device=device), window=window)
        assert tables is not None, "there are some of one position"
        return torch.stack(tables)
