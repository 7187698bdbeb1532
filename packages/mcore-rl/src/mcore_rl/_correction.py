# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Importance weights for an engine whose numerics differ from the trainer's."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl._kl import MAX_LOG_RATIO
from mcore_rl._sequences import Sequences
from mcore_rl._stability import experimental_api

_LEVELS, _MODES = ("token", "sequence", "geometric"), ("truncate", "mask", "none")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ImportanceCorrection:
    """Weights w = exp(old - inference) of tokens that an engine drew and a trainer learns from, without a gradient.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> ImportanceCorrection(level="sequence", mode="mask", low=0.5, high=2.0)
        ImportanceCorrection(level='sequence', mode='mask', low=0.5, high=2.0, veto=0.0)
    """

    level: str = "token"
    """token; sequence: the product over the tokens of a sequence; geometric: the geometric mean over them."""
    mode: str = "truncate"
    """truncate: at most ``high``; mask: 0 outside [``low``, ``high``]; none: as they are."""
    low: float = 0.0
    """Of mask."""
    high: float = 2.0
    """Largest weight."""
    veto: float = 0.0
    """A sequence with a token whose own weight lies below it counts nothing; 0 for none."""

    def __post_init__(self) -> None:
        if self.level not in _LEVELS:
            raise ValueError(f"level={self.level!r} must be one of {', '.join(_LEVELS)}")
        if self.mode not in _MODES:
            raise ValueError(f"mode={self.mode!r} must be one of {', '.join(_MODES)}")
        if not 0 <= self.low < self.high:
            raise ValueError(f"low={self.low} and high={self.high} must be in order, from 0")
        if self.low and self.mode != "mask":
            raise ValueError(f"low={self.low} has no effect with mode={self.mode!r}; set mode='mask', or low=0")
        if not 0 <= self.veto < 1:
            raise ValueError(f"veto={self.veto} must lie from 0 to below 1")

    def weights(self, old: Tensor, inference: Tensor, keep: Tensor, sequences: Sequences | None) -> tuple[Tensor, dict[str, Tensor]]:
        """The weights [T], and what to report of them, [T] each.

        Args:
            old: [T], the trainer's log-probabilities.
            inference: [T], the engine's.
            keep: [T] bool, tokens that count.
            sequences: to which the tokens belong; needed for whole sequences and for a veto only.

        Returns:
            weights; ``is_weight`` before it is limited, ``is_weight_squared`` (the effective sample size is n mean(w)^2 / mean(w^2)),
            ``is_limited`` (truncated or masked) and ``is_vetoed``.
        """
        log_ratio = torch.where(keep, old - inference, 0).detach()
        raw = log_ratio
        if self.level != "token":
            assert sequences is not None
            raw = sequences.spread(sequences.sum(log_ratio) if self.level == "sequence" else sequences.mean(log_ratio, keep))
        raw = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        outside = (raw > self.high) | (raw < self.low)
        weight = raw
        if self.mode == "truncate":
            weight = raw.clamp(max=self.high)
        elif self.mode == "mask":
            weight = torch.where(outside, 0, raw)
        vetoed = torch.zeros_like(outside)
        if self.veto:
            assert sequences is not None
            lost = (log_ratio.exp() < self.veto) & keep
            vetoed = sequences.spread(sequences.sum(lost.to(raw.dtype))) > 0
        limited = torch.zeros_like(outside) if self.mode == "none" else outside
        report = {"is_weight": raw, "is_weight_squared": raw.square(), "is_limited": limited, "is_vetoed": vetoed}
        return torch.where(vetoed, 0, weight), report


def mismatch(old: Tensor, inference: Tensor) -> dict[str, Tensor]:
    """Of each token [T], what the fields of a `MismatchReport` are means of; without a gradient."""
    log_weight = (old - inference).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return {
        "probability_gap": (old.detach().exp() - inference.exp()).abs(),
        "mismatch_k1": -log_weight,
        "mismatch_k3": log_weight.expm1() - log_weight,
    }


@experimental_api
@dataclass(frozen=True, kw_only=True)
class MismatchReport:
    """How far the engine's and the trainer's log-probabilities of the same tokens lie apart.

    `GRPOObjective` reports of all tokens that it learns from what sums can say: ``probability_gap``, ``mismatch_k1``, ``mismatch_k3``, and
    the mean and the mean square of the weights.
    """

    weight_min: float
    weight_mean: float
    weight_max: float
    """Of exp(old - inference)."""
    effective_sample_size: float
    """(sum w)^2 / sum w^2, divided by the number of tokens: 1 without a mismatch."""
    probability_gap: float
    """Mean of |p_old - p_inference|."""
    k1: float
    """Mean of inference - old, an estimate of KL(inference || old)."""
    k3: float
    """The same, never negative: mean of w - 1 - log w."""

    @classmethod
    def of(cls, old: Tensor, inference: Tensor) -> "MismatchReport":
        """Of the log-probabilities [T] of tokens that count.

        Raises:
            ValueError: there are none, or as many of one as not of the other.
        """
        if old.shape != inference.shape or not old.numel():
            raise ValueError(f"old {tuple(old.shape)} and inference {tuple(inference.shape)} must be of one shape and not empty")
        old, inference = old.double().flatten(), inference.double().flatten()
        weight = (old - inference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        means = {name: values.mean().item() for name, values in mismatch(old, inference).items()}
        return cls(
            weight_min=weight.min().item(),
            weight_mean=weight.mean().item(),
            weight_max=weight.max().item(),
            effective_sample_size=(weight.sum().square() / weight.square().sum() / weight.numel()).item(),
            probability_gap=means["probability_gap"],
            k1=means["mismatch_k1"],
            k3=means["mismatch_k3"],
        )
