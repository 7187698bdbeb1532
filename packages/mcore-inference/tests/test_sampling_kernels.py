# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels that draw tokens against the torch path."""

import math
import os
import subprocess
import sys

import pytest
import torch

from mcore_inference import SamplingParams
from mcore_inference.sampling import SamplingRows, log_probs, processed_log_probs, sample


def check(device: str, dtype: torch.dtype, columns: int, vocab_size: int) -> None:
    """Same seeds, same tokens as the torch path, row by row; a threshold within rounding of a border may fall on either side."""
    from mcore_inference.sampling._triton import draw

    torch.manual_seed(0)
    rows = 12
    logits = (torch.randn(rows, columns) * 4).to(dtype).to(device)
    # The best of these rows stands twice; the tail of that one is forbidden.
    logits[3, [7, 900]] = 50.0
    logits[4, 5:] = -torch.inf
    temperatures = [0.0, 1.0, 0.3, 0.0, 2.0, 1.0, 0.7, 1.0, 1.0, 1e-3, 1.0, 1.0]
    params = [SamplingParams(temperature=t) for t in temperatures]
    seeds, positions = [11 * row - 40 for row in range(rows - 1)] + [2**62 + 5], list(range(3, 3 + rows))
    settings = SamplingRows.of(params, seeds, positions, vocab_size, device)
    processed = torch.arange(rows, device=device) % 3 // 2
    inputs = settings.temperature.float(), settings.seed, settings.position, processed, vocab_size
    tokens, values = draw(logits, *inputs)
    wanted = sample(logits[:, :vocab_size].double(), settings)
    assert tokens.tolist() == wanted.tolist()
    assert torch.equal(draw(logits, *inputs, wants_log_probs=False)[0], tokens)
    raw, drawn = log_probs(logits), processed_log_probs(logits[:, :vocab_size], settings)
    wanted_values = torch.where(processed == 1, *(x.gather(1, wanted[:, None])[:, 0] for x in (drawn, raw)))
    torch.testing.assert_close(values, wanted_values, rtol=1e-4, atol=1e-4)
    assert (tokens < vocab_size).all() and tokens[3] == 7 and tokens[4] < 5

    logits[0, 3], logits[1, vocab_size - 1], logits[2, :] = math.nan, math.inf, -math.inf
    tokens, _ = draw(logits, *inputs)
    assert tokens[:3].tolist() == [-1, -1, -1] and tokens[3:].tolist() == wanted[3:].tolist()


def test_kernels_draw_the_tokens_of_the_torch_path_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, timeout=110)
    assert done.stdout == "same\n", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize(("columns", "vocab_size"), [(1000, 1000), (9000, 8990), (151936, 151936)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_draw_the_tokens_of_the_torch_path_on_a_gpu(dtype: torch.dtype, columns: int, vocab_size: int) -> None:
    check("cuda", dtype, columns, vocab_size)


if __name__ == "__main__":
    check("cpu", torch.float32, 1000, 1000)
    check("cpu", torch.float32, 9000, 8990)
    print("same")
