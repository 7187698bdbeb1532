# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Roll out, judge, update, refit; again."""

import asyncio
import logging
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from mcore_parallel import ProcessGroups
from mcore_parallel.training import GradSync, Objective, Optimizer, TrainReport, train_step
from mcore_rl._advantage import group_relative_advantages
from mcore_rl._batches import rollout_batches
from mcore_rl._exchange import all_gather_json
from mcore_rl._objective import GRPOObjective
from mcore_rl._reference import with_ref_logprobs
from mcore_rl._refit import WeightSink, refit
from mcore_rl._types import GenericGenerationArgs, TokenRollout
from mcore_rl.agent import GroupedRolloutGenerator
from mcore_rl.inference import InferenceInterface

_log = logging.getLogger(__name__)


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
    rollout_timeout_s: float = 7200.0
    """Limit of all rollouts of an iteration; groups that are not there by then are dropped."""
    pad_id: int = 0

    def __post_init__(self) -> None:
        for name in ("num_groups", "seq_len", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.group_size < 2:
            raise ValueError(f"group_size={self.group_size} must be at least 2: an answer is judged against its group")
        if not self.rollout_timeout_s > 0:
            raise ValueError(f"rollout_timeout_s={self.rollout_timeout_s} must be positive")
        if self.temperature == 0:
            raise ValueError("temperature=0 in generation_args draws the same answer every time; choose one above 0")

    @property
    def temperature(self) -> float:
        """At which answers are drawn."""
        return 1.0 if self.generation_args.temperature is None else self.generation_args.temperature


@dataclass(frozen=True, kw_only=True)
class Learner:
    """The policy on this rank, and what updates it."""

    model: nn.Module
    groups: ProcessGroups
    """The layout of the model."""
    objective: Objective
    sync: GradSync
    """Of the model's gradients."""
    optimizer: Optimizer
    reference: nn.Module | None = None
    """A frozen model of the same layout, for an objective with ``kl_beta``; its log-probabilities are computed before the update."""


@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """What one iteration did; the same on every rank."""

    mean_reward: float
    std_reward: float
    mean_length: float
    """Generated tokens an answer."""
    num_rollouts: int
    num_dropped: int
    """Answers asked for that are missing: late, or their judge failed."""
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
    learner: Learner,
    lr: float,
) -> IterationReport:
    """One iteration of group-relative policy optimisation on every rank of ``learner.groups``.

    The ranks share the problems: each asks the engine it holds, then all see all answers. The update is one
    `train_step`, after which every engine receives the new weights.

    Args:
        config: sizes.
        agent: poses problems and judges.
        interface: answers.
        engine: takes over the new weights.
        learner: the policy, its objective and its optimizer.
        lr: learning rate.

    Raises:
        ValueError: what cannot be trained on, before anything is generated; a reward that is no finite number.
        RuntimeError: rollouts failed on some rank, or none is there in time.
    """
    _check(config, learner)
    model, groups = learner.model, learner.groups
    device = next(model.parameters()).device
    begin = time.perf_counter()
    rollouts = _collect(config, agent, interface, groups, device)
    rolled_out = time.perf_counter()
    advantages = group_relative_advantages([[rollout.reward for rollout in group] for group in rollouts], std_norm=config.std_norm)
    flat = [rollout for group in rollouts for rollout in group]
    weights = [advantage for group in advantages for advantage in group]
    share, num_rows = _share(len(flat), groups.dp.rank, groups.dp.size)
    batches = rollout_batches(
        flat[share],
        weights[share],
        seq_len=config.seq_len,
        micro_batch_size=config.micro_batch_size,
        num_rows=num_rows,
        pad_id=config.pad_id,
        device=device,
    )
    if learner.reference is not None:
        batches = with_ref_logprobs(learner.reference, batches, groups, temperature=config.temperature)
    model.train()
    train = train_step(model, batches, learner.objective, learner.sync, learner.optimizer, lr=lr)
    trained = time.perf_counter()
    refit(model, groups, engine)
    rewards = torch.tensor([rollout.reward for rollout in flat], dtype=torch.float64)
    return IterationReport(
        mean_reward=rewards.mean().item(),
        std_reward=rewards.std(correction=0).item(),
        mean_length=sum(sum(rollout.generation_mask) for rollout in flat) / len(flat),
        num_rollouts=len(flat),
        num_dropped=config.num_groups * config.group_size - len(flat),
        train=train,
        rollout_s=rolled_out - begin,
        train_s=trained - rolled_out,
        refit_s=time.perf_counter() - trained,
    )


def _check(config: GRPOConfig, learner: Learner) -> None:
    """Whether an iteration can be trained on, before it is generated."""
    objective, reference, groups = learner.objective, learner.reference, learner.groups
    count = config.num_groups * config.group_size
    if count % groups.dp.size:
        raise ValueError(f"num_groups * group_size = {count} must be divisible by dp={groups.dp.size}")
    layout = getattr(reference, "groups", groups)
    if layout is not groups and layout.plan != groups.plan:
        raise ValueError(f"reference has the layout {layout.plan}, the model {groups.plan}; build both in one layout")
    if not isinstance(objective, GRPOObjective):
        return
    if objective.kl_beta and reference is None:
        raise ValueError(f"kl_beta={objective.kl_beta} needs a frozen reference model; pass reference, or set kl_beta=0")
    if objective.temperature != config.temperature:
        raise ValueError(
            f"objective.temperature={objective.temperature} must be that of generation_args, {config.temperature}: "
            "the policy that is trained is the one that draws"
        )


def _collect(
    config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, groups: ProcessGroups, device: torch.device
) -> list[list[TokenRollout]]:
    """The groups of all ranks; where one of them failed, all raise."""
    world = groups.world
    own: list[list[TokenRollout]] = []
    failure: Exception | None = None
    try:
        own = asyncio.run(_ask(config, agent, interface, len(range(world.rank, config.num_groups, world.size))))
    except Exception as error:
        failure = error
    # A rank that raised at once would leave the others waiting for it.
    sent = {"failure": failure and repr(failure), "groups": [[rollout.to_json() for rollout in group] for group in own]}
    gathered = all_gather_json(sent, world, device)
    if failure is not None:
        raise failure
    if failed := {rank: part["failure"] for rank, part in enumerate(gathered) if part["failure"] is not None}:
        raise RuntimeError(f"rollouts failed on other ranks: {failed}")
    rollouts = [[TokenRollout.from_json(rollout) for rollout in group] for part in gathered for group in part["groups"]]
    if not any(rollouts):
        raise RuntimeError(
            f"no rollout of {config.num_groups} groups of {config.group_size} is left: all came late (rollout_timeout_s="
            f"{config.rollout_timeout_s}) or lost their judge; the log names each"
        )
    return rollouts


async def _ask(
    config: GRPOConfig, agent: GroupedRolloutGenerator, interface: InferenceInterface, num_groups: int
) -> list[list[TokenRollout]]:
    """This rank's groups, as many as are there in time."""
    groups: list[list[TokenRollout]] = []
    stream = agent.get_grouped_rollouts(interface, num_groups=num_groups, size=config.group_size, args=config.generation_args)
    try:
        async with asyncio.timeout(config.rollout_timeout_s) as limit:
            async for group in stream:
                groups.append(group)
    except TimeoutError:
        if not limit.expired():
            raise
        missing = num_groups - len(groups)
        _log.warning("%d of %d groups are dropped, not there within rollout_timeout_s=%s", missing, num_groups, config.rollout_timeout_s)
    return groups


def _share(count: int, rank: int, size: int) -> tuple[slice, int]:
    """This data rank's rollouts, and the rows of each rank: answers may be missing, but all ranks have as many micro-batches."""
    return slice(rank * count // size, (rank + 1) * count // size), -(-count // size)
