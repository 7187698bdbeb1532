# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory of a device that an engine gives up while it is suspended, and takes again."""

from mcore_inference.memory._memory import CacheMemory, cache_memory
from mcore_inference.memory._unified import (
    UnifiedMemoryCompileTimeoutError,
    UnifiedMemoryUnsupportedError,
    advise_managed_tensor_accessed_by,
    advise_managed_tensor_preferred_location,
    create_unified_mempool,
    prefetch_managed_module_parameters,
    prefetch_managed_tensor,
)

__all__ = [
    "CacheMemory",
    "UnifiedMemoryCompileTimeoutError",
    "UnifiedMemoryUnsupportedError",
    "advise_managed_tensor_accessed_by",
    "advise_managed_tensor_preferred_location",
    "cache_memory",
    "create_unified_mempool",
    "prefetch_managed_module_parameters",
    "prefetch_managed_tensor",
]
