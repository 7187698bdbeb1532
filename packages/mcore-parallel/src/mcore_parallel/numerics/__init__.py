# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether two runs agree as well as their precision lets them, and where they first do not."""

from mcore_parallel.numerics._bound import expected_rel_bound, layer_of, precision
from mcore_parallel.numerics._compare import GradientCheck, GradientReport, check_gradient, compare_gradients, diagnose, relative_grad_diff
from mcore_parallel.numerics._first_difference import DumpReport, TensorDifference, compare_dumps
from mcore_parallel.numerics._recorder import DumpError, TensorRecorder

__all__ = [
    "DumpError",
    "DumpReport",
    "GradientCheck",
    "GradientReport",
    "TensorDifference",
    "TensorRecorder",
    "check_gradient",
    "compare_dumps",
    "compare_gradients",
    "diagnose",
    "expected_rel_bound",
    "layer_of",
    "precision",
    "relative_grad_diff",
]
