# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the gradients of two runs agree as well as their precision lets them."""

from mcore_parallel.numerics._bound import expected_rel_bound, layer_of, precision
from mcore_parallel.numerics._compare import GradientCheck, GradientReport, check_gradient, compare_gradients, relative_grad_diff
from mcore_parallel.numerics._diagnose import diagnose

__all__ = [
    "GradientCheck",
    "GradientReport",
    "check_gradient",
    "compare_gradients",
    "diagnose",
    "expected_rel_bound",
    "layer_of",
    "precision",
    "relative_grad_diff",
]
