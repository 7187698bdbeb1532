# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The paged key-value cache: who holds which block, and the blocks themselves; the states of recurrent layers."""

from mcore_inference.cache._blocks import BlockAllocator
from mcore_inference.cache._pages import PagedKVCache, block_bytes, num_blocks_for_bytes
from mcore_inference.cache._prefix import BlockKey, PrefixChain
from mcore_inference.cache._slots import LayerSlots
from mcore_inference.cache._snapshots import StateSnapshots
from mcore_inference.cache._state_config import MambaInferenceStateConfig, get_mamba_inference_state_config_from_model
from mcore_inference.cache._states import RecurrentStateCache

__all__ = [
    "BlockAllocator",
    "BlockKey",
    "LayerSlots",
    "MambaInferenceStateConfig",
    "PagedKVCache",
    "PrefixChain",
    "RecurrentStateCache",
    "StateSnapshots",
    "block_bytes",
    "get_mamba_inference_state_config_from_model",
    "num_blocks_for_bytes",
]
