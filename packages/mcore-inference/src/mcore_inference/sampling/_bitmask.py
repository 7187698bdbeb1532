# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows that may draw some tokens only."""

import math

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api


@experimental_api
def keep_allowed(scores_RV: Tensor, rows_G: Tensor, words_GW: Tensor) -> Tensor:
    """Scores in which G of the rows keep the tokens that their bits allow.

    Args:
        scores_RV: [R, V]; left as they are.
        rows_G: [G] int64, the rows.
        words_GW: [G, at least V / 32] int32; bit ``i % 32`` of word ``i // 32`` allows token i.

    Returns:
        [R, V], float32 or wider.
    """
    result_RV = scores_RV.clone() if scores_RV.dtype == torch.float64 else scores_RV.to(torch.float32, copy=True)
    places = torch.arange(32, dtype=torch.int32, device=words_GW.device)
    allowed_GV = ((words_GW[:, :, None] >> places) & 1).flatten(1)[:, : scores_RV.shape[1]] == 1
    result_RV[rows_G] = result_RV[rows_G].masked_fill(~allowed_GV, -math.inf)
    return result_RV
