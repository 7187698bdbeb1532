# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From the configuration of a run to its parts."""

from mcore_tools.assembly._assemble import (
    DTYPES,
    PEAK_FLOPS,
    Parts,
    Samples,
    assemble,
    build_model,
    build_stage,
    datasets,
    objective,
    schedule,
    step_batches,
    throughput,
)
from mcore_tools.assembly._fully_sharded import FullyShardedModel
from mcore_tools.assembly._torch_sharded import TorchShardedModel

__all__ = [
    "DTYPES",
    "PEAK_FLOPS",
    "FullyShardedModel",
    "Parts",
    "Samples",
    "TorchShardedModel",
    "assemble",
    "build_model",
    "build_stage",
    "datasets",
    "objective",
    "schedule",
    "step_batches",
    "throughput",
]
