# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Importance weights for an engine whose numerics differ from the trainer's."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.comm import all_reduce
from mcore_rl._objective._kl import MAX_LOG_RATIO
from mcore_rl._objective._sequences import Sequences
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

    ``IterationReport.mismatch`` is that of an iteration.
    """

    weight_min: float
    weight_mean: float
    weight_max: float
    """Of exp(old - inference)."""
    effective_sample_size: float
    """(sum w)^2 / sum w^2, divided by the number of tokens: 1 without a mismatch."""
    probability_gap: float
    """Mean of |p_old - p_inference|."""
    probability_gap_min: float
    probability_gap_max: float
    inference_probability: float
    """Mean of p_inference."""
    inference_probability_min: float
    inference_probability_max: float
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
        totals = MismatchTotals(old.device)
        totals.add(old.flatten(), inference.flatten(), torch.ones_like(old, dtype=torch.bool).flatten())
        report = totals.report()
        assert report is not None
        return report


class MismatchTotals:
    """Adds up a `MismatchReport` over micro-batches and ranks, on their device.

    Args:
        device: of the log-probabilities.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(7, dtype=torch.float64, device=device)
        """Of weights, gaps, the engine's probabilities, squared weights, k1 and k3; the number of tokens."""
        self._most = torch.full((6,), -math.inf, dtype=torch.float64, device=device)
        """Largest of the first three, and of their negatives."""

    @torch.no_grad()
    def add(self, old: Tensor, inference: Tensor, keep: Tensor) -> None:
        """Log-probabilities [T] of trainer and engine; those that ``keep`` [T] marks count."""
        old, inference = (torch.where(keep, values.double(), 0) for values in (old, inference))
        weight = (old - inference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        parts = mismatch(old, inference)
        first = torch.stack([weight, parts["probability_gap"], inference.exp()])
        rows = torch.cat([first, torch.stack([weight.square(), parts["mismatch_k1"], parts["mismatch_k3"], torch.ones_like(weight)])])
        self._sums += torch.where(keep, rows, 0).sum(1)
        self._most = torch.maximum(self._most, torch.where(keep, torch.cat([first, -first]), -math.inf).amax(1))

    def report(self, group: Group | None = None) -> MismatchReport | None:
        """Of all tokens of a group's ranks, each of which calls it; None where none counts.

        Ranks that saw the same tokens may be among them, as those of one tensor-parallel group, where all tokens were seen as often.
        """
        sums, most = self._sums, self._most
        if group is not None:
            sums, most = all_reduce(sums, group), all_reduce(most, group, op="max")
        weights, gaps, probabilities, squares, k1, k3, count = sums.tolist()
        highs, lows = most[:3].tolist(), (-most[3:]).tolist()
        if not count:
            return None
        return MismatchReport(
            weight_min=lows[0],
            weight_mean=weights / count,
            weight_max=highs[0],
            effective_sample_size=weights**2 / squares / count,
            probability_gap=gaps / count,
            probability_gap_min=lows[1],
            probability_gap_max=highs[1],
            inference_probability=probabilities / count,
            inference_probability_min=lows[2],
            inference_probability_max=highs[2],
            k1=k1 / count,
            k3=k3 / count,
        )
