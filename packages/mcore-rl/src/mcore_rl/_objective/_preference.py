# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Learning from pairs of answers, without advantages: direct preference optimisation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.models import ModelOutput
from mcore_parallel.training import Batch, LossReport
from mcore_rl._objective._sequences import Sequences
from mcore_rl._packing._trajectories import BatchStyle, place_rows, write_batches
from mcore_rl._stability import experimental_api
from mcore_rl.agent import ContrastiveRollout


@experimental_api
def pair_batches(
    pairs: Sequence[ContrastiveRollout], *, seq_len: int, micro_batch_size: int, num_pairs: int = 0, style: BatchStyle | None = None
) -> list[Batch]:
    """Right-padded micro-batches in which row 2 i is the chosen and row 2 i + 1 the rejected answer of a pair.

    Args:
        pairs: of this data rank.
        seq_len: S, positions of a row; trajectories may hold up to S + 1 tokens.
        micro_batch_size: rows of a batch, an even number.
        num_pairs: at least so many pairs, empty ones behind, so that all data ranks have as many batches.
        style: token of empty places, device, dtype.

    Raises:
        ValueError: an odd micro-batch, weights of tokens other than 1, a trajectory that is too long.
    """
    style = style or BatchStyle()
    if micro_batch_size % 2:
        raise ValueError(f"micro_batch_size={micro_batch_size} must be even: the two answers of a pair lie in one micro-batch")
    if style.aggregation.mode != "token_mean" or style.mask_truncated:
        raise ValueError("pairs are compared by all their tokens; leave aggregation and mask_truncated of style at their defaults")
    rollouts = [rollout for pair in pairs for rollout in (pair.chosen, pair.rejected)]
    places, shape = place_rows(rollouts, seq_len, micro_batch_size, 2 * num_pairs)
    return write_batches(rollouts, places, shape, style)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class DPOObjective:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h), the mean over pairs (Rafailov et al. 2023; e: label smoothing, Mitchell 2023).

    h = beta ((chosen - its reference) - (rejected - its reference)), of the sums of log-probabilities over the tokens that the policy
    wrote. Batches are those of `pair_batches` with ``ref_logprobs`` (`with_ref_logprobs`). A micro-batch's auxiliary losses
    weigh by its pairs.

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> DPOObjective(beta=0.1, label_smoothing=0.05).losses(torch.tensor([0.0]))
        tensor([0.6931])
    """

    beta: float = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: float = 0.0
    """The chance that a preference is the wrong way round, below 0.5."""
    temperature: float = 1.0
    """Logits are divided by it, as those of the reference are."""

    def __post_init__(self) -> None:
        if not 0 < self.beta < math.inf:
            raise ValueError(f"beta={self.beta} must be positive and finite")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing={self.label_smoothing} must lie from 0 to below 0.5")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be positive and finite")

    def losses(self, margins: Tensor) -> Tensor:
        """Of pairs, from (chosen - its reference) - (rejected - its reference)."""
        scaled, smoothing = self.beta * margins, self.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(scaled) - smoothing * F.logsigmoid(-scaled)

    def num_units(self, batch: Batch, cp: Group) -> Tensor:
        """Scalar float64: the pairs of a micro-batch, of which ``batch`` is this context-parallel rank's share."""
        return _real_pairs(Sequences.of(batch, cp), batch.loss_mask.flatten() != 0).sum(dtype=torch.float64)

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        if "ref_logprobs" not in batch.extras:
            raise ValueError("DPO needs ref_logprobs in batch.extras; pass the batches through with_ref_logprobs")
        if batch.cu_seqlens is not None or batch.tokens.shape[0] % 2:
            raise ValueError(f"a batch of {batch.tokens.shape[0]} rows, packed or odd, holds no pairs in order; make it with pair_batches")
        keep = batch.loss_mask.flatten() != 0
        current = output.log_probs(batch.labels.flatten(), self.temperature)
        gap = torch.where(keep, current - batch.extras["ref_logprobs"].flatten(), 0)
        cp = output.layer.groups.cp
        sequences = Sequences.of(batch, cp)
        own = gap.new_zeros(sequences.num).index_add(0, sequences.ids, gap)
        # The sum over all ranks, with the gradient of this rank's tokens.
        rewards = (own - own.detach() + sequences.sum(gap)).view(-1, 2)
        real = _real_pairs(sequences, keep)
        margins = rewards[:, 0] - rewards[:, 1]
        losses = torch.where(real, self.losses(margins), 0).sum()
        scaled = self.beta * rewards.detach()
        metrics = {
            "accuracy": (margins > 0) & real,
            "margin": scaled[:, 0] - scaled[:, 1],
            "chosen_reward": scaled[:, 0],
            "rejected_reward": scaled[:, 1],
        }
        return LossReport(
            # Every cp rank has the whole loss: they share its value, and each adds its own gradient.
            sum=losses - losses.detach() + losses.detach() / cp.size,
            count=real.sum(dtype=torch.float64) / cp.size,
            metrics={name: value.to(gap.dtype).sum() / cp.size for name, value in metrics.items()},
        )


def _real_pairs(sequences: Sequences, keep: Tensor) -> Tensor:
    """[N / 2] bool, False for the empty pairs behind the last one; from which of the T tokens count."""
    return sequences.sum(keep.to(torch.float64)).view(-1, 2).sum(1) > 0
