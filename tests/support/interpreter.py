# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton's interpreter: kernels on a processor, in a process of its own, as it takes over every kernel of a process."""

import functools
import os
import runpy
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
    command = [sys.executable, "-W", "ignore", "-m", __name__, *program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)
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


def patch_language_once() -> None:
    """From now on the interpreter of this process leaves Triton's language patched; it would do so at every call of a device function."""
    from triton.runtime import interpreter

    # A scope that has restored what was patched would be of no use to the next caller of the same function.
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    # A table of all types, built at every operation.
    interpreter._get_np_dtype = _by_type(interpreter._get_np_dtype)


def _by_type(convert: Any) -> Any:
    from triton.language import block_type, pointer_type

    of_element = functools.cache(convert)

    def np_dtype(kind: Any) -> np.dtype[Any]:
        element = kind.element_ty if isinstance(kind, block_type) else kind
        return convert(element) if isinstance(element, pointer_type) else of_element(element)

    return np_dtype


if __name__ == "__main__":
    patch_language_once()
    [_, *sys.argv] = sys.argv
    if sys.argv[0] == "-c":
        exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
