# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One optimizer step, and one evaluation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.comm import TensorSpec, all_reduce
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models import AuxSpec, CountsHook, ReportsAux
from mcore_parallel.optim import Rate
from mcore_parallel.pipeline import (
    ModelChunks,
    Overlap,
    Schedule,
    forward_only,
    interleaved_one_f_one_b,
    one_f_one_b,
    plan_pipeline,
    run_schedule,
)
from mcore_parallel.training._aux import AuxReport, AuxSums
from mcore_parallel.training._batch import Batch
from mcore_parallel.training._objective import LossReport
from mcore_parallel.training._protocols import (
    CountsUnits,
    DeferredResult,
    DiscardsGradients,
    GradSync,
    LossScaler,
    Objective,
    Optimizer,
)
from mcore_parallel.training._totals import Totals, add_up


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
    """Mean auxiliary loss of a micro-batch, weighted by what it counts, added up over layers with its coefficients; 0 without one."""
    metrics: dict[str, float]
    """The objective's metrics, means over the counted tokens."""
    skipped: bool
    """The optimizer did not update anything."""
    votes: int = 0
    """Ranks that voted."""
    layers: AuxReport = field(default_factory=lambda: AuxReport({}, {}))
    """Auxiliary losses by name and the tokens of each expert, by layer."""


def train_step(
    model: nn.Module | Sequence[nn.Module],
    batches: Sequence[Batch],
    objective: Objective,
    sync: GradSync,
    optimizer: Optimizer,
    *,
    lr: float,
    groups: ProcessGroups | None = None,
    pipeline: Schedule | None = None,
    overlap: Overlap | None = None,
    vote: bool = False,
    check: "Callable[[GradientPass], Totals] | None" = None,
    span: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> TrainReport:
    """Forward and backward of all micro-batches, then one update; every rank of the world calls it.

    With one pipeline stage or many the work is a schedule of forwards and backwards. Losses are sums over tokens; the
    gradient is divided once, by the count of all micro-batches of all replicas. The step itself reads one set of numbers back to
    the host, at its end. What layers counted is summed with the losses, and handed to every ``CountsHook`` of the model after the update.

    Args:
        model: this rank's stage, as ``GPTModel``: forward(tokens or hidden, step) -> (hidden or output, ``Aux`` or None). With
            virtual stages its chunks in order (``ModelChunks``, a ModuleList or a sequence).
        batches: micro-batches of this replica, equally many on every rank; all tp, cp and pp ranks of a replica get the same, of
            which each cp rank takes its ``context_share``.
        objective: evaluated on the last stage.
        sync: sums gradients; its ``no_sync`` covers every backward but the last.
        optimizer: updates the parameters.
        lr: learning rate of the update.
        groups: the layout; None for ``model.groups``.
        pipeline: the schedule (``PipelineConfig.build``, kept over the steps); None for one forward, one backward, interleaved when
            the stage has several chunks.
        overlap: interleaves the pairs of a ``combined_one_f_one_b``.
        vote: counted over the world without a collective of its own; the sum is ``TrainReport.votes``.
        check: runs the forwards and backwards instead, looks at what they gave, and may run them again (``Rerun.check``).
        span: a context around each part, by its name: "forward-backward", "grad-sync" (what of the sums the backwards did not hide) and
            "optimizer" (``Timers``).

    Raises:
        ScheduleError: a number of micro-batches that the schedule refuses, before anything runs.
        ValueError: no micro-batch, a schedule for another number of chunks.
    """
    scale = optimizer.loss_scale if isinstance(optimizer, LossScaler) else None
    work = GradientPass(_Stage.of(model, batches, objective, groups, scale), sync, pipeline, overlap, vote, span)
    totals = work() if check is None else check(work)
    device = totals.vector.device
    with span("optimizer"):
        result = optimizer.step(grad_scale=totals.count.reciprocal(), lr=lr)
    norm = result.grad_norm.detach().to(device, torch.float64).reshape(1)
    # A decision that is on the device comes along, instead of a synchronisation of its own.
    skip = result.skip.detach().to(device, torch.float64).reshape(1) if isinstance(result, DeferredResult) else norm.new_zeros(1)
    skipped_flag = skip[0] > 0 if isinstance(result, DeferredResult) else torch.full((), result.skipped, dtype=torch.bool, device=device)
    _hand_out_counts(work.stage.chunks, totals, skipped_flag, lr.step if isinstance(lr, Rate) else None)
    *values, grad_norm, skip_value = torch.cat([totals.vector, norm, skip]).tolist()
    skipped = bool(skip_value) if isinstance(result, DeferredResult) else result.skipped
    loss, count, aux, metrics = totals.read(values)
    counted = round(count) if math.isfinite(count) else 0
    votes = totals.votes(values)
    return TrainReport(
        loss=loss,
        grad_norm=grad_norm,
        num_tokens=counted,
        aux=aux,
        metrics=metrics,
        skipped=skipped,
        votes=votes,
        layers=totals.read_aux(values),
    )


@torch.no_grad()
def evaluate(
    model: nn.Module | Sequence[nn.Module], batches: Sequence[Batch], objective: Objective, *, groups: ProcessGroups | None = None
) -> LossReport:
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
    stage = forward_pass(model, batches, objective, groups)
    totals = add_up(stage.reports, AuxSums(), stage.groups, stage.device)
    loss, count, _, metrics = totals.read(totals.vector.tolist())
    as_sums: Mapping[str, Tensor] = {name: torch.tensor(value * count, dtype=torch.float64) for name, value in metrics.items()}
    return LossReport(sum=torch.tensor(loss * count, dtype=torch.float64), count=torch.tensor(count, dtype=torch.float64), metrics=as_sums)


def forward_pass(
    model: nn.Module | Sequence[nn.Module],
    batches: Sequence[Batch],
    objective: Objective,
    groups: ProcessGroups | None,
    routing_recorder: Callable[[int, int, Tensor, Tensor], None] | None = None,
) -> "_Stage":
    """The forwards of all micro-batches in evaluation mode; every module is in its own mode again afterwards.

    ``routing_recorder`` is called as ``Step.routing_recorder``, with the number of the micro-batch in front.
    """
    stage = dataclasses.replace(_Stage.of(model, batches, objective, groups), routing_recorder=routing_recorder)
    pp = stage.groups.pp
    plan = plan_pipeline(_forward_schedule(len(stage.chunks)), pp.size, len(batches))
    # The chunks of a stage are no children of the one module that they make up.
    roots: list[nn.Module] = [*([model] if isinstance(model, nn.Module) else []), *stage.chunks]
    modes = [(module, module.training) for root in roots for module in root.modules()]
    for root in roots:
        root.eval()
    try:
        run_schedule(plan, stage.forwards, pp, hidden=stage.hidden_spec())
    finally:
        for module, mode in modes:
            module.training = mode
    return stage


@dataclass(frozen=True)
class _Stage:
    """The forward of this rank's stage over given micro-batches, and what it found on the way."""

    chunks: Sequence[nn.Module]
    batches: Sequence[Batch]
    objective: Objective
    groups: ProcessGroups
    aux_specs: Mapping[int, AuxSpec] = field(default_factory=dict)
    """What all layers of the model report."""
    loss_scale: Tensor | None = None
    """Factor of what is differentiated; reports are without it."""
    reports: list[LossReport] = field(default_factory=list)
    aux: AuxSums = field(default_factory=AuxSums)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of ``PipelinePlan.slots``."""
    routing_recorder: Callable[[int, int, Tensor, Tensor], None] | None = None
    """As of ``forward_pass``."""

    @classmethod
    def of(
        cls,
        model: nn.Module | Sequence[nn.Module],
        batches: Sequence[Batch],
        objective: Objective,
        groups: ProcessGroups | None,
        loss_scale: Tensor | None = None,
    ) -> "_Stage":
        if not batches:
            raise ValueError("batches holds 0 micro-batches; give every rank at least one")
        chunks: list[nn.Module] = list(model) if isinstance(model, ModelChunks | nn.ModuleList | Sequence) else [model]
        owner: Any = chunks[0]
        layout: ProcessGroups = owner.groups if groups is None else groups
        # The model may be wrapped, as by fully sharded data parallelism.
        specs = next((module.aux_specs for module in chunks[0].modules() if isinstance(module, ReportsAux)), {})
        return cls(chunks, [batch.context_share(layout.cp) for batch in batches], objective, layout, specs, loss_scale)

    @property
    def device(self) -> torch.device:
        return self.batches[0].tokens.device

    def hidden_spec(self) -> Any:
        """Per micro-batch, what travels between stages; None for one stage."""
        if self.groups.pp.size == 1:
            return None
        owner: Any = self.chunks[0]
        share = self.groups.tp.size if self.groups.sequence_parallel else 1

        def spec(microbatch: int) -> TensorSpec:
            tokens = self.batches[microbatch].tokens
            return TensorSpec(shape=(tokens.numel() // share, owner.config.hidden_size), dtype=owner.dtype, device=tokens.device)

        return spec

    @property
    def forwards(self) -> list[functools.partial[tuple[Tensor, Tensor | None]]]:
        return [functools.partial(self.forward, chunk) for chunk in range(len(self.chunks))]

    def forward(self, chunk: int, microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A chunk's part of one micro-batch: hidden states or the summed loss, and the weighted auxiliary loss."""
        batch = self.batches[microbatch]
        # Counts before this micro-batch: the step keeps them for a recomputed forward.
        counts = dict(self.aux.counts) if any(spec.reads_counts for spec in self.aux_specs.values()) else {}
        recorder = None if self.routing_recorder is None else functools.partial(self.routing_recorder, microbatch)
        step = dataclasses.replace(batch.step(), slot=self.slots.get((chunk, microbatch)), counts=counts, routing_recorder=recorder)
        output, parts = self.chunks[chunk](batch.tokens.flatten() if hidden is None else hidden, step)
        aux = None
        if parts is not None:
            # Divided by the global count later, like everything: a mean over micro-batches, each weighing what it counts.
            aux = self.aux.add(parts, self._count(batch))
            aux = None if aux is None else self._scaled(aux)
        if not (self.groups.pp.is_last and chunk == len(self.chunks) - 1):
            return output, aux
        report = self.objective(output, batch)
        self.reports.append(dataclasses.replace(report, sum=report.sum.detach()))
        return self._scaled(report.sum), aux

    def _count(self, batch: Batch) -> Tensor:
        """Of the whole micro-batch, which pipeline stages without the objective's output know as well."""
        if isinstance(self.objective, CountsUnits):
            return self.objective.num_units(batch, self.groups.cp)
        return all_reduce(batch.weight(), self.groups.cp)

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.loss_scale is None else loss * self.loss_scale.to(loss.dtype)


@dataclass(frozen=True)
class GradientPass:
    """Forwards and backwards of one step, as often as asked: each time the gradients begin at zero."""

    stage: _Stage
    sync: GradSync
    pipeline: Schedule | None
    overlap: Overlap | None
    vote: bool = False
    span: Callable[[str], AbstractContextManager[object]] = nullcontext

    @property
    def groups(self) -> ProcessGroups:
        """The layout."""
        return self.stage.groups

    def __call__(self) -> Totals:
        """Sums over all micro-batches, replicas and stages; the gradients are complete."""
        with self.span("forward-backward"):
            self._run()
        with self.span("grad-sync"):
            self.sync.finish_grad_sync()
        stage = self.stage
        return add_up(stage.reports, stage.aux, stage.groups, stage.device, specs=stage.aux_specs, vote=self.vote)

    def alone(self) -> list[LossReport]:
        """The reports of this rank's micro-batches; the gradients are those of this rank, not summed over replicas."""
        with self.sync.no_sync():
            self._run()
        return list(self.stage.reports)

    def _run(self) -> None:
        stage, pp = self.stage, self.stage.groups.pp
        stage.reports.clear()
        stage.aux.clear()
        if isinstance(self.sync, DiscardsGradients):
            self.sync.discard_gradients()
        else:
            self.sync.zero_grad_buffer()
        plan = plan_pipeline(self.pipeline or _default_schedule(len(stage.chunks)), pp.size, len(stage.batches))
        stage.slots.update(plan.slots(pp.rank))
        run_schedule(plan, stage.forwards, pp, hidden=stage.hidden_spec(), no_sync=self.sync.no_sync, overlap=self.overlap)


def _hand_out_counts(chunks: Sequence[nn.Module], totals: Totals, skipped: Tensor, step: int | None) -> None:
    counts = totals.counts()
    for module in (module for chunk in chunks for module in chunk.modules()) if counts else ():
        if isinstance(module, CountsHook) and module.layer in counts:
            module.end_of_batch(counts[module.layer], skipped, step)


# Kept, so that plan_pipeline finds the plan of the last step again.
@functools.lru_cache(maxsize=8)
def _default_schedule(num_chunks: int) -> Schedule:
    return one_f_one_b if num_chunks == 1 else functools.partial(interleaved_one_f_one_b, num_chunks=num_chunks)


@functools.lru_cache(maxsize=8)
def _forward_schedule(num_chunks: int) -> Schedule:
    return functools.partial(forward_only, num_chunks=num_chunks)
