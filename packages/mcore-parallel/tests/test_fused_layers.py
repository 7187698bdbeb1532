# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels between a layer's products against the torch code, in Triton's interpreter and on a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from mcore_parallel.nn import RMSNorm, apply_rotary, rotary_frequencies, rotary_tables, swiglu
from mcore_parallel.nn._fused import fused_rms_norm, fused_split_rotary, fused_swiglu, has_kernel


def check_norm(device: str, dtype: torch.dtype, tolerance: float) -> None:
    for tokens, width in ((5, 48), (130, 300), (1, 1024)):
        norm = RMSNorm(width, epsilon=1e-3, dtype=torch.float64)
        torch.nn.init.normal_(norm.weight)
        weight = norm.weight.detach().to(device, dtype).requires_grad_()
        x, grad = (torch.randn(tokens, width, dtype=torch.float64).to(dtype) for _ in range(2))
        ours, reference = x.to(device).requires_grad_(), x.detach().double().requires_grad_()
        fused_rms_norm(ours, weight, 1e-3).backward(grad.to(device))
        norm.weight.data.copy_(weight.detach())
        norm(reference).backward(grad.double())
        close(fused_rms_norm(ours, weight, 1e-3), norm(reference), tolerance)
        close(ours.grad, reference.grad, tolerance)
        close(weight.grad, norm.weight.grad, tolerance)


def check_swiglu(device: str, dtype: torch.dtype, tolerance: float) -> None:
    for tokens, width in ((3, 20), (7, 1500)):
        up, grad = torch.randn(tokens, 2 * width).to(dtype), torch.randn(tokens, width).to(dtype)
        ours, reference = up.to(device).requires_grad_(), up.detach().double().requires_grad_()
        y = fused_swiglu(ours)
        y.backward(grad.to(device))
        wanted = swiglu(*reference.chunk(2, -1))
        wanted.backward(grad.double())
        close(y, wanted, tolerance)
        close(ours.grad, reference.grad, tolerance)


def check_rotary(device: str, dtype: torch.dtype, tolerance: float) -> None:
    for tokens, kv_heads, group, width in ((5, 2, 3, 8), (4, 1, 1, 24), (2, 16, 4, 96), (3, 8, 4, 128)):
        qkv = torch.randn(tokens, kv_heads, group + 2, width).to(dtype)
        tables = rotary_tables(torch.arange(tokens) * 7, rotary_frequencies(width))
        ours, reference = qkv.to(device).requires_grad_(), qkv.detach().double().requires_grad_()
        found = fused_split_rotary(ours, (tables[0].to(device), tables[1].to(device)))
        q, k, v = reference[:, :, :-2].flatten(1, 2), reference[:, :, -2], reference[:, :, -1]
        wanted = (apply_rotary(q, tables), apply_rotary(k, tables), v)
        grads = [torch.randn(x.shape).to(dtype) for x in wanted]
        torch.autograd.backward(found, [grad.to(device) for grad in grads])
        torch.autograd.backward(wanted, [grad.double() for grad in grads])
        for a, b in zip((*found, ours.grad), (*wanted, reference.grad), strict=True):
            close(a, b, tolerance)


def close(found: Tensor | None, wanted: Tensor | None, tolerance: float) -> None:
    assert found is not None and wanted is not None
    torch.testing.assert_close(found.double().cpu(), wanted.double(), rtol=tolerance, atol=tolerance)


def check_all(device: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    for check in (check_norm, check_swiglu, check_rotary):
        check(device, dtype, tolerance)


def test_kernels_equal_torch_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-W", "ignore", __file__], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "same\n", done.stderr[-3000:]


def test_the_processor_and_double_precision_take_the_torch_code() -> None:
    assert not has_kernel(torch.zeros(2))
    assert not has_kernel(torch.zeros(2, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_kernels_equal_torch_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    assert has_kernel(torch.zeros(2, dtype=dtype, device="cuda"))
    check_all("cuda", dtype, tolerance)


if __name__ == "__main__":
    check_all("cpu", torch.float32, 1e-4)
    print("same")
