# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention over a paged cache: the core, what it reads of a step, its torch path and its kernels."""

from mcore_inference.attention._backends import AttentionLibrary, has_attention_kernel, load_rotation, reads_tables
from mcore_inference.attention._core import PagedAttention
from mcore_inference.attention._decode_contexts import ContinuedRows, DecodeContexts
from mcore_inference.attention._page_format import PageFormat
from mcore_inference.attention._rotation import HeadRotation
from mcore_inference.attention._step import DecodeRows, GatheredRows, HostRows, PagedStep, PrefillRows, TableRows
from mcore_inference.attention._tiles import fits_packed, prefill_tiles

__all__ = [
    "AttentionLibrary",
    "ContinuedRows",
    "DecodeContexts",
    "DecodeRows",
    "GatheredRows",
    "HeadRotation",
    "HostRows",
    "PageFormat",
    "PagedAttention",
    "PagedStep",
    "PrefillRows",
    "TableRows",
    "fits_packed",
    "has_attention_kernel",
    "load_rotation",
    "prefill_tiles",
    "reads_tables",
]
