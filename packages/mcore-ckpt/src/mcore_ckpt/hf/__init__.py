# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hugging Face checkpoints out and in. A family is data: rules for names and shapes, and a table of config fields."""

from mcore_ckpt.hf._adapter import HFAdapterConfig, merge_adapter
from mcore_ckpt.hf._config import families_of
from mcore_ckpt.hf._export import export_checkpoint_hf, export_hf
from mcore_ckpt.hf._import import HFModel, import_checkpoint_hf, import_hf, load_hf
from mcore_ckpt.hf._peft import HFAdapter, export_adapter_hf, import_adapter_hf, merge_adapter_hf
from mcore_ckpt.hf._stored_adapter import StoredAdapter
from mcore_ckpt.hf._tokenizer import tokenizer_files

__all__ = [
    "HFAdapter",
    "HFAdapterConfig",
    "HFModel",
    "StoredAdapter",
    "export_adapter_hf",
    "export_checkpoint_hf",
    "export_hf",
    "families_of",
    "import_adapter_hf",
    "import_checkpoint_hf",
    "import_hf",
    "load_hf",
    "merge_adapter",
    "merge_adapter_hf",
    "tokenizer_files",
]
