# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints of Megatron-LM: ``torch_dist`` of both generations and ``fsdp_dtensor``, in and out, and directories of one file a rank."""

from mcore_ckpt.megatron._export import EXPORT_FORMATS, export_checkpoint_megatron
from mcore_ckpt.megatron._import import import_checkpoint_megatron, stored_bytes

__all__ = ["EXPORT_FORMATS", "export_checkpoint_megatron", "import_checkpoint_megatron", "stored_bytes"]
