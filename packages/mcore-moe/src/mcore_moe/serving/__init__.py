# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Mixtures without gradients in few kernels, for engines."""

from mcore_moe._fp8_stack import Fp8Stack
from mcore_moe.serving._streamed import StreamedExperts

__all__ = ["Fp8Stack", "StreamedExperts"]
