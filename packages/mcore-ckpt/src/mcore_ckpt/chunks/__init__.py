# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Algebra of n-dimensional index boxes: what part of a tensor a shard is, and whether parts make a whole."""

from mcore_ckpt.chunks._box import Box, runs
from mcore_ckpt.chunks._tiling import check_tiling, find_overlap, subtract

__all__ = ["Box", "check_tiling", "find_overlap", "runs", "subtract"]
