# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Drawing one token a row from logits, every row by its own settings."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.sampling._params import SamplingParams
from mcore_inference.sampling._random import uniform
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel import batch_invariant_losses

# R rows (requests), V vocabulary.


@experimental_api
@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Settings of R rows as tensors, so that one pass over [R, V] serves all of them."""

    temperature: Tensor
    """[R] float64; 0 for greedy."""
    top_k: Tensor
    """[R] int64; V for all."""
    top_p: Tensor
    """[R] float64; 1 for all."""
    min_p: Tensor
    """[R] float64; 0 for all."""
    seed: Tensor
    """[R] int64."""
    position: Tensor
    """[R] int64, number of tokens generated before."""
    all_greedy: bool
    has_ranks: bool
    """Whether a row needs its scores sorted (top-k or top-p)."""
    has_min_p: bool

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> "SamplingRows":
        """Rows in the order given."""
        greedy = [p.is_greedy for p in params]
        top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
        top_p = [p.top_p if p.top_p > 0 else 1.0 for p in params]
        pick = [not row for row in greedy]
        numbers = torch.tensor(
            [[0.0 if g else p.temperature for g, p in zip(greedy, params, strict=True)], top_p, [p.min_p for p in params]],
            dtype=torch.float64,
        )
        integers = torch.tensor([top_k, list(seeds), list(positions)], dtype=torch.int64)
        if torch.device(device).type == "cuda":
            # From pinned memory a copy waits for nothing.
            numbers, integers = (x.pin_memory().to(device, non_blocking=True) for x in (numbers, integers))
        return cls(
            temperature=numbers[0],
            top_k=integers[0],
            top_p=numbers[1],
            min_p=numbers[2],
            seed=integers[1],
            position=integers[2],
            all_greedy=all(greedy),
            has_ranks=any(row and (k < vocab_size or p < 1) for row, k, p in zip(pick, top_k, top_p, strict=True)),
            has_min_p=any(row and p.min_p > 0 for row, p in zip(pick, params, strict=True)),
        )

    def take(self, rows: slice | Tensor) -> "SamplingRows":
        """A copy of some rows, by their numbers."""
        fields = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
        return dataclasses.replace(self, **{name: getattr(self, name)[rows].clone() for name in fields})


@experimental_api
def sample(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
    """One token a row.

    Greedy rows take the best token, the lowest id among equals. Other rows divide by the temperature, apply min-p, top-k,
    top-p and invert the cumulative distribution, in the order of ids, at one uniform number that depends on the row's seed
    and position only. So neither the other rows nor an earlier interruption changes a result.

    Args:
        logits_RV: [R, V]; computed in float32, in float64 when they are.
        rows: settings.

    Returns:
        [R] int64; -1 for a row that holds NaN or +inf, or no finite score.
    """
    scores_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    best_R, tokens_R = scores_RV.max(dim=-1)
    # max() carries NaN, so one look at the best score tells a bad row.
    broken_R = ~torch.isfinite(best_R)
    tokens_R = scores_RV.argmax(dim=-1)
    if not rows.all_greedy:
        drawn_R = _draw(scores_RV, best_R, rows)
        tokens_R = torch.where(rows.temperature == 0, tokens_R, drawn_R)
    return tokens_R.masked_fill(broken_R, -1)


def _draw(scores_RV: Tensor, best_R: Tensor, rows: SamplingRows) -> Tensor:
    """Inverse-CDF draw of every row; greedy and broken rows give any token."""
    scores_RV = _processed(scores_RV, best_R, rows)
    weights_RV = scores_RV.double().exp()
    cumulative_RV = weights_RV.cumsum(dim=-1)
    threshold_R = uniform(rows.seed, rows.position) * cumulative_RV[:, -1]
    drawn_R = torch.searchsorted(cumulative_RV, threshold_R[:, None], right=True)[:, 0]
    # Rounding may carry the threshold to the very end; the last token with weight is meant then.
    last_R = scores_RV.shape[-1] - 1 - (weights_RV > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.minimum(drawn_R, last_R)


def _processed(scores_RV: Tensor, best_R: Tensor, rows: SamplingRows) -> Tensor:
    """Scores after temperature, min-p, top-k and top-p, the best one 0; what is left out is -inf. Greedy rows keep temperature 1."""
    kind = scores_RV.dtype
    # The best score moves to 0 first, so that a small temperature cannot overflow; and 0 times the factor stays 0.
    factor_R = rows.temperature.masked_fill(rows.temperature == 0, 1.0).reciprocal().to(kind).clamp(max=torch.finfo(kind).max)
    scores_RV = (scores_RV - best_R[:, None]) * factor_R[:, None]
    if rows.has_min_p:
        scores_RV = scores_RV.masked_fill(scores_RV < rows.min_p.log().to(kind)[:, None], -math.inf)
    return _keep_top(scores_RV, rows) if rows.has_ranks else scores_RV


@experimental_api
def processed_log_probs(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
    """[R, V] log-probabilities by which ``sample`` draws, in float32 (float64 when the logits are); a greedy row is sure of its token."""
    scores_RV = logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()
    values_RV = _processed(scores_RV, scores_RV.amax(dim=-1), rows).log_softmax(dim=-1)
    sure_RV = torch.full_like(values_RV, -math.inf).scatter(-1, scores_RV.argmax(dim=-1, keepdim=True), 0.0)
    return torch.where((rows.temperature == 0)[:, None], sure_RV, values_RV)


def _keep_top(scores_RV: Tensor, rows: SamplingRows) -> Tensor:
    """Top-k, then top-p on what is left; exactly k stay when scores tie, the lowest ids first."""
    sorted_RV, order_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(scores_RV.shape[-1], device=scores_RV.device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= rows.top_k[:, None], -math.inf)
    probs_RV = sorted_RV.double().softmax(dim=-1)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    # Rank 0 always stays, and a row without top-p keeps even what rounding pushes to 1.
    dropped_RV = (before_RV >= rows.top_p[:, None]) & (rank_V > 0) & (rows.top_p < 1)[:, None]
    sorted_RV = sorted_RV.masked_fill(dropped_RV, -math.inf)
    return torch.empty_like(scores_RV).scatter_(-1, order_RV, sorted_RV)


@experimental_api
def log_probs(logits_RV: Tensor) -> Tensor:
    """[R, V] log-softmax of raw logits, in float32 (float64 when they are)."""
    return (logits_RV if logits_RV.dtype == torch.float64 else logits_RV.float()).log_softmax(dim=-1)


def draw_alone(logits_RV: Tensor, scores_RV: Tensor, rows: SamplingRows, processed_R: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities [R] of ``sample``, each row alone, so that its bits do not depend on the others.

    Args:
        logits_RV: of the model.
        scores_RV: [R, vocab_size], what is drawn from.
        rows: settings.
        processed_R: [R] int64, 1 for the log-probability by which the token was drawn.
        vocab_size: ids that exist.
    """
    tokens, values = [], []
    for row, (logits_1V, scores_1V) in enumerate(zip(logits_RV.split(1), scores_RV.split(1), strict=True)):
        logits_1V, scores_1V = logits_1V.clone(), scores_1V.clone()
        alone = rows.take(slice(row, row + 1))
        token_1 = sample(scores_1V, alone)
        picked_1 = token_1.clamp(min=0)
        temperature = alone.temperature.item()
        if not processed_R[row]:
            value_1 = token_log_probs(logits_1V, picked_1)
        elif temperature and alone.top_k.item() >= vocab_size and alone.top_p.item() >= 1 and not alone.min_p.item():
            value_1 = -batch_invariant_losses(scores_1V, picked_1, Group.single(), vocab_size, temperature=temperature)[0]
        else:
            value_1 = processed_log_probs(scores_1V, alone).gather(1, picked_1[:, None])[:, 0]
        tokens.append(token_1)
        values.append(value_1)
    return torch.cat(tokens), torch.cat(values)


@experimental_api
def token_log_probs(logits_RV: Tensor, tokens_R: Tensor) -> Tensor:
    """[R] log-probabilities of tokens under raw logits, in the bits of a trainer with a batch-invariant backend."""
    return -batch_invariant_losses(logits_RV, tokens_R, Group.single(), logits_RV.shape[1])[0]
