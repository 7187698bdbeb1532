# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels of a decode step against torch."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from mcore_parallel.nn import RMSNorm, apply_rotary, rotary_frequencies, rotary_tables


def close(result: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(result.double().cpu(), wanted.double().cpu(), rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def check_linear(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from mcore_inference.decoder._triton import streamed_linear

    for tokens, depth, width in ((1, 96, 40), (3, 256, 64), (16, 130, 33)):
        x, residual = (torch.randn(tokens, size, device=device, dtype=dtype) for size in (depth, width))
        weight = torch.randn(width, depth, device=device, dtype=dtype)
        close(streamed_linear(x, weight), x.double() @ weight.double().T, tolerance)
        close(streamed_linear(x, weight, residual), x.double() @ weight.double().T + residual.double(), tolerance)


def check_rotation(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from mcore_inference.decoder._triton import rotate_and_append

    for kv_heads, group, width, rotates, normalises in ((2, 3, 16, True, True), (1, 1, 24, True, False), (3, 4, 8, False, True)):
        qkv = torch.randn(5, kv_heads, group + 2, width, device=device, dtype=dtype)
        tables = rotary_tables(torch.arange(5, device=device) * 3, rotary_frequencies(width, device=device)) if rotates else None
        norms = [RMSNorm(width, epsilon=1e-3, dtype=dtype, device=device) for _ in range(2)]
        for norm in norms:
            torch.nn.init.normal_(norm.weight)
        slots = torch.tensor([7, 2, 9, 0, 4], device=device)
        keys, values = (torch.zeros(11, kv_heads, width, device=device, dtype=dtype) for _ in range(2))
        scaling = (norms[0].weight.detach(), norms[1].weight.detach(), 1e-3, 0.0) if normalises else None
        q = rotate_and_append(qkv, tables, scaling, keys, values, slots)
        wanted_q, wanted_k = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2]
        if normalises:
            wanted_q, wanted_k = norms[0](wanted_q).detach(), norms[1](wanted_k).detach()
        if tables is not None:
            wanted_q, wanted_k = apply_rotary(wanted_q, tables), apply_rotary(wanted_k, tables)
        close(q, wanted_q, tolerance)
        close(keys[slots], wanted_k, tolerance)
        assert torch.equal(values[slots], qkv[:, :, -1]) and not keys[[1, 3, 5, 6, 8, 10]].any()


CHECKS = (check_linear, check_rotation)


def test_kernels_equal_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, timeout=110)
    assert done.stdout == "same\n", done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_equal_torch_on_a_gpu(check, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    check("cuda", dtype, tolerance)


if __name__ == "__main__":
    for each in CHECKS:
        torch.manual_seed(0)
        each("cpu", torch.float32, 2e-5)
    print("same")
