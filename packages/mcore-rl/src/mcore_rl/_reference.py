# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Log-probabilities of a frozen reference model, made before a batch is trained on."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups
from mcore_parallel.models import ModelOutput
from mcore_parallel.training import Batch, LossReport, evaluate


def with_ref_logprobs(reference: nn.Module, batches: Sequence[Batch], groups: ProcessGroups, *, temperature: float = 1.0) -> list[Batch]:
    """The batches with ``ref_logprobs`` [B, S] of their labels in ``extras``, from one forward pass each without a gradient.

    Over context parallelism each batch is this rank's share of it; over pipeline stages the last one has the log-probabilities, and its
    objective is the one that reads them.

    Args:
        reference: of the layout ``groups``; in evaluation mode meanwhile.
        batches: of ``rollout_batches``, all ranks of a replica the same.
        groups: the layout.
        temperature: logits are divided by it, as the policy's are.
    """
    shares = [batch.context_share(groups.cp) for batch in batches]
    scores = _Scores(temperature=temperature)
    with torch.no_grad():
        evaluate(reference, shares, scores, groups=groups)
    if not scores.values:
        return shares
    return [
        dataclasses.replace(batch, extras={**batch.extras, "ref_logprobs": values})
        for batch, values in zip(shares, scores.values, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """An objective that keeps the log-probabilities of the labels, in the order of the micro-batches, and sums nothing."""

    temperature: float
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        logprobs = output.log_probs(batch.labels.flatten(), self.temperature)
        self.values.append(logprobs.detach().view(batch.labels.shape))
        return LossReport(sum=logprobs.new_zeros(()), count=batch.weight())
