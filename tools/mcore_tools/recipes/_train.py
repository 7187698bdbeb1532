# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Length, batch and pace of a run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from mcore_parallel.training import BatchRampUp, BatchSizeSchedule, BatchSizeSteps, ConstantBatchSize

DTYPE_NAMES = ("float32", "bfloat16", "float16", "float64")
LR_SCHEDULES = ("constant", "linear", "cosine", "inverse_square_root", "wsd")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch and pace of a run.

    Raises:
        ValueError: a number out of its range, an unknown dtype.
    """

    steps: int = 100
    """Updates of the run; with ``rl``, iterations."""
    seq_len: int = 128
    """Tokens of a sequence."""
    micro_batch_size: int = 4
    """Sequences of one forward on a replica."""
    global_batch_size: int = 16
    """Sequences a step, over all data-parallel ranks."""
    batch_ramp_up: tuple[int, int, int] | None = None
    """First batch size, increment and samples over which it grows to ``global_batch_size``; None to begin with that."""
    batch_steps: str = ""
    """``"0:256 1M:512"``: sequences a step from a number of samples on, in place of ``global_batch_size``."""
    lr_schedule: str = "cosine"
    """constant, linear, cosine, inverse_square_root or wsd, over all steps, between ``optimizer.lr`` and ``optimizer.min_lr``."""
    lr_decay_steps: int = 0
    """Steps at whose end the rate is ``optimizer.min_lr``, where it stays; 0 for ``steps``."""
    wsd_decay_steps: int = 0
    """Steps of the decay at the end of wsd."""
    wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of that decay."""
    warmup_steps: int = 10
    """Steps in which the learning rate rises to ``optimizer.lr``."""
    warmup_init_lr: float = 0.0
    """Where it rises from."""
    end_weight_decay: float | None = None
    """Weight decay at the end of ``steps``, to which it goes from ``optimizer.weight_decay``; None to stay there."""
    weight_decay_style: Literal["linear", "cosine"] = "linear"
    """The way to ``end_weight_decay``."""
    eval_interval: int = 50
    """Steps between validations; 0 for none."""
    eval_batches: int = 4
    """Global batches a validation."""
    checkpoint_interval: int = 0
    """Steps between checkpoints; 0 for one at the end."""
    checkpoints_kept: int = 3
    """Newest checkpoints that stay; 0 for all."""
    checkpoint_keep_interval: int = 0
    """Checkpoints of steps that are multiples of it stay, too; 0 for no others."""
    checkpoint_format: Literal["native", "torch_dist"] = "native"
    """Of the files: safetensors, or those that ``torch.distributed.checkpoint`` reads, too."""
    checkpoint_async_steps: int = 0
    """Steps that go on while a checkpoint is written beside them; then it is committed. 0 to wait until it is written."""
    local_checkpoint_interval: int = 0
    """Steps between checkpoints on the nodes themselves, for a restart in the same layout; 0 for none."""
    local_checkpoint_folder: str = ""
    """Where they lie on each node, such as /dev/shm/mcore; a run has a folder of its own in it."""
    local_checkpoint_copies: int = 1
    """Nodes that keep each file; so many less one may be lost."""
    local_checkpoints_kept: int = 1
    """Newest checkpoints that stay on the nodes."""
    stop_after_minutes: float = 0.0
    """Save and end after the first step that begins later than this, of ``rl`` the first iteration that ends later; 0 for no limit."""
    max_skipped_steps: int = 0
    """Steps of the run that may be skipped because their gradients are not finite; any number while a loss scale can be
    lowered."""
    dtype: str = "float32"
    """Of parameters and activations: float32, bfloat16, float16 (which scales the loss, by ``optimizer.initial_loss_scale`` and its
    neighbours) or float64."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean loss of the heads that predict further tokens, ``model.mtp_num_layers`` of them."""
    seed: int = 1234
    """Of the first weights and the order of the data."""
    deterministic: bool = False
    """The same bits each time: torch's deterministic algorithms, and no start where the environment lets results differ."""

    def __post_init__(self) -> None:
        for name in (
            "steps", "seq_len", "micro_batch_size", "global_batch_size", "eval_batches", "local_checkpoint_copies",
            "local_checkpoints_kept",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in (
            "warmup_steps", "eval_interval", "checkpoint_interval", "checkpoints_kept", "checkpoint_keep_interval", "wsd_decay_steps",
            "stop_after_minutes", "max_skipped_steps", "local_checkpoint_interval", "checkpoint_async_steps", "lr_decay_steps",
            "warmup_init_lr", "mtp_loss_scaling_factor",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.end_weight_decay is not None and self.end_weight_decay < 0:
            raise ValueError(f"end_weight_decay={self.end_weight_decay} must not be negative; set none for no change")
        if self.checkpoint_async_steps and self.checkpoint_interval and self.checkpoint_async_steps > self.checkpoint_interval:
            raise ValueError(
                f"checkpoint_async_steps={self.checkpoint_async_steps} must be at most checkpoint_interval={self.checkpoint_interval}: "
                "one checkpoint is written at a time"
            )
        if self.dtype not in DTYPE_NAMES:
            raise ValueError(f"dtype={self.dtype!r} must be one of {', '.join(DTYPE_NAMES)}")
        if self.lr_schedule not in LR_SCHEDULES:
            raise ValueError(f"lr_schedule={self.lr_schedule!r} must be one of {', '.join(LR_SCHEDULES)}")
        if (self.lr_schedule == "wsd") != bool(self.wsd_decay_steps):
            raise ValueError(
                f"wsd_decay_steps={self.wsd_decay_steps} does not go with lr_schedule={self.lr_schedule!r}; wsd needs it, no other does"
            )
        if bool(self.local_checkpoint_interval) != bool(self.local_checkpoint_folder):
            raise ValueError(
                f"local_checkpoint_interval={self.local_checkpoint_interval} and local_checkpoint_folder={self.local_checkpoint_folder!r} "
                "go together; set both, the folder to memory or a disk of the node such as /dev/shm/mcore, or neither"
            )
        if self.batch_ramp_up and self.batch_steps:
            raise ValueError("batch_ramp_up and batch_steps both say how the batch grows; give one")
        self.batch_sizes()

    def batch_sizes(self) -> BatchSizeSchedule:
        """Sequences of each step."""
        if self.batch_steps:
            return BatchSizeSteps.parse(self.batch_steps)
        if self.batch_ramp_up is None:
            return ConstantBatchSize(global_batch_size=self.global_batch_size)
        start, increment, samples = self.batch_ramp_up
        return BatchRampUp(start=start, increment=increment, ramp_samples=samples, global_batch_size=self.global_batch_size)

    def stop_of(self, asked: Callable[[], bool] | None) -> Callable[[], bool]:
        """Whether a run that begins now is to end: somebody asked for it, or ``stop_after_minutes`` are over."""
        begin, limit_s = time.perf_counter(), 60 * self.stop_after_minutes
        return lambda: (asked is not None and asked()) or bool(limit_s and time.perf_counter() - begin > limit_s)
