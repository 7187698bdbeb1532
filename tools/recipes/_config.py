# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Everything a training run is told."""

from dataclasses import dataclass, field

from mcore_moe import MoEConfig
from mcore_parallel import ParallelPlan
from mcore_parallel.models import TransformerConfig
from mcore_parallel.optim import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where tokens come from."""

    prefix: str = ""
    """Path of the .bin/.idx pair without its ending."""
    tokenizer: str = ""
    """Path of tokenizer.json."""
    split: str = "95,5,0"
    """Shares of the documents for training, validation and test."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch and pace of a run."""

    steps: int = 100
    seq_len: int = 128
    micro_batch_size: int = 4
    global_batch_size: int = 16
    """Sequences a step, over all data-parallel ranks."""
    warmup_steps: int = 10
    eval_interval: int = 50
    """Steps between validations; 0 for none."""
    eval_batches: int = 4
    """Global batches a validation."""
    checkpoint_interval: int = 0
    """Steps between checkpoints; 0 for one at the end."""
    dtype: str = "float32"
    """Of parameters and activations: float32, bfloat16 or float64."""
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run."""

    model: TransformerConfig
    moe: MoEConfig | None = None
    """None for dense feed-forwards."""
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3))
    data: DataConfig = field(default_factory=DataConfig)
    output: str = "runs/pretrain"
    """Folder for checkpoints and logs."""
