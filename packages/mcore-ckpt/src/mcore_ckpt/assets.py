# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files that a checkpoint keeps beside its tensors, such as those of the tokenizer: read back, or written out."""

from mcore_ckpt._core import AssetRecord, extract_assets, read_asset

__all__ = ["AssetRecord", "extract_assets", "read_asset"]
