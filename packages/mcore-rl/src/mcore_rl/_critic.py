# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The critic of PPO: a model of its own whose values are the baseline of each token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.models import ModelOutput, ValueHead
from mcore_parallel.optim import ConstantSchedule, Rate
from mcore_parallel.training import Batch, GradSync, LossReport, Optimizer, score
from mcore_rl._aggregation import weighted_report
from mcore_rl._objective._gae import GAEConfig
from mcore_rl._objective._kl import kl_estimate
from mcore_rl._stability import experimental_api

if TYPE_CHECKING:
    from mcore_rl._packing._trajectories import TrajectoryBatches


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ValueObjective:
    """max((V - R)^2, (clip(V) - R)^2) / 2 of each token, where V is clipped to its old value +- ``clip`` (PPO2 of OpenAI baselines).

    ``batch.extras`` holds [B, S] tensors aligned with ``labels``: ``returns`` and ``old_values``, and optionally ``loss_factors`` as of
    `GRPOObjective`.

    Raises:
        ValueError: a clip range that is not positive.
    """

    head: ValueHead | None
    """Of ``add_value_head``; None on stages before the last."""
    clip: float = 0.2
    """Largest change of a value that is rewarded, by all updates of an iteration; infinity for a squared error."""

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be positive; inf for no clipping")

    def values(self, output: ModelOutput, batch: Batch) -> Tensor:
        """[T], what ``score`` asks."""
        assert self.head is not None, "objectives are asked on the last stage"
        return self.head(output.hidden)

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        keep = batch.loss_mask.flatten() != 0
        value, old, target = (
            torch.where(keep, x, 0)
            for x in (self.values(output, batch), batch.extras["old_values"].flatten(), batch.extras["returns"].flatten())
        )
        squared, clipped = (value - target).square(), (value.clamp(old - self.clip, old + self.clip) - target).square()
        error = (target - value).detach()
        metrics = {
            "value": value.detach(),
            "value_clipped": clipped > squared,
            "value_error": error,
            "value_error_squared": error.square(),
            "return": target,
            "return_squared": target.square(),
        }
        factors = batch.extras.get("loss_factors")
        return weighted_report(torch.maximum(squared, clipped) / 2, metrics, batch, None if factors is None else factors.flatten())


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Critic:
    """The model that predicts returns on this rank, in the layout of the policy, and what updates it.

    Raises:
        ValueError: a learning rate that is not positive.
    """

    model: nn.Module
    """With a child ``value_head`` (``mcore_parallel.models.add_value_head``)."""
    objective: ValueObjective
    sync: GradSync
    optimizer: Optimizer
    lr: float
    """Of all its updates."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr={self.lr} of the critic must be positive and finite")

    def rate(self, policy_lr: float) -> float:
        """``lr``, at the step that the policy's rate says: layers whose expert bias follows a schedule ask for it."""
        return ConstantSchedule(max_lr=self.lr).lr(policy_lr.step) if isinstance(policy_lr, Rate) else self.lr

    def values(self, batches: Sequence[Batch], groups: ProcessGroups) -> list[Tensor]:
        """[B, S] a micro-batch, from a forward pass alone; the same on all ranks of a replica."""
        return score(self.model, batches, self.objective.values, groups=groups)


def token_rewards(written: "TrajectoryBatches", rewards: Sequence[float], kl_in_reward: float, kl_estimator: str) -> list[Tensor]:
    """Of the tokens that count of each rollout: its reward at the last one, and ``kl_in_reward`` times the divergence of old from ref taken
    from each."""
    own = [torch.zeros(len(part), dtype=torch.float64, device=part.device) for part in _counted(written, "old_values")]
    if kl_in_reward:
        pairs = zip(_counted(written, "old_logprobs"), _counted(written, "ref_logprobs"), strict=True)
        own = [-kl_in_reward * kl_estimate(old.double(), ref.double(), kl_estimator) for old, ref in pairs]
    for part, reward in zip(own, rewards, strict=True):
        part[-1:] += reward
    return own


def estimate(
    written: "TrajectoryBatches", rewards: Sequence[float], gae: GAEConfig, kl_in_reward: float, kl_estimator: str = "k1"
) -> list[tuple[Tensor, Tensor]]:
    """Advantages and returns of the tokens that count of each rollout."""
    return gae.estimate(token_rewards(written, rewards, kl_in_reward, kl_estimator), _counted(written, "old_values"))


def with_estimates(written: "TrajectoryBatches", estimates: Sequence[tuple[Tensor, Tensor]]) -> "TrajectoryBatches":
    """With ``advantages`` and ``returns`` [B, S] of those tokens in the extras, 0 elsewhere."""
    for name, parts in zip(("advantages", "returns"), zip(*estimates, strict=True) if estimates else ((), ()), strict=True):
        values = [torch.zeros_like(batch.loss_mask) for batch in written.batches]
        for place, part in zip(written.places, parts, strict=True):
            span = slice(place.start, place.start + place.num_labels)
            kept = written.batches[place.batch].loss_mask.flatten()[span] != 0
            values[place.batch].view(-1)[span][kept] = part.to(values[place.batch].dtype)
        written = written.with_extra(name, values)
    return written


def _counted(written: "TrajectoryBatches", name: str) -> list[Tensor]:
    """An extra of the tokens that count of each rollout."""
    masks = written.of_rollouts([batch.loss_mask for batch in written.batches])
    values = written.of_rollouts([batch.extras[name] for batch in written.batches])
    return [value[mask != 0] for value, mask in zip(values, masks, strict=True)]
