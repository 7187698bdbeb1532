# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One optimizer step, and one evaluation."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel.comm import TensorSpec, all_reduce
from mcore_parallel.pipeline import forward_only, one_f_one_b, run_schedule
from mcore_parallel.training._batch import Batch
from mcore_parallel.training._objective import LossReport
from mcore_parallel.training._protocols import GradSync, Objective, Optimizer
from mcore_parallel.training._totals import add_up


@dataclass(frozen=True, kw_only=True)
class TrainReport:
    """What a step did, over all micro-batches and replicas; the same on every rank."""

    loss: float
    """Mean over the counted tokens, before the update."""
    grad_norm: float
    """Of the mean loss, before clipping."""
    num_tokens: int
    """Tokens that counted (rounded when the mask holds fractions, 0 when it is not finite)."""
    aux: float
    """Mean auxiliary loss of a micro-batch, weighted by its tokens and added up over layers; 0 without one."""
    metrics: dict[str, float]
    """The objective's metrics, means over the counted tokens."""
    skipped: bool
    """The optimizer did not update anything."""


def train_step(
    model: nn.Module,
    batches: Sequence[Batch],
    objective: Objective,
    sync: GradSync,
    optimizer: Optimizer,
    *,
    lr: float,
    groups: ProcessGroups | None = None,
) -> TrainReport:
    """Forward and backward of all micro-batches, then one update; every rank of the world calls it.

    With one pipeline stage or many the work is a schedule of forwards and backwards. Losses are sums over tokens; the
    gradient is divided once, by the count of all micro-batches of all replicas. The step itself reads one set of numbers back to
    the host, at its end.

    Args:
        model: this rank's stage, as ``GPTModel``: forward(tokens or hidden, step) -> (hidden or output, aux or None).
        batches: micro-batches of this replica, equally many on every rank; all tp and pp ranks of a replica get the same.
        objective: evaluated on the last stage.
        sync: sums gradients; its ``no_sync`` covers every backward but the last.
        optimizer: updates the parameters.
        lr: learning rate of the update.
        groups: the layout; None for ``model.groups``.

    Raises:
        ValueError: no micro-batch.
    """
    stage = _Stage.of(model, batches, objective, groups)
    sync.zero_grad_buffer()
    pp = stage.groups.pp
    run_schedule(one_f_one_b(pp.size, pp.rank, len(batches)), stage.forward, pp, hidden=stage.hidden_spec(), no_sync=sync.no_sync)
    sync.finish_grad_sync()
    totals = add_up(stage.reports, stage.aux, stage.groups, stage.device)
    result = optimizer.step(grad_scale=totals.count.reciprocal(), lr=lr)
    norm = result.grad_norm.detach().to(stage.device, torch.float64).reshape(1)
    *values, grad_norm = torch.cat([totals.vector, norm]).tolist()
    loss, count, aux, metrics = totals.read(values)
    counted = round(count) if math.isfinite(count) else 0
    return TrainReport(loss=loss, grad_norm=grad_norm, num_tokens=counted, aux=aux, metrics=metrics, skipped=result.skipped)


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], objective: Objective, *, groups: ProcessGroups | None = None) -> LossReport:
    """The objective over all micro-batches and replicas, without a gradient; the same on every rank.

    The model is in evaluation mode meanwhile. Auxiliary losses are left out.

    Args:
        model: as in ``train_step``.
        batches: as in ``train_step``.
        objective: evaluated on the last stage.
        groups: the layout; None for ``model.groups``.

    Returns:
        Global sum and count (float64, on the CPU), metrics as sums.

    Raises:
        ValueError: no micro-batch.
    """
    stage = _Stage.of(model, batches, objective, groups)
    pp, training = stage.groups.pp, model.training
    model.eval()
    try:
        run_schedule(forward_only(pp.size, pp.rank, len(batches)), stage.forward, pp, hidden=stage.hidden_spec())
    finally:
        model.train(training)
    totals = add_up(stage.reports, [], stage.groups, stage.device)
    loss, count, _, metrics = totals.read(totals.vector.tolist())
    as_sums: Mapping[str, Tensor] = {name: torch.tensor(value * count, dtype=torch.float64) for name, value in metrics.items()}
    return LossReport(sum=torch.tensor(loss * count, dtype=torch.float64), count=torch.tensor(count, dtype=torch.float64), metrics=as_sums)


@dataclass(frozen=True)
class _Stage:
    """The forward of this rank's stage over given micro-batches, and what it found on the way."""

    model: nn.Module
    batches: Sequence[Batch]
    objective: Objective
    groups: ProcessGroups
    reports: list[LossReport] = field(default_factory=list)
    aux: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, batches: Sequence[Batch], objective: Objective, groups: ProcessGroups | None) -> "_Stage":
        if not batches:
            raise ValueError("batches holds 0 micro-batches; give every rank at least one")
        owner: Any = model
        return cls(model, batches, objective, owner.groups if groups is None else groups)

    @property
    def device(self) -> torch.device:
        return self.batches[0].tokens.device

    def hidden_spec(self) -> Any:
        """Per micro-batch, what travels between stages; None for one stage."""
        if self.groups.pp.size == 1:
            return None
        owner: Any = self.model
        share = self.groups.tp.size if self.groups.sequence_parallel else 1

        def spec(microbatch: int) -> TensorSpec:
            tokens = self.batches[microbatch].tokens
            return TensorSpec(shape=(tokens.numel() // share, owner.config.hidden_size), dtype=owner.dtype, device=tokens.device)

        return spec

    def forward(self, microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The stage's part of one micro-batch: hidden states or the summed loss, and the weighted auxiliary loss."""
        batch = self.batches[microbatch]
        output, aux = self.model(batch.tokens.flatten() if hidden is None else hidden, batch.step())
        if aux is not None:
            # Divided by the global count later, like everything: a mean over micro-batches, each weighing its tokens.
            aux = aux * all_reduce(batch.weight(), self.groups.cp).to(aux.dtype)
            self.aux.append(aux.detach())
        if not self.groups.pp.is_last:
            return output, aux
        report = self.objective(output, batch)
        self.reports.append(dataclasses.replace(report, sum=report.sum.detach()))
        return report.sum, aux
