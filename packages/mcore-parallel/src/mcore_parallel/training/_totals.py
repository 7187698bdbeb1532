# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adds the reports of all micro-batches and ranks up, in one collective and without looking at the numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.models import AuxSpec
from mcore_parallel.training._aux import AuxLayout, AuxReport, AuxSums
from mcore_parallel.training._objective import LossReport

# Only the last stage knows which metrics there are. Over several stages the vector therefore has a fixed size:
# room for this many metrics, and for their names.
_MAX_METRICS, _MAX_NAME_BYTES = 64, 2048
_FIXED = 4
_VOTES = 3
_COUNT = "/count"
"""Behind a metric's name: the entry it is divided by."""


@dataclass(frozen=True)
class Totals:
    """Sums over the world, on the device."""

    vector: Tensor
    """float64: loss sum, count, weighted auxiliary sum, votes, metrics, over several stages the bytes of their names; then ``aux``."""
    names: tuple[str, ...] | None
    """Metrics in the vector's order; None when the names are in the vector."""
    aux: AuxLayout = field(default_factory=AuxLayout)
    """The end of the vector."""

    @property
    def count(self) -> Tensor:
        """Scalar; at least the smallest normal number, so that a step in which nothing counts divides by no zero."""
        return self.vector[1].clamp(min=torch.finfo(torch.float32).tiny)

    @property
    def mean(self) -> float:
        """The loss on the host, which waits for the device; the auxiliary loss is left out."""
        total, count = self.vector[:2].tolist()
        return _mean(total, count)

    def read(self, values: Sequence[float]) -> tuple[float, float, float, dict[str, float]]:
        """Loss, count, auxiliary loss and metrics from the vector's numbers on the host."""
        total, count, aux = values[:_VOTES]
        names = _decode(values[_FIXED + _MAX_METRICS :][:_MAX_NAME_BYTES]) if self.names is None else self.names
        sums = dict(zip(names, values[_FIXED : _FIXED + len(names)], strict=True))
        counts = {name.removesuffix(_COUNT): sums.pop(name) for name in names if name.endswith(_COUNT)}
        metrics = {name: _mean(value, counts.get(name, count)) for name, value in sums.items()}
        return _mean(total, count), count, _mean(aux, count), metrics

    def counts(self) -> dict[int, Tensor]:
        """By layer, on the device."""
        return self.aux.counts_of(self._end(self.vector))

    def read_aux(self, values: Sequence[float]) -> AuxReport:
        """Auxiliary losses and counts by layer from the vector's numbers on the host."""
        return self.aux.read(self._end(values), values[1])

    def _end(self, values: Any) -> Any:
        begin = _FIXED + (_MAX_METRICS + _MAX_NAME_BYTES if self.names is None else len(self.names))
        return values[begin : begin + self.aux.size]

    def votes(self, values: Sequence[float]) -> int:
        """Ranks that voted, from the vector's numbers on the host."""
        return round(values[_VOTES])


def add_up(
    reports: Sequence[LossReport],
    aux: AuxSums,
    groups: ProcessGroups,
    device: torch.device,
    *,
    specs: Mapping[int, AuxSpec] | None = None,
    vote: bool = False,
) -> Totals:
    """Totals over micro-batches, replicas and stages; the same on every rank.

    Args:
        reports: of the micro-batches, on the last stage; empty on the others.
        aux: sums of this rank.
        groups: the layout; the world is summed over.
        device: of the result.
        specs: what all layers of the model report; None for what this rank has.
        vote: of this rank.

    Raises:
        ValueError: micro-batches with different metrics, or (over several stages) more metrics than there is room for.
    """
    names = tuple(sorted(_entries(reports[0]))) if reports else ()
    rows = [torch.zeros(_FIXED + len(names), dtype=torch.float64, device=device)]
    # The tp ranks hold the same reports; auxiliary losses are parts that add up over them.
    for report in reports if groups.tp.is_first else ():
        entries = _entries(report)
        if set(entries) != set(names):
            raise ValueError(
                f"an objective reported the metrics {sorted(entries)} after {list(names)}; report the same for every micro-batch"
            )
        nothing = torch.zeros_like(report.sum)
        scalars = [report.sum, report.count, nothing, nothing, *(entries[name] for name in names)]
        rows.append(torch.stack([scalar.detach().to(device, torch.float64) for scalar in scalars]))
    vector = torch.stack(rows).sum(0)
    if aux.total is not None:
        vector[2] = aux.total
    if vote:
        vector[_VOTES] = 1.0
    layout = AuxLayout.of(specs or {}, aux if groups.pp.size == 1 else None)
    if undeclared := set(aux.counts) - {layer for layer, _ in layout.counts}:
        raise ValueError(
            f"layers {sorted(undeclared)} count tokens that their builder does not declare, which pp={groups.pp.size} stages need; "
            "give the feed-forward builder aux_spec (mcore_parallel.models.DeclaresAux)"
        )
    end = layout.vector(aux, device)
    if groups.pp.size == 1:
        return Totals(all_reduce(torch.cat((vector, end)), groups.world), names, layout)
    wide = torch.zeros(_FIXED + _MAX_METRICS + _MAX_NAME_BYTES, dtype=torch.float64, device=device)
    wide[: len(vector)] = vector
    speaker = groups.pp.is_last and groups.tp.is_first and groups.dp_cp.is_first
    if names and speaker:
        code = _encode(names)
        wide[_FIXED + _MAX_METRICS :][: len(code)] = torch.tensor(code, dtype=torch.float64).to(device, non_blocking=True)
    return Totals(all_reduce(torch.cat((wide, end)), groups.world), None, layout)


def _entries(report: LossReport) -> dict[str, Tensor]:
    """What is added up for the metrics of a report."""
    return {**report.metrics, **{name + _COUNT: count for name, count in report.counts.items()}}


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0


def _encode(names: Sequence[str]) -> list[int]:
    code = list("\n".join(names).encode())
    if len(names) > _MAX_METRICS or len(code) > _MAX_NAME_BYTES:
        raise ValueError(
            f"{len(names)} metrics with names of {len(code)} bytes do not fit; "
            f"over pipeline stages report at most {_MAX_METRICS} metrics of {_MAX_NAME_BYTES} bytes"
        )
    return code


def _decode(values: Sequence[float]) -> tuple[str, ...]:
    text = bytes(int(value) for value in values if value).decode()
    return tuple(text.split("\n")) if text else ()
