# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The losses of policy optimisation as one objective."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_parallel.models import ModelOutput
from mcore_parallel.training import Batch, LossReport
from mcore_rl._aggregation import weighted_report
from mcore_rl._fields import check_finite
from mcore_rl._objective._correction import ImportanceCorrection, mismatch
from mcore_rl._objective._kl import MAX_LOG_RATIO, check_estimator, kl_estimate
from mcore_rl._objective._policy_loss import PolicyLossConfig
from mcore_rl._objective._sequences import Sequences
from mcore_rl._stability import experimental_api

_EXTRAS = ("advantages", "inference_logprobs", "old_logprobs", "ref_logprobs")


def calculate_grpo_loss(
    current_logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    clamp_eps_lower: float,
    clamp_eps_upper: float,
    kl_beta: float,
    entropy_weight: float,
    inference_logprobs: Tensor | None = None,
    is_truncation_coef: float | None = None,
    entropy: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Per-token loss -w * min(r A, clip(r) A) + beta * kl - lambda * entropy (Shao et al. 2024, equation 3).

    r = exp(current - old), clipped to [1 - lower, 1 + upper]; kl is the estimator e^d - d - 1 with d = ref - current;
    w = exp(old - inference), without gradient and cut at ``is_truncation_coef``, corrects for an engine whose numerics
    differ from the trainer's; ``entropy`` is that of each token's distribution, and where it is None the sampled term -p log p, a
    biased estimate. All tensors share one shape and are float32 or wider; log-ratios are limited to +-20 before the exponential.

    Returns:
        loss, kl, r, entropy, and the bool masks of r beyond the upper and below the lower bound.
    """
    ratio = (current_logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    above, below = ratio > 1 + clamp_eps_upper, ratio < 1 - clamp_eps_lower
    policy = PolicyLossConfig(clip_low=clamp_eps_lower, clip_high=clamp_eps_upper).losses(current_logprobs, advantages, ratio)
    if inference_logprobs is not None:
        weight = (old_logprobs - inference_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        policy = policy * (weight if is_truncation_coef is None else weight.clamp(max=is_truncation_coef))
    kl = torch.zeros_like(ratio) if ref_logprobs is None else kl_estimate(current_logprobs, ref_logprobs)
    if entropy is None:
        entropy = -current_logprobs.exp() * current_logprobs.clamp(min=-1e4)
    return kl_beta * kl + policy - entropy_weight * entropy, kl, ratio, entropy, above, below


@experimental_api
@dataclass(frozen=True, kw_only=True)
class GRPOObjective:
    """An objective for `mcore_parallel.training.train_step`: the batch carries advantages and log-probabilities.

    Each token's loss is w * policy + kl_beta * kl - entropy_weight * entropy, with the importance weight w of ``correction``. The policy
    is the model's distribution at ``temperature``; all log-probabilities are of that. A token counts by its weight in
    ``batch.loss_mask``, and one of weight 0 may hold anything.

    ``batch.extras`` holds [B, S] tensors aligned with ``labels``: ``advantages``, ``inference_logprobs`` (NaN where the engine gave none,
    whose weight is 1), and optionally ``old_logprobs`` (else the current ones without gradient, right for one update a rollout),
    ``ref_logprobs``, and ``loss_factors``, which multiply the losses but not what their sum is divided by (`rollout_batches` sets them from
    its `Aggregation`).

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> GRPOObjective(policy=PolicyLossConfig(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4)).policy.kind
        'clip'
    """

    policy: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    """Clipping, ratios, dual clip."""
    kl_beta: float = 0.0
    """Of the divergence in the loss; 0 needs no reference log-probabilities."""
    kl_estimator: str = "k3"
    """Of ``kl_beta`` and of the metric ``kl``: k1, k2, k3 or abs (`kl_estimate`); ``GRPOConfig.kl_in_reward_estimator`` is the reward's."""
    entropy_weight: float = 0.0
    """Of the entropy of each token's whole distribution."""
    temperature: float = 1.0
    """At which the answers were drawn; logits are divided by it."""
    correction: ImportanceCorrection | None = field(default_factory=ImportanceCorrection)
    """Weights for an engine whose numerics differ; None for none."""
    observe: Callable[[Tensor, Tensor, Tensor], None] | None = field(default=None, repr=False, compare=False)
    """Called with the old log-probabilities [T] of each micro-batch, the engine's, and which of them count; an iteration
    looks at them beside it."""

    def __post_init__(self) -> None:
        check_estimator(self.kl_estimator)
        check_finite(self, 0, "kl_beta", "entropy_weight")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be positive and finite; a greedy policy has no log-probabilities")

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        extras = {name: value.flatten() for name, value in batch.extras.items() if value.shape == batch.tokens.shape}
        if self.kl_beta and "ref_logprobs" not in extras:
            raise ValueError(f"kl_beta={self.kl_beta} needs ref_logprobs in batch.extras; set kl_beta=0 to train without a reference")
        mask = batch.loss_mask.flatten()
        keep = mask != 0

        def masked(value: Tensor) -> Tensor:
            """Left out before anything is computed with it: zero times NaN is NaN, in a gradient too."""
            return torch.where(keep, value, 0)

        current, entropy = (masked(value) for value in self._distribution(output, batch.labels.flatten()))
        values = {name: masked(extras[name]) for name in _EXTRAS if name in extras}
        old, inference = values.get("old_logprobs", current.detach()), values["inference_logprobs"]
        # Of what the engine said nothing, nothing is corrected.
        is_known = ~inference.isnan()
        inference = torch.where(is_known, inference, old)
        if self.observe is not None:
            self.observe(old, inference, keep & is_known)
        sequences = Sequences.of(batch, output.layer.groups.cp) if self._needs_sequences() else None
        ratio = self.policy.ratio(current, old, keep, sequences)
        loss = self.policy.losses(current, values["advantages"], ratio)
        metrics: dict[str, Tensor] = {"ratio": ratio, "entropy": entropy, "logprob_mismatch": (current - inference).abs() * is_known}
        metrics |= mismatch(old, inference)
        metrics["clipped_above"], metrics["clipped_below"] = ratio > 1 + self.policy.clip_high, ratio < 1 - self.policy.clip_low
        if self.correction is not None:
            weight, report = self.correction.weights(old, inference, keep, sequences)
            loss = loss * weight
            metrics |= report
        if "ref_logprobs" in values:
            metrics["kl"] = kl_estimate(current, values["ref_logprobs"], self.kl_estimator)
            loss = loss + self.kl_beta * metrics["kl"]
        if self.entropy_weight:
            loss = loss - self.entropy_weight * entropy
        return weighted_report(loss, metrics, batch, extras.get("loss_factors"))

    def _needs_sequences(self) -> bool:
        correction = self.correction
        return self.policy.ratio_level != "token" or (correction is not None and (correction.level != "token" or correction.veto > 0))

    def _distribution(self, output: ModelOutput, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each label and entropy of each distribution, [T]."""
        if output.layer.products is None:
            return output.log_probs_and_entropy(labels, self.temperature)
        # A layer with matmuls of its own has its log-probabilities from them; the entropy is from torch's.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_weight != 0):
            _, entropy = output.log_probs_and_entropy(labels, self.temperature)
        return output.log_probs(labels, self.temperature), entropy
