# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a run can be refused for before anything is written: its folder, world, pace, backend and loggers."""

import os
from pathlib import Path

from mcore_ckpt import CheckpointManager
from mcore_parallel import load_communicator_options
from mcore_parallel.backends import choose_backend
from mcore_tools.assembly import schedule
from mcore_tools.recipes import RunConfig
from mcore_tools.training._folder import check_log


def check_run(config: RunConfig, owner: str = "", *, paced: bool = True) -> None:
    """Refuse a run that cannot begin here.

    Args:
        config: the run.
        owner: stands before its fields where another config holds it.
        paced: its number of steps is known.

    Raises:
        ValueError: names the field, its value and a remedy.
    """
    check_output(config.output, f"{owner}output")
    check_log(config.log, owner)
    check_world(config, owner)
    if paced:
        _check_pace(config, owner)
    if config.communicators:
        try:
            load_communicator_options(config.communicators)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{owner}communicators={config.communicators!r} cannot be read: {error}; name a file with options of NCCL's groups"
            ) from None
    if config.backend != "torch":
        try:
            choose_backend(config.backend, fp8=config.fp8)
        except RuntimeError as error:
            raise ValueError(f"{owner}{error}") from None


def check_output(folder: str | Path, field: str) -> None:
    """Refuse a folder that cannot be made, or written to; ``field`` named it."""
    path = Path(os.path.abspath(folder))
    there = next(part for part in (path, *path.parents) if part.exists())
    if not there.is_dir():
        raise ValueError(f"{field}={str(folder)!r} can be no folder: {there} is a file; name another")
    if not os.access(there, os.W_OK):
        raise ValueError(f"{field}={str(folder)!r} cannot be written: {there} is read-only here; name another")


def check_trained(config: RunConfig, field: str, remedy: str) -> None:
    """Refuse a run whose weights are to be those of its newest step where it has none; ``field`` named its folder."""
    if not config.load.path and CheckpointManager(Path(config.output) / "checkpoints").latest() is None:
        raise ValueError(f"{field}={config.output!r} holds no checkpoint; {remedy}")


def check_world(config: RunConfig, owner: str = "") -> None:
    """Refuse a plan, and engines on ranks of their own beside it, of more or fewer ranks than were started."""
    plan, size = config.plan, int(os.environ.get("WORLD_SIZE", "1"))
    if config.rl is not None and config.rl.placement is not None:
        engines = config.rl.placement.num_engines
        count = plan.world_size + engines
        if count != size:
            raise ValueError(
                f"{plan.world_size} ranks of {owner}plan and {owner}rl.placement.num_engines={engines} are {count}, but the world has "
                f"{size}; start {count} with torchrun"
            )
    elif plan.world_size != size:
        degrees = " * ".join(f"{owner}plan.{axis}={getattr(plan, axis)}" for axis in ("tp", "cp", "dp", "pp"))
        count = plan.world_size
        dp, left = divmod(size, plan.tp * plan.cp * plan.pp)
        remedy = "lower a degree" if count > size else "raise a degree" if left else f"set {owner}plan.dp={dp}"
        raise ValueError(f"{degrees} = {count} ranks, but the world has {size}; {remedy}, or start {count} with torchrun")


def _check_pace(config: RunConfig, owner: str) -> None:
    """Refuse learning rates that do not fit into the steps."""
    train = config.train
    name = "lr_decay_steps" if train.lr_decay_steps else "steps"
    end = getattr(train, name)
    if train.lr_schedule != "constant" and end <= train.warmup_steps:
        raise ValueError(
            f"{owner}train.{name}={end} must exceed {owner}train.warmup_steps={train.warmup_steps}; "
            f"set {owner}train.warmup_steps={end // 10}, or raise the steps"
        )
    if train.wsd_decay_steps > (longest := end - train.warmup_steps):
        raise ValueError(
            f"{owner}train.wsd_decay_steps={train.wsd_decay_steps} must be at most {owner}train.{name}={end} less "
            f"{owner}train.warmup_steps={train.warmup_steps}; set it to {longest} or less"
        )
    if train.warmup_init_lr > config.optimizer.lr:
        raise ValueError(
            f"{owner}train.warmup_init_lr={train.warmup_init_lr} must be at most {owner}optimizer.lr={config.optimizer.lr}, to which it "
            "rises"
        )
    schedule(config)
