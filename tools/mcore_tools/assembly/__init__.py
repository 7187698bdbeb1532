# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From the configuration of a run to its parts."""

from mcore_tools.assembly._assemble import (
    DTYPES,
    Parts,
    assemble,
    build_groups,
    build_model,
    build_stage,
    graph_stage,
    objective,
    shard_stage,
)
from mcore_tools.assembly._data import Samples, check_data, datasets, step_batches, validation_batches
from mcore_tools.assembly._fully_sharded import FullyShardedModel
from mcore_tools.assembly._qk_clip import clip_after_steps
from mcore_tools.assembly._rates import PEAK_FLOPS, schedule, throughput
from mcore_tools.assembly._refused import removed_if_refused
from mcore_tools.assembly._run import Run, assemble_run
from mcore_tools.assembly._tokenizer import has_files, open_tokenizer, tokenizer_assets
from mcore_tools.assembly._torch_sharded import TorchShardedModel

__all__ = [
    "DTYPES",
    "PEAK_FLOPS",
    "FullyShardedModel",
    "Parts",
    "Run",
    "Samples",
    "TorchShardedModel",
    "assemble",
    "assemble_run",
    "build_groups",
    "build_model",
    "build_stage",
    "check_data",
    "clip_after_steps",
    "datasets",
    "graph_stage",
    "has_files",
    "objective",
    "open_tokenizer",
    "removed_if_refused",
    "schedule",
    "shard_stage",
    "step_batches",
    "throughput",
    "tokenizer_assets",
    "validation_batches",
]
