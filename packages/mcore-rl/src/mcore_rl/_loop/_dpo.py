# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pairs, updates, refit; again: direct preference optimisation."""

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.training import Batch, TrainReport
from mcore_rl._aggregation import Aggregation
from mcore_rl._config import GRPOConfig
from mcore_rl._loop._engine_share import draw_share
from mcore_rl._loop._loop import IterationReport, iteration_report
from mcore_rl._loop._policy_forward import check_policy_forward
from mcore_rl._loop._update import Learner, finish_parameters
from mcore_rl._lost import GroupPairs, check_all_lost, last_reason
from mcore_rl._memory import MemorySwitch
from mcore_rl._objective._advantage import AdvantageConfig
from mcore_rl._objective._preference import DPOObjective, pair_batches
from mcore_rl._packing._trajectories import BatchStyle
from mcore_rl._ranks._rendezvous import agree
from mcore_rl._reference import with_old_logprobs, with_ref_logprobs
from mcore_rl._refit._refit import WeightSink
from mcore_rl._refit._transfer import refit
from mcore_rl._rollouts._collect import Collection, Drawn, exchange, fitting, run_async, told_to_others
from mcore_rl._stability import experimental_api
from mcore_rl.agent import ContrastiveRollout, ContrastiveRolloutGenerator
from mcore_rl.inference import InferenceInterface

_log = logging.getLogger(__name__)
_GRACE_S = 60.0
"""After the time of pairs, for their generator to end with those that are there."""
_UNUSED: dict[str, Any] = {
    "advantage": AdvantageConfig(), "gae": None, "aggregation": Aggregation(), "packing": None, "kl_in_reward": 0.0, "overlong": None,
    "reward_clip": None, "mask_truncated": False, "filter_equal_groups": False, "old_logprobs": "trainer", "replay_old_routing": False,
}  # fmt: skip


@experimental_api
def dpo_iteration(
    config: GRPOConfig,
    *,
    pairs: ContrastiveRolloutGenerator,
    interface: InferenceInterface | None,
    engine: WeightSink | None,
    learner: Learner,
    lr: float,
) -> IterationReport:
    """One iteration of direct preference optimisation on every rank of ``learner.groups``.

    The ranks share ``config.num_groups`` pairs, each rank gets those that it trains on, and each update is one `train_step` of
    ``learner.objective``, a `DPOObjective`, beside ``learner.reference``. The rewards of the report are those of the answers in the pairs.

    Args:
        config: ``num_groups`` pairs, rows, updates; what is for advantages stays at its default, and so does ``memory`` without an engine.
        pairs: makes them (`BestAndWorst`), or has them (`PreferencePairs`).
        interface: answers; None where ``pairs`` asks nobody.
        engine: takes over the new weights; None where nobody is asked.
        learner: the policy, its objective, its optimizer and its reference.
        lr: learning rate.

    Raises:
        ValueError: what pairs cannot be trained with; names it.
        RankTimeoutError, RefitTimeoutError: a rank did not come; as of `grpo_iteration`.
        RuntimeError: the pairs of some rank failed, or it refused what it was to train on; there is none.
    """
    model, groups = learner.model, learner.groups
    parts = {"optimizer": learner.optimizer, "sync": learner.sync, "engine": engine}
    limit_s = config.rollout_timeout_s + learner.transfer.timeout_s

    def check() -> None:
        check_pairs(config, learner)
        if engine is None and config.memory != MemorySwitch():
            raise ValueError(f"memory={config.memory} has no effect without an engine; pass one, or leave it out")
        if engine is not None:
            config.memory.check(**parts)

    agree(groups.world, limit_s, "an iteration", check)
    begin = time.perf_counter()
    with told_to_others(groups.world):
        if engine is None:
            drawn = _draw(config, pairs, interface, engine, learner)
        else:
            config.memory.training(engine)
            with config.memory.generating(**parts):
                drawn = _draw(config, pairs, interface, engine, learner)
    collected = exchange(config, drawn, groups, next(model.parameters()).device, pairs=True, timeout_s=limit_s)
    rolled_out = time.perf_counter()
    updates = update_pairs(config, collected, learner, lr, timeout_s=learner.transfer.timeout_s)
    trained = time.perf_counter()
    if engine is not None:
        refit(model, groups, engine, learner.transfer)
    return iteration_report(
        config,
        collected,
        num_asked=2 * config.num_groups,
        updates=tuple(updates),
        rollout_s=rolled_out - begin,
        train_s=trained - rolled_out,
        refit_s=time.perf_counter() - trained,
    )


@experimental_api
def preference_margins(
    pairs: Sequence[ContrastiveRollout], learner: Learner, *, seq_len: int, micro_batch_size: int, num_pairs: int = 1
) -> Tensor:
    """[N] float64, (chosen - its reference) - (rejected - its reference) in log-probabilities; nothing is trained.

    Args:
        pairs: N of this data rank, not fewer on one rank of a replica than on another.
        learner: the policy, its `DPOObjective` and its reference.
        seq_len: positions of a row.
        micro_batch_size: rows of a batch, an even number.
        num_pairs: those of the data rank that has most: a fully sharded model needs as many batches on all.

    Raises:
        ValueError: pairs that make no batches, on the rank that has them.
        RuntimeError: they are another rank's; named.
        RankTimeoutError: a rank did not come within ``learner.transfer.timeout_s``; named.
    """
    objective, reference = learner.objective, learner.reference
    assert isinstance(objective, DPOObjective) and reference is not None
    style = BatchStyle(device=next(learner.model.parameters()).device)
    sizes = {"seq_len": seq_len, "micro_batch_size": micro_batch_size, "num_pairs": num_pairs, "style": style}
    batches = agree(learner.groups.world, learner.transfer.timeout_s, "pairs", partial(pair_batches, pairs, **sizes))
    batches = with_ref_logprobs(reference, batches, learner.groups, temperature=objective.temperature)
    batches = with_old_logprobs(learner.model, batches, learner.groups, temperature=objective.temperature)
    gaps = [batch.extras["old_logprobs"].double() - batch.extras["ref_logprobs"].double() for batch in batches]
    rewards = torch.cat([torch.where(batch.loss_mask != 0, gap, 0).sum(-1) for batch, gap in zip(batches, gaps, strict=True)])
    chosen, rejected = rewards.view(-1, 2)[: len(pairs)].unbind(-1)
    return chosen - rejected


def check_pairs(config: GRPOConfig, learner: Learner) -> DPOObjective:
    """What pairs are trained with, if they can be.

    Raises:
        ValueError: they cannot; names why.
    """
    objective = learner.objective
    if not isinstance(objective, DPOObjective):
        raise ValueError(f"objective is a {type(objective).__name__}; pairs are trained on with DPOObjective")
    check_policy_forward(learner.model)
    if learner.reference is None:
        raise ValueError("DPO compares with a frozen reference; pass Learner(reference=FrozenWeights(model)) or a second model")
    if learner.critic is not None or learner.teacher is not None:
        raise ValueError("DPO has neither critic nor teacher; leave them out of the Learner")
    if named := [name for name, default in _UNUSED.items() if getattr(config, name) != default]:
        raise ValueError(f"{named[0]}={getattr(config, named[0])} has no effect on pairs; leave it at its default")
    if config.micro_batch_size % 2:
        raise ValueError(f"micro_batch_size={config.micro_batch_size} must be even: the two answers of a pair lie in one micro-batch")
    if config.num_groups % config.num_mini_batches:
        raise ValueError(f"num_groups={config.num_groups} pairs must be divisible by num_mini_batches={config.num_mini_batches}")
    return objective


def _draw(
    config: GRPOConfig,
    pairs: ContrastiveRolloutGenerator,
    interface: InferenceInterface | None,
    engine: WeightSink | None,
    learner: Learner,
) -> Drawn:
    """The pairs of this rank, each a group of two."""

    def ask(num_pairs: int) -> Drawn:
        return run_async(ask_pairs(config, pairs, interface, num_pairs))

    return draw_share(interface, engine, learner.groups.world, config.num_groups, ask)


async def ask_pairs(config: GRPOConfig, pairs: ContrastiveRolloutGenerator, interface: InferenceInterface | None, num_pairs: int) -> Drawn:
    """Pairs of this rank, each a group of two, the chosen one first.

    Raises:
        TimeoutError: ``pairs`` does not end when its time is over.
        Exception: what ``pairs`` raised; or as of ``check_all_lost``.
    """
    generator: Any = interface
    limit_s, clock = config.rollout_timeout_s, asyncio.get_running_loop().time
    end = clock() + limit_s
    try:
        async with asyncio.timeout(limit_s + _GRACE_S) as limit:
            made = await pairs.get_contrastive_rollouts(generator, num_pairs=num_pairs, args=config.drawing_args, timeout_s=limit_s)
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"{num_pairs} pairs were not there within rollout_timeout_s={limit_s}; raise it") from error
    num_equal, num_unpaired = (made.num_equal, made.num_unpaired) if isinstance(made, GroupPairs) else (0, 0)
    late: TimeoutError | None = None
    if (missing := num_pairs - len(made) - num_unpaired) > 0 and clock() >= end:
        late = TimeoutError(f"{missing} of {num_pairs} pairs were not there within rollout_timeout_s={limit_s}; raise it")
        _log.warning("%s", late)
    drawn = [fitting(config, [pair.chosen, pair.rejected], interface) for pair in made]
    check_all_lost(drawn, len(made), is_alone=num_pairs == config.num_groups)
    own = [pair for pair in drawn if len(pair) == 2]
    return Drawn(groups=own, num_filtered=num_equal, num_unpaired=num_unpaired, lost=last_reason(drawn) or late)


def update_pairs(config: GRPOConfig, collected: Collection, learner: Learner, lr: float, *, timeout_s: float) -> list[TrainReport]:
    """All updates of one iteration, from the pairs of this rank."""
    objective, groups, reference = check_pairs(config, learner), learner.groups, learner.reference
    assert reference is not None
    style = BatchStyle(pad_id=config.pad_id, device=next(learner.model.parameters()).device)
    sizes = {"seq_len": config.seq_len, "micro_batch_size": config.micro_batch_size, "style": style}

    def written() -> list[list[Batch]]:
        parts = []
        for planned in collected.updates:
            own = [collected.rollouts[number] for number in planned.shares[groups.dp.rank]]
            pairs = [ContrastiveRollout(chosen=chosen, rejected=rejected) for chosen, rejected in zip(own[::2], own[1::2], strict=True)]
            parts.append(pair_batches(pairs, num_pairs=planned.num_rows // 2, **sizes))
        return parts

    on_all = agree(groups.world, timeout_s, "micro-batches", written)
    parts = [with_ref_logprobs(reference, batches, groups, temperature=objective.temperature) for batches in on_all]
    learner.model.train()
    reports = [learner.step(batches, objective, lr) for _ in range(config.num_epochs) for batches in parts]
    finish_parameters(learner)
    return reports
