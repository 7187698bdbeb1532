# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From judged rollouts to updated weights."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.comm import all_reduce
from mcore_parallel.pipeline import Overlap, Schedule
from mcore_parallel.training import Batch, GradSync, Objective, Optimizer, TrainReport, train_step
from mcore_rl._config import GRPOConfig
from mcore_rl._critic import Critic, estimate, with_estimates
from mcore_rl._objective._correction import MismatchReport, MismatchTotals
from mcore_rl._objective._kl import kl_estimate
from mcore_rl._objective._objective import GRPOObjective
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._packing._packed import write_bins
from mcore_rl._packing._trajectories import BatchStyle, TrajectoryBatches, place_rows, routed_afresh, write_batches
from mcore_rl._ranks._rendezvous import agree
from mcore_rl._reference import FrozenWeights, logprobs_and_routing, token_logprobs
from mcore_rl._refit._transfer import WeightTransfer
from mcore_rl._rollouts._collect import Collection
from mcore_rl._stability import experimental_api

if TYPE_CHECKING:
    from mcore_parallel.training.distill import Teacher


@experimental_api
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
    reference: "nn.Module | FrozenWeights | None" = None
    """A frozen model of the same layout, or frozen weights of this one, for ``kl_beta`` and ``kl_in_reward``."""
    critic: Critic | None = None
    """Of PPO, where ``GRPOConfig.gae`` asks for one."""
    teacher: "Teacher | None" = None
    """Of on-policy distillation: it reads the policy's own answers, and a `DistillationObjective` compares the two at each token."""
    transfer: WeightTransfer = field(default_factory=WeightTransfer)
    """Carries the weights to the engines, by a plan that it keeps."""
    pipeline: Schedule | None = None
    """Of the updates, the critic's too (``PipelineConfig.build``, kept over the steps); None for one forward, one backward."""
    overlap: Overlap | None = None
    """Interleaves the pairs of a ``combined_one_f_one_b`` of the policy, whose layers have its ``pause``."""

    def step(self, batches: Sequence[Batch], objective: Objective, lr: float) -> TrainReport:
        """One update of the policy."""
        return train_step(
            self.model,
            batches,
            objective,
            self.sync,
            self.optimizer,
            lr=lr,
            pipeline=self.pipeline,
            overlap=self.overlap,
        )


@dataclass(frozen=True)
class MiniBatch:
    """This rank's share of the rollouts of one update."""

    numbers: list[int]
    """Of this rank's rollouts, among all."""
    written: TrajectoryBatches


@dataclass(frozen=True, kw_only=True)
class Updates:
    """What the updates of one iteration did, and seconds of what came before the first of them."""

    policy: tuple[TrainReport, ...]
    critic: tuple[TrainReport, ...]
    pack_s: float
    """Until the rollouts were in micro-batches on the device."""
    score_s: float
    """Until the log-probabilities and values that they need were queued."""
    mismatch: MismatchReport | None = None
    """Of all tokens, before the first of the updates that learn from them; None where nothing is compared with an engine."""


def mini_batches(config: GRPOConfig, collected: Collection, groups: ProcessGroups) -> list[MiniBatch]:
    """The rollouts of all updates on the host, with their advantages where these take no log-probabilities; needs no device and no other
    rank, so that a thread may write them while something else is trained on.

    Args:
        config: sizes, advantages, aggregation.
        collected: what all ranks drew.
        groups: the layout of the policy.
    """
    style = BatchStyle(pad_id=config.pad_id, aggregation=config.aggregation, mask_truncated=config.mask_truncated)
    parts = _mini_batches(config, collected, groups, style)
    return parts if _needs_scores(config) else _with_advantages(parts, _advantages(config, collected, parts, groups))


def update(
    config: GRPOConfig,
    collected: Collection,
    learner: Learner,
    lr: float,
    *,
    train_policy: bool = True,
    written: Callable[[], Sequence[MiniBatch]] | None = None,
    timeout_s: float | None = None,
) -> Updates:
    """All updates of one iteration, of the policy and of the critic, on every rank of the layout.

    Old log-probabilities are computed when rollouts are trained on more than once, unless they are the engine's
    (``config.old_logprobs``), and the reference's where a divergence from it is asked for. With ``config.replay_old_routing`` the updates
    replay the routing of the former.

    Args:
        config: sizes, advantages, aggregation.
        collected: what all ranks drew.
        learner: the policy.
        lr: learning rate of the policy.
        train_policy: False leaves the policy as it is.
        written: gives ``mini_batches`` of these rollouts; None to write them here.
        timeout_s: limit of waiting for the others to have written theirs; None for that of ``learner.transfer``.

    Raises:
        RuntimeError: another rank cannot write its micro-batches; named. None has begun an update then.
        RankTimeoutError: a rank did not come within ``timeout_s``; named.
    """
    begin = time.perf_counter()
    device = next(learner.model.parameters()).device

    def prepared() -> list[MiniBatch]:
        on_host = mini_batches(config, collected, learner.groups) if written is None else written()
        return [MiniBatch(part.numbers, part.written.on(device)) for part in on_host]

    limit_s = learner.transfer.timeout_s if timeout_s is None else timeout_s
    parts = agree(learner.groups.world, limit_s, "micro-batches", prepared)
    packed = time.perf_counter()
    parts = [_score(config, part, learner) for part in parts]
    if config.gae is not None:
        parts = _estimated(config, collected.headers, parts, learner.groups)
    elif _needs_scores(config):
        parts = _with_advantages(parts, _advantages(config, collected, parts, learner.groups))
    scored = time.perf_counter()
    critic, teacher, reports, critic_reports = learner.critic, learner.teacher, [], []
    learner.model.train()
    objective, totals = learner.objective, None
    # Old log-probabilities of the engine are its own: there is nothing to compare.
    if train_policy and isinstance(objective, GRPOObjective) and config.old_logprobs != "inference":
        totals = MismatchTotals(device)
        objective = dataclasses.replace(objective, observe=_both(totals.add, objective.observe))
    for number, part in enumerate([part for _ in range(config.num_epochs) for part in parts]):
        if number == len(parts):
            objective = learner.objective
        batches = part.written.batches if teacher is None else _labelled(teacher, part.written.batches)
        if train_policy:
            reports.append(learner.step(batches, objective, lr))
        if critic is not None:
            critic.model.train()
            critic_reports.append(
                train_step(
                    critic.model,
                    routed_afresh(batches),
                    critic.objective,
                    critic.sync,
                    critic.optimizer,
                    lr=critic.rate(lr),
                    groups=learner.groups,
                    pipeline=learner.pipeline,
                )
            )
    finish_parameters(learner)
    return Updates(
        policy=tuple(reports),
        critic=tuple(critic_reports),
        pack_s=packed - begin,
        score_s=scored - packed,
        mismatch=None if totals is None else totals.report(learner.groups.world),
    )


@runtime_checkable
class _GathersParameters(Protocol):
    """Replicas that gather what each has updated; it may be on its way until the next forward."""

    def finish_param_sync(self) -> None: ...


def finish_parameters(learner: Learner) -> None:
    """Wait until the policy is whole: what comes after an update reads it outside of a forward."""
    if isinstance(learner.sync, _GathersParameters):
        learner.sync.finish_param_sync()


def _needs_scores(config: GRPOConfig) -> bool:
    """Whether advantages are computed from log-probabilities or values."""
    return config.gae is not None or config.kl_in_reward != 0


def _with_advantages(parts: Sequence[MiniBatch], advantages: Sequence[float]) -> list[MiniBatch]:
    return [MiniBatch(part.numbers, part.written.with_advantages([advantages[i] for i in part.numbers])) for part in parts]


def _labelled(teacher: "Teacher", batches: Sequence[Batch]) -> list[Batch]:
    """This context-parallel rank's shares with what the teacher, which routes for itself, makes of them."""
    shares = [batch.context_share(teacher.groups.cp) for batch in batches]
    labelled = teacher.label(routed_afresh(shares))
    return [dataclasses.replace(theirs, extras={**batch.extras, **theirs.extras}) for batch, theirs in zip(shares, labelled, strict=True)]


def _mini_batches(config: GRPOConfig, collected: Collection, groups: ProcessGroups, style: BatchStyle) -> list[MiniBatch]:
    """This rank's share of each update."""
    parts = []
    for planned in collected.updates:
        numbers = planned.shares[groups.dp.rank]
        own = [collected.rollouts[number] for number in numbers]
        if config.packing is not None and planned.bins is not None:
            rollouts = {number - planned.begin: rollout for number, rollout in zip(numbers, own, strict=True)}
            parts.append(MiniBatch(numbers, write_bins(planned.bins, rollouts, config.packing, style, groups.dp.rank)))
            continue
        places, shape = place_rows(own, config.seq_len, config.micro_batch_size, planned.num_rows)
        parts.append(MiniBatch(numbers, TrajectoryBatches(batches=write_batches(own, places, shape, style), places=places)))
    return parts


def _score(config: GRPOConfig, part: MiniBatch, learner: Learner) -> MiniBatch:
    """With the log-probabilities that the update needs beside the engine's."""
    written, batches = part.written, part.written.batches
    if config.old_logprobs == "inference":
        written = written.with_extra("old_logprobs", [batch.extras["inference_logprobs"] for batch in batches])
    elif config.replay_old_routing:
        written = _with_own_routing(config, written, learner)
    elif config.num_updates > 1 or config.kl_in_reward:
        old = token_logprobs(learner.model, batches, learner.groups, temperature=config.temperature)
        written = written.with_extra("old_logprobs", old)
    if learner.reference is not None and _reads_reference(config, learner.objective):
        reference = token_logprobs(learner.reference, routed_afresh(batches), learner.groups, temperature=config.temperature)
        written = written.with_extra("ref_logprobs", reference)
    if learner.critic is not None:
        written = written.with_extra("old_values", learner.critic.values(routed_afresh(batches), learner.groups))
    return MiniBatch(part.numbers, written)


def _with_own_routing(config: GRPOConfig, written: TrajectoryBatches, learner: Learner) -> TrajectoryBatches:
    """With old log-probabilities, and the routing that they were computed with in the place of an engine's.

    Raises:
        ValueError: no layer of the model routes tokens.
    """
    written = dataclasses.replace(written, batches=routed_afresh(written.batches))
    old, routed = logprobs_and_routing(learner.model, written.batches, learner.groups, temperature=config.temperature)
    experts = [own for own in routed if own is not None]
    routes = torch.tensor([float(bool(experts))], device=written.batches[0].tokens.device)
    if not all_reduce(routes, learner.groups.pp, op="max").item():
        raise ValueError("replay_old_routing=True, and no layer of the model routes tokens; set it to False")
    # A stage of a pipeline may hold dense layers alone.
    written = written.with_extra("routed_experts", experts) if experts else written
    return written.with_extra("old_logprobs", old)


def _reads_reference(config: GRPOConfig, objective: Objective) -> bool:
    """Whether anything comes of the reference's log-probabilities; an objective of another kind may read them."""
    if config.kl_in_reward:
        return True
    return objective.kl_beta != 0 if isinstance(objective, GRPOObjective) else not is_distillation(objective)


def is_distillation(objective: Objective) -> bool:
    """Whether the policy learns from a teacher."""
    from mcore_parallel.training.distill import DistillationObjective

    return isinstance(objective, DistillationObjective)


def _advantages(config: GRPOConfig, collected: Collection, parts: Sequence[MiniBatch], groups: ProcessGroups) -> list[float]:
    """One a rollout, in order, the same on every rank."""
    rewards = [[_shaped(config, header) for header in group] for group in collected.groups]
    if config.kl_in_reward:
        taken = iter(_kl_sums(sum(map(len, rewards)), parts, groups, config.kl_in_reward_estimator))
        rewards = [[reward - config.kl_in_reward * next(taken) for reward in group] for group in rewards]
    env_ids = [group[0].env_id if group else "" for group in collected.groups]
    return [advantage for group in config.advantage.advantages(rewards, env_ids) for advantage in group]


def _estimated(config: GRPOConfig, headers: Sequence[RolloutHeader], parts: Sequence[MiniBatch], groups: ProcessGroups) -> list[MiniBatch]:
    """With advantages and returns of each token; the advantages are whitened over those of all parts and ranks."""
    assert config.gae is not None
    estimates = [
        estimate(
            part.written,
            [_shaped(config, headers[i]) for i in part.numbers],
            config.gae,
            config.kl_in_reward,
            config.kl_in_reward_estimator,
        )
        for part in parts
    ]
    if config.gae.whiten and parts:
        device = parts[0].written.batches[0].tokens.device
        none = torch.empty(0, dtype=torch.float64, device=device)
        own = torch.cat([none, *(advantages for some in estimates for advantages, _ in some)])
        total, count = all_reduce(torch.stack([own.sum(), own.new_tensor(float(len(own)))]), groups.dp).unbind(0)
        mean = total / count
        scale = (all_reduce((own - mean).square().sum().reshape(1), groups.dp)[0] / count).sqrt() + 1e-8
        estimates = [[((advantages - mean) / scale, returns) for advantages, returns in some] for some in estimates]
    return [MiniBatch(part.numbers, with_estimates(part.written, some)) for part, some in zip(parts, estimates, strict=True)]


def _both(first: Callable[..., None], second: Callable[..., None] | None) -> Callable[..., None]:
    def call(*inputs: Tensor) -> None:
        first(*inputs)
        if second is not None:
            second(*inputs)

    return call


def _shaped(config: GRPOConfig, header: RolloutHeader) -> float:
    return config.clipped(header.reward) + (0.0 if config.overlong is None else config.overlong(header.num_generated))


def _kl_sums(count: int, parts: Sequence[MiniBatch], groups: ProcessGroups, estimator: str) -> list[float]:
    """Sum of the divergence of old from ref over the tokens that count of each rollout, those of all ranks."""
    sums = [0.0] * count
    for part in parts:
        gaps = []
        for batch in part.written.batches:
            old, reference = batch.extras["old_logprobs"].double(), batch.extras["ref_logprobs"].double()
            gaps.append(torch.where(batch.loss_mask != 0, kl_estimate(old, reference, estimator), 0))
        for number, gap in zip(part.numbers, part.written.of_rollouts(gaps), strict=True):
            sums[number] = gap.sum().item()
    device = parts[0].written.batches[0].tokens.device if parts else "cpu"
    return all_reduce(torch.tensor(sums, dtype=torch.float64, device=device), groups.dp).tolist()
