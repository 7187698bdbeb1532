# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Root-mean-square normalisation."""

import torch

from mcore_parallel import named_shards
from mcore_parallel.nn import RMSNorm


def test_rms_norm_equals_its_formula_and_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(8, epsilon=1e-3, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight, generator=generator)
    x = torch.randn(5, 8, dtype=torch.float64, generator=generator) * 10
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-3), rtol=1e-12, atol=0)
    assert torch.autograd.gradcheck(norm, x.requires_grad_())


def test_rms_norm_of_half_precision_is_computed_in_float32() -> None:
    # 300^2 overflows float16, and 1e-5 vanishes beside 1 in bfloat16.
    large = torch.full((2, 8), 300.0, dtype=torch.float16)
    torch.testing.assert_close(RMSNorm(8, dtype=torch.float16)(large), torch.ones_like(large))
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    norm = RMSNorm(8, dtype=torch.bfloat16)
    wide = RMSNorm(8)(x.float())
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), wide.bfloat16())


def test_rms_norm_declares_over_which_axes_its_gradient_is_partial() -> None:
    (whole,), (shared,) = (list(named_shards(RMSNorm(4, partial=partial))) for partial in ((), ("tp",)))
    assert whole.spec.partial == ()
    assert shared.spec.partial == ("tp",)
    assert shared.spec.shape == (4,)
