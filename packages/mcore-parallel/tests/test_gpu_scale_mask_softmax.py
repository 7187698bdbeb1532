# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels of scale, mask and softmax against torch in float64."""

import pytest
import torch

from mcore_parallel.nn import FusedScaleMaskSoftmax

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "keys"), [(64, 64), (1, 300), (17, 4100)])
@pytest.mark.parametrize("window", [None, (32, 0)])
@pytest.mark.parametrize("kind", ["causal", "padding"])
def test_weights_and_gradients(dtype: torch.dtype, queries: int, keys: int, window: tuple[int, int] | None, kind: str) -> None:
    softmax = FusedScaleMaskSoftmax(attn_mask_type=kind, scale=0.5, window_size=window)
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(2, 4, queries, keys, dtype=dtype, device="cuda", generator=draw, requires_grad=True)
    padding = torch.rand(2, 1, 1, keys, device="cuda", generator=draw) < 0.3
    exact = x.detach().double().requires_grad_()
    assert softmax.has_kernel(x) and not softmax.has_kernel(exact)
    grad = torch.randn(x.shape, device="cuda", generator=draw, dtype=dtype)
    y, reference = softmax(x, padding), softmax(exact, padding)
    y.backward(grad)
    reference.backward(grad.double())
    bound = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), reference, rtol=bound, atol=bound * 0.1)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=4 * bound, atol=bound)
