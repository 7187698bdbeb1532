# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The clipped policy loss of group-relative policy optimisation."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.models import ModelOutput
from mcore_parallel.training import Batch, LossReport

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
    ratio = (current_logprobs - old_logprobs).clamp(-20, 20).exp()
    above, below = ratio > 1 + clamp_eps_upper, ratio < 1 - clamp_eps_lower
    policy = torch.minimum(ratio * advantages, ratio.clamp(1 - clamp_eps_lower, 1 + clamp_eps_upper) * advantages)
    if inference_logprobs is not None:
        weight = (old_logprobs - inference_logprobs).detach().clamp(-20, 20).exp()
        policy = policy * (weight if is_truncation_coef is None else weight.clamp(max=is_truncation_coef))
    delta = torch.zeros_like(ratio) if ref_logprobs is None else (ref_logprobs - current_logprobs).clamp(-20, 20)
    kl = delta.exp() - delta - 1
    if entropy is None:
        entropy = -current_logprobs.exp() * current_logprobs.clamp(min=-1e4)
    return kl_beta * kl - policy - entropy_weight * entropy, kl, ratio, entropy, above, below


@dataclass(frozen=True, kw_only=True)
class GRPOObjective:
    """An objective for `mcore_parallel.training.train_step`: the batch carries advantages and log-probabilities.

    The policy is the model's distribution at ``temperature``; all log-probabilities are of that. A token counts by its weight in
    ``batch.loss_mask``, and one of weight 0 may hold anything.

    ``batch.extras`` holds [B, S] tensors aligned with ``labels``: ``advantages``, ``inference_logprobs``, and
    optionally ``old_logprobs`` (else the current ones without gradient, right for one update a rollout) and ``ref_logprobs``.
    """

    clamp_eps_lower: float = 0.2
    clamp_eps_upper: float = 0.2
    kl_beta: float = 0.0
    """0 needs no reference log-probabilities."""
    entropy_weight: float = 0.0
    """Of the entropy of each token's whole distribution."""
    temperature: float = 1.0
    """At which the answers were drawn; logits are divided by it."""
    importance_correction: bool = True
    """Weight tokens by exp(old - inference)."""
    is_truncation_coef: float | None = 2.0

    def __post_init__(self) -> None:
        for name in ("clamp_eps_lower", "clamp_eps_upper", "kl_beta"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be positive and finite; a greedy policy has no log-probabilities")

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        extras = {name: value.flatten() for name, value in batch.extras.items()}
        if self.kl_beta and "ref_logprobs" not in extras:
            raise ValueError(f"kl_beta={self.kl_beta} needs ref_logprobs in batch.extras; set kl_beta=0 to train without a reference")
        mask = batch.loss_mask.flatten()
        keep = mask != 0

        def masked(value: Tensor) -> Tensor:
            """Left out before anything is computed with it: zero times NaN is NaN, in a gradient too."""
            return torch.where(keep, value, 0)

        current, entropy = (masked(value) for value in self._policy(output, batch.labels.flatten()))
        values = {name: masked(extras[name]) for name in _EXTRAS if name in extras}
        old, inference = values.get("old_logprobs", current.detach()), values["inference_logprobs"]
        loss, kl, ratio, entropy, above, below = calculate_grpo_loss(
            current,
            old,
            values.get("ref_logprobs"),
            values["advantages"],
            self.clamp_eps_lower,
            self.clamp_eps_upper,
            self.kl_beta,
            self.entropy_weight,
            inference if self.importance_correction else None,
            self.is_truncation_coef,
            entropy,
        )

        def total(value: Tensor) -> Tensor:
            return (masked(value.to(loss.dtype)) * mask.to(loss.dtype)).sum()

        with torch.no_grad():
            metrics = {
                "kl": total(kl),
                "ratio": total(ratio),
                "entropy": total(entropy),
                "clipped_above": total(above),
                "clipped_below": total(below),
                "logprob_mismatch": total((current - inference).abs()),
            }
        return LossReport(sum=total(loss), count=batch.weight(), metrics=metrics)

    def _policy(self, output: ModelOutput, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each label and entropy of each distribution, [T]."""
        if output.layer.products is None:
            return output.log_probs_and_entropy(labels, self.temperature)
        # A layer with matmuls of its own has its log-probabilities from them; the entropy is from torch's.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_weight != 0):
            _, entropy = output.log_probs_and_entropy(labels, self.temperature)
        return output.log_probs(labels, self.temperature), entropy
