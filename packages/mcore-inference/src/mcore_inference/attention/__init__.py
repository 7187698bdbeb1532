# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention over a paged cache: the core, what it reads of a step, its torch path and its kernels."""

from mcore_inference.attention._core import PagedAttention, has_attention_kernel
from mcore_inference.attention._packed import HeadNorms, PackedHeads
from mcore_inference.attention._step import DecodeRows, GatheredRows, PagedStep, PrefillRows, TableRows
from mcore_inference.attention._tiles import prefill_tiles

__all__ = [
    "DecodeRows",
    "GatheredRows",
    "HeadNorms",
    "PackedHeads",
    "PagedAttention",
    "PagedStep",
    "PrefillRows",
    "TableRows",
    "has_attention_kernel",
    "prefill_tiles",
]
