# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A forward knows whether it is a recomputation."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_parallel import in_backward


def test_a_forward_that_runs_again_lies_in_a_backward() -> None:
    seen: list[bool] = []

    def square(x: Tensor) -> Tensor:
        seen.append(in_backward())
        return x * x

    y = checkpoint(square, torch.ones(2, requires_grad=True), use_reentrant=False)
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert seen == [False, True] and not in_backward()
