# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The harness of interpreted programs: each in a process of its own, whose words are shown when it fails."""

import pytest

from tests.support import interpreter
from tests.support.interpreter import run_interpreted

# Types that are made once are those of an interpreter that is not patched: of pointers, numbers, and blocks of one and of several sizes.
SUMS = """
import torch, triton
import triton.language as tl

@triton.jit
def add(x_ptr, y_ptr, bias, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)
    x = tl.load(x_ptr + m * N + n)
    half = (x / 2).to(tl.float16) + (x / 2).to(tl.float16)
    tl.store(y_ptr + m * N + n, x + bias + half + tl.sum(x, 0)[None, :] / M + m + tl.where(n > 1, n, -1))

for rows, columns in ((2, 4), (4, 2), (1, 4)):
    x, y = torch.randn(rows, columns).half().float(), torch.empty(rows, columns)
    add[(1,)](x, y, 3, rows, columns)
    n = torch.arange(columns)
    assert torch.allclose(y, 2 * x + 3 + x.mean(0) + torch.arange(rows)[:, None] + torch.where(n > 1, n, -1), atol=1e-2)
print("same")
"""


def test_operands_of_all_types_and_shapes_are_computed_with() -> None:
    run_interpreted("-c", SUMS)


def test_a_program_has_its_own_process_and_its_words_are_shown() -> None:
    with pytest.raises(AssertionError, match="ValueError: of its own"):
        run_interpreted("-c", "import builtins; builtins.left = 1; raise ValueError('of its own')")
    with pytest.raises(AssertionError, match="before the end"):
        run_interpreted("-c", "import os, sys; print('before the end', file=sys.stderr, flush=True); os._exit(3)")
    run_interpreted("-c", "import builtins; assert not hasattr(builtins, 'left'); print('same')")


def test_a_server_that_died_is_asked_no_more() -> None:
    with pytest.raises(AssertionError, match="the server of interpreted programs died"):
        run_interpreted("-c", "import os, signal; os.kill(os.getppid(), signal.SIGKILL)")
    assert not interpreter._servers
