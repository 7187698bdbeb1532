# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Everything a training run is told."""

from dataclasses import dataclass, field

from mcore_moe import MoEConfig
from mcore_parallel import ParallelPlan
from mcore_parallel.data import MaskedTokensConfig
from mcore_parallel.guard import WatchdogConfig
from mcore_parallel.models import TransformerConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.pipeline import PipelineConfig

DTYPE_NAMES = ("float32", "bfloat16", "float64")


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
    """Length, batch and pace of a run.

    Raises:
        ValueError: a number out of its range, an unknown dtype.
    """

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

    def __post_init__(self) -> None:
        for name in ("steps", "seq_len", "micro_batch_size", "global_batch_size", "eval_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("warmup_steps", "eval_interval", "checkpoint_interval"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPE_NAMES)}")


DATA_PARALLEL = ("ddp", "fsdp")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run.

    Raises:
        ValueError: choices that do not go together.
    """

    model: TransformerConfig
    moe: MoEConfig | None = None
    """None for dense feed-forwards."""
    masked: MaskedTokensConfig | None = None
    """Train a ``BertModel`` on hidden tokens; None for a ``GPTModel`` on the next ones."""
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Schedule and placement of the layers on the stages."""
    data_parallel: str = "ddp"
    """"ddp" keeps the model whole on every replica; "fsdp" divides parameters, gradients and optimizer state among the replicas."""
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=3e-3))
    data: DataConfig = field(default_factory=DataConfig)
    guard: WatchdogConfig = field(default_factory=WatchdogConfig)
    """How long ranks may wait for each other."""
    output: str = "runs/pretrain"
    """Folder for checkpoints and logs."""

    def __post_init__(self) -> None:
        train = self.train
        if train.global_batch_size % (train.micro_batch_size * self.plan.dp):
            raise ValueError(
                f"train.global_batch_size={train.global_batch_size} must be a multiple of "
                f"train.micro_batch_size={train.micro_batch_size} * plan.dp={self.plan.dp}"
            )
        if self.data_parallel not in DATA_PARALLEL:
            raise ValueError(f"data_parallel={self.data_parallel!r} must be one of {', '.join(DATA_PARALLEL)}")
        if self.masked:
            self._check_masked(self.masked)
        if self.data_parallel == "fsdp":
            self._check_fully_sharded()

    def _check_masked(self, masked: MaskedTokensConfig) -> None:
        if self.moe or self.data_parallel == "fsdp":
            raise ValueError("masked trains a BertModel, which has no experts and no fsdp; set moe=none and data_parallel=ddp")
        if masked.mask_token >= self.model.vocab_size:
            raise ValueError(
                f"masked.mask_token={masked.mask_token} must lie below model.vocab_size={self.model.vocab_size}; raise vocab_size"
            )

    def _check_fully_sharded(self) -> None:
        plan = self.plan
        if self.moe and (plan.ep > 1 or plan.expert_tp != plan.tp):
            raise ValueError(
                f"data_parallel='fsdp' divides all parameters over the same ranks, but ep={plan.ep} and etp={plan.expert_tp} replicate "
                f"experts on others; set plan.ep=1 and plan.etp={plan.tp}, or data_parallel='ddp'"
            )
        if plan.vpp > 1 or self.pipeline.schedule not in ("auto", "1f1b"):
            raise ValueError(
                f"data_parallel='fsdp' trains one chunk a stage by 1f1b, found plan.vpp={plan.vpp} and "
                f"pipeline.schedule={self.pipeline.schedule!r}; set plan.vpp=1 and pipeline.schedule=auto, or data_parallel='ddp'"
            )
        if self.model.share_embeddings_and_output_weights and plan.pp > 1:
            raise ValueError(
                f"data_parallel='fsdp' cannot share the embedding between the ends of pp={plan.pp} stages; set plan.pp=1 or "
                "model.share_embeddings_and_output_weights=false, or data_parallel='ddp'"
            )
        if self.optimizer.optimizer == "muon" or any(group.optimizer == "muon" for group in self.optimizer.param_groups):
            raise ValueError("data_parallel='fsdp' cannot step with optimizer='muon', which needs whole matrices; use 'adam', or 'ddp'")
