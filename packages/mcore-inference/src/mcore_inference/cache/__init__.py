# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The paged key-value cache: who holds which block, and the blocks themselves."""

from mcore_inference.cache._blocks import BlockAllocator
from mcore_inference.cache._pages import PagedKVCache, block_bytes, num_blocks_for_bytes
from mcore_inference.cache._prefix import BlockKey, PrefixChain

__all__ = ["BlockAllocator", "BlockKey", "PagedKVCache", "PrefixChain", "block_bytes", "num_blocks_for_bytes"]
