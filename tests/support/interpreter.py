# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton's interpreter: kernels on a processor, in a process of its own, as it takes over every kernel of a process."""

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest


def run_interpreted(*program: str) -> None:
    """Run Python with these arguments (a test file, or ``-c`` and code) where kernels are interpreted; skip where there is no Triton.

    Raises:
        AssertionError: the program did not come to its last line, which prints "same".
    """
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-W", "ignore", *program], env=environment, capture_output=True, text=True, timeout=110)
    assert done.stdout == "same\n", done.stderr[-3000:]


def round_dots_once() -> None:
    """From now on the interpreter of this process multiplies in float64 and rounds to float32; a library's order of sums cannot show.

    A row has the same bits wherever it stands in its tile then, as matrix instructions have them.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    InterpreterBuilder.create_dot = create_dot
