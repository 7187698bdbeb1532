# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Matrix products of Triton's interpreter with the same bits for a row wherever it stands in its tile, as matrix instructions have them."""

from typing import Any

import numpy as np


def round_dots_once() -> None:
    """From now on the interpreter of this process multiplies in float64 and rounds to float32; a library's order of sums cannot show."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
