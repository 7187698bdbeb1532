# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Graph capture by Transformer Engine; imported only by who chose it."""

# pyright: reportMissingImports=false

from collections.abc import Callable
from typing import Any

import transformer_engine.pytorch as te
from torch import Tensor, nn


def graphed(module: nn.Module, samples: tuple[Tensor, ...]) -> Callable[..., tuple[Tensor, ...]]:
    """The module, whose calls replay graphs from now on.

    One pass runs for real before: some versions choose there which parameters have a gradient.
    """
    make: Any = te.make_graphed_callables
    return make(module, samples, num_warmup_iters=1, allow_unused_input=True)
