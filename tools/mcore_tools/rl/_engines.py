# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines on the ranks that train, each whole on one of them or divided over several."""

from collections.abc import Iterable

import torch.distributed as dist

from mcore_inference import EngineDeadError, LockstepConfig
from mcore_parallel import Group, ProcessGroups
from mcore_parallel.guard import Watchdog
from mcore_tools.assembly import build_groups
from mcore_tools.recipes import RunConfig


def asks_engine(config: RunConfig) -> bool:
    """Whether this rank poses problems to its engine; the others of one that has several ranks follow it."""
    assert config.rl is not None
    return (dist.get_rank() if dist.is_initialized() else 0) % config.rl.engine_tp == 0


def engine_groups(config: RunConfig) -> ProcessGroups | None:
    """The groups of engines over several ranks, on every rank of the run; None where each rank has an engine of its own."""
    assert config.rl is not None
    return None if config.rl.engine_tp == 1 else build_groups(config, config.engine_plan)


def engine_patience(config: RunConfig) -> LockstepConfig:
    """With the ranks of an engine: as long as with those of a step of training. One that dies is named at once."""
    limit_s = config.guard.limit_s
    return LockstepConfig(join_timeout_s=limit_s, silence_timeout_s=limit_s, step_timeout_s=limit_s)


def sampling_limit_s(config: RunConfig) -> float:
    """Of an evaluation, for what it draws after its most likely answers, which have as long."""
    assert config.rl is not None
    return config.rl.rollout_timeout_s if config.rl.eval_samples else 0.0


def watched(config: RunConfig, numbers: range, watchdog: Watchdog | None) -> Iterable[int]:
    """The numbers of iterations, watched by ``guard``: a rank may wait for answers, or follow its engine's first one, for as long as the
    limits of answers say, with neither step nor collective of training."""
    assert config.rl is not None
    if watchdog is None:
        return numbers
    placement = config.rl.placement
    answers_s = config.rl.rollout_timeout_s if placement is None else placement.timeout_s
    return watchdog.watch(numbers, start=numbers.start, wait_s=config.guard.limit_s + answers_s + sampling_limit_s(config))


def sharing_engines(groups: ProcessGroups | None, world: Group) -> Group:
    """The engines that share the problems; this rank's is number ``rank`` of ``size``."""
    return world if groups is None else groups.dp


def step_may_hang(error: BaseException | None) -> bool:
    """Whether ranks may wait on their devices for one that is lost, or are in a step that nobody waits for, now that a run ends so."""
    is_interrupt = error is not None and not isinstance(error, Exception)
    return is_interrupt or isinstance(error, EngineDeadError | TimeoutError | dist.DistError)
