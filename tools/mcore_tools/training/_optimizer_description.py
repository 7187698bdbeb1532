# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each step says of its optimizer and its rates, so that another system can go on with it."""

from collections.abc import Mapping
from typing import Any

from mcore_parallel.training import ConstantBatchSize
from mcore_tools.assembly import schedule
from mcore_tools.recipes import RunConfig

_FIELDS = ("optimizer", "lr", "min_lr", "decoupled_lr", "weight_decay", "decoupled_weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "inverse_square_root": "inverse-square-root", "wsd": "WSD"}


def describe_optimizer(config: RunConfig) -> dict[str, Any]:
    """Settings of a run's optimizer, under the name by which `export_checkpoint_megatron` takes them from a checkpoint."""
    settings = {name: getattr(config.optimizer, name) for name in _FIELDS}
    settings["param_groups"] = [list(group.patterns) for group in config.optimizer.param_groups]
    return {"optimizer_config": {**settings, "expert_model_parallel_size": config.plan.ep}}


def describe_rates(config: RunConfig, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The learning rate of the next step, and the schedule in samples as Megatron-LM counts it; of a growing batch the rate alone.

    Args:
        config: the run.
        extra: of the step, with the trainer's state.
    """
    train, optimizer, position = config.train, config.optimizer, extra["trainer"]
    updates = position["step"] - position["skipped_steps"]
    rates: dict[str, Any] = {"learning_rate": float(schedule(config).lr(updates))}
    sizes = train.batch_sizes()
    if isinstance(sizes, ConstantBatchSize):
        samples = sizes.global_batch_size
        rates["opt_param_scheduler"] = {
            "max_lr": optimizer.lr,
            "min_lr": optimizer.min_lr,
            "lr_warmup_steps": train.warmup_steps * samples,
            "num_steps": updates * samples,
            "lr_decay_style": _STYLES[train.lr_schedule],
            "lr_decay_steps": (train.lr_decay_steps or train.steps) * samples,
            "start_wd": optimizer.weight_decay,
            "end_wd": optimizer.weight_decay if train.end_weight_decay is None else train.end_weight_decay,
            "wd_incr_style": "constant" if train.end_weight_decay is None else train.weight_decay_style,
            "wd_incr_steps": train.steps * samples,
        }
    return rates
