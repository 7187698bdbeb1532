# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Roll out, judge, update, refit; again."""

import asyncio
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from mcore_parallel import ProcessGroups
from mcore_parallel.training import GradSync, Objective, Optimizer, TrainReport, train_step
from mcore_rl._advantage import group_relative_advantages
from mcore_rl._batches import rollout_batches
from mcore_rl._exchange import all_gather_json
from mcore_rl._refit import WeightSink, refit
from mcore_rl._types import GenericGenerationArgs, TokenRollout
from mcore_rl.agent import GroupedRolloutGenerator
from mcore_rl.inference import InferenceInterface


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Sizes of one iteration.

    Raises:
        ValueError: a group of one, from which nothing can be learnt, or a size below one.
    """

    num_groups: int
    """Problems an iteration, over all ranks."""
    group_size: int
    """Answers a problem."""
    seq_len: int
    """Positions of a training row; prompt and answer must fit."""
    micro_batch_size: int = 4
    generation_args: GenericGenerationArgs = field(default_factory=lambda: GenericGenerationArgs(temperature=1.0, max_tokens=32))
    std_norm: bool = True
    """Divide advantages by the standard deviation of their group."""
    pad_id: int = 0

    def __post_init__(self) -> None:
        for name in ("num_groups", "seq_len", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.group_size < 2:
            raise ValueError(f"group_size={self.group_size} must be at least 2: an answer is judged against its group")


@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """What one iteration did; the same on every rank."""

    mean_reward: float
    std_reward: float
    mean_length: float
    """Generated tokens an answer."""
    num_rollouts: int
    train: TrainReport
    rollout_s: float
    train_s: float
    refit_s: float


def grpo_iteration(
    config: GRPOConfig,
    *,
    agent: GroupedRolloutGenerator,
    interface: InferenceInterface,
    engine: WeightSink,
    model: nn.Module,
    groups: ProcessGroups,
    objective: Objective,
    sync: GradSync,
    optimizer: Optimizer,
    lr: float,
) -> IterationReport:
    """One iteration of group-relative policy optimisation on every rank of ``groups``.

    The ranks share the problems: each asks the engine it holds, then all see all answers. The update is one
    `train_step`, after which every engine receives the new weights.
    """
    device = next(model.parameters()).device
    begin = time.perf_counter()
    rollouts = _collect(config, agent, interface, groups, device)
    rolled_out = time.perf_counter()
    advantages = group_relative_advantages([[rollout.reward for rollout in group] for group in rollouts], std_norm=config.std_norm)
    flat = [rollout for group in rollouts for rollout in group]
    weights = [advantage for group in advantages for advantage in group]
    share = _share(len(flat), groups.dp.rank, groups.dp.size)
    batches = rollout_batches(
        flat[share], weights[share], seq_len=config.seq_len, micro_batch_size=config.micro_batch_size, pad_id=config.pad_id, device=device
    )
    model.train()
    train = train_step(model, batches, objective, sync, optimizer, lr=lr)
    trained = time.perf_counter()
    refit(model, groups, engine)
    rewards = torch.tensor([rollout.reward for rollout in flat], dtype=torch.float64)
    return IterationReport(
        mean_reward=rewards.mean().item(),
        std_reward=rewards.std(correction=0).item(),
        mean_length=sum(sum(rollout.generation_mask) for rollout in flat) / len(flat),
        num_rollouts=len(flat),
        train=train,
        rollout_s=rolled_out - begin,
        train_s=trained - rolled_out,
        refit_s=time.perf_counter() - trained,
    )


def _collect(
    config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, groups: ProcessGroups, device: torch.device
) -> list[list[TokenRollout]]:
    world = groups.world
    mine = len(range(world.rank, config.num_groups, world.size))

    async def ask() -> list[list[TokenRollout]]:
        stream = agent.get_grouped_rollouts(interface, num_groups=mine, size=config.group_size, args=config.generation_args)
        return [group async for group in stream]

    own = asyncio.run(ask())
    gathered = all_gather_json([[rollout.to_json() for rollout in group] for group in own], world, device)
    return [[TokenRollout.from_json(rollout) for rollout in group] for part in gathered for group in part]


def _share(count: int, rank: int, size: int) -> slice:
    """This data rank's rollouts; all ranks get equally many micro-batch rows, so the count must divide."""
    if count % size:
        raise ValueError(f"num_groups * group_size = {count} must be divisible by dp={size}")
    return slice(rank * count // size, (rank + 1) * count // size)
