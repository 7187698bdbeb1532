# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Scale, mask and softmax in one step."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel.nn import FusedScaleMaskSoftmax, SoftmaxOne
from tests.support.interpreter import run_interpreted


def scores(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def hidden(queries: int, keys: int, window: tuple[int, int], causal: bool) -> Tensor:
    """By the definition, one entry at a time."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for query in range(queries):
        for key in range(keys):
            distance = key - (query + keys - queries)
            mask[query, key] = (
                (causal and distance > 0) or (window[0] >= 0 and distance < -window[0]) or (window[1] >= 0 and distance > window[1])
            )
    return mask


@pytest.mark.parametrize("window", [None, (2, 0), (0, 0), (-1, 1), (1, -1)])
@pytest.mark.parametrize("kind", ["causal", "padding", "padding_causal", "no_mask"])
def test_windows_causal_masks_and_given_ones_add_up(window: tuple[int, int] | None, kind: str) -> None:
    x = scores(2, 3, 5, 7).requires_grad_()
    padding = torch.zeros(2, 1, 1, 7, dtype=torch.bool)
    padding[1, ..., 5:] = True
    y = FusedScaleMaskSoftmax(attn_mask_type=kind, scale=0.3, window_size=window)(x, padding)
    mask = padding | hidden(5, 7, window or (-1, -1), "causal" in kind)
    expected = (0.3 * x).masked_fill(mask, float("-inf")).softmax(-1).nan_to_num(0.0)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad[mask.expand_as(x)].count_nonzero() == 0


def test_offsets_and_functions_of_the_mask() -> None:
    x = scores(2, 3, 4, 4)
    offsets = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    torch.testing.assert_close(FusedScaleMaskSoftmax(attn_mask_type="no_mask")(x, None, offsets), SoftmaxOne(offsets)(x))
    filled = FusedScaleMaskSoftmax(mask_func=lambda values, mask: values.masked_fill(mask, -10_000.0), window_size=(0, 0))
    torch.testing.assert_close(filled(x), torch.eye(4, dtype=torch.float64).expand(2, 3, 4, 4))


def test_the_dtype_of_the_weights() -> None:
    x = scores(1, 1, 2, 2)
    assert FusedScaleMaskSoftmax(input_in_bf16=True)(x.bfloat16()).dtype == torch.bfloat16
    assert FusedScaleMaskSoftmax(input_in_fp16=True)(x.float()).dtype == torch.float16
    assert FusedScaleMaskSoftmax(softmax_in_fp32=False)(x.bfloat16()).dtype == torch.bfloat16
    assert FusedScaleMaskSoftmax()(x).dtype == torch.float64


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_in_fp16": True, "input_in_bf16": True}, "exclude one another"),
        ({"attn_mask_type": "lower"}, "attn_mask_type='lower' must be one of 'causal'"),
        ({"scale": 0.5, "softmax_in_fp32": False}, "scale=0.5 needs softmax_in_fp32=True"),
        ({"window_size": (-2, 0)}, r"window_size=\(-2, 0\) must be two numbers"),
    ],
)
def test_choices_that_do_not_go_together(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedScaleMaskSoftmax(**values)


def test_inputs_of_another_kind() -> None:
    with pytest.raises(ValueError, match="give scores"):
        FusedScaleMaskSoftmax()(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="mask is torch.float32; give bool"):
        FusedScaleMaskSoftmax()(torch.zeros(1, 1, 2, 2), torch.zeros(2, 2))


INTERPRETED = """
import torch
from mcore_parallel.nn import FusedScaleMaskSoftmax
from mcore_parallel.nn.kernels._triton_softmax import scale_mask_softmax, scale_mask_softmax_backward
draw = torch.Generator().manual_seed(1)
for queries, keys, bounds in ((3, 5, (1, 0)), (2, 3, (-1, -1))):
    x = torch.randn(2, 3, queries, keys, generator=draw)
    for mask in (None, torch.rand(2, 1, 1, keys, generator=draw) < 0.5, torch.rand(queries, keys, generator=draw) < 0.9):
        kind, leaf = "no_mask" if bounds[1] else "causal", x.clone().requires_grad_()
        expected = FusedScaleMaskSoftmax(attn_mask_type=kind, scale=0.7, window_size=bounds)(leaf, mask)
        weights = scale_mask_softmax(x, mask, 0.7, bounds, torch.float32)
        torch.testing.assert_close(weights, expected.detach())
        grad = torch.randn(x.shape, generator=draw)
        expected.backward(grad)
        torch.testing.assert_close(scale_mask_softmax_backward(grad, weights, 0.7, torch.float32), leaf.grad)
print("same")
"""


@pytest.mark.journey
def test_the_kernels_give_the_same_when_they_are_interpreted() -> None:
    run_interpreted("-c", INTERPRETED)
