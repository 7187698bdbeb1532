# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Several low-rank adapters (LoRA) beside the weights of one served model."""

from mcore_inference.adapters._config import LoraSlots
from mcore_inference.adapters._stacked import StackedAdapters
from mcore_inference.adapters._table import LoraLoadError, LoraTable, adapter_bytes, adapter_root, check_slots
from mcore_inference.adapters._weights import LoraWeights

__all__ = ["LoraLoadError", "LoraSlots", "LoraTable", "LoraWeights", "StackedAdapters", "adapter_bytes", "adapter_root", "check_slots"]
