# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where two runs first differ."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_parallel.numerics._bound import Difference, expected_rel_bound, layer_of, precision
from mcore_parallel.numerics._compare import diagnose
from mcore_parallel.numerics._recorder import STATISTICS, DumpEntry, DumpError, num_layers, read_entries, read_tensor, statistics


@dataclass(frozen=True, kw_only=True)
class TensorDifference(Difference):
    """How one tensor of a run fares against that of another; of statistics ``rel`` is the largest, relative to the norm or the range."""

    phase: str
    call: int


@dataclass(frozen=True)
class DumpReport:
    """All tensors of two runs, in the order in which they came about."""

    differences: tuple[TensorDifference, ...]
    only_in_test: tuple[str, ...] = ()
    only_in_reference: tuple[str, ...] = ()

    @property
    def first(self) -> TensorDifference | None:
        """The first one beyond its bound."""
        return next((difference for difference in self.differences if not difference.ok), None)

    @property
    def ok(self) -> bool:
        """Every tensor is there twice, and within its bound."""
        return self.first is None and not self.only_in_test and not self.only_in_reference

    def table(self, *, everything: bool = False) -> str:
        """Lines for people: the first difference, then the tensors around it.

        Args:
            everything: all tensors instead.
        """
        lines = [f"only in {run}: {name}" for run, names in self._missing() for name in names]
        first = self.first
        if first is None:
            lines.append(f"{len(self.differences)} tensors are the same within their bounds")
        else:
            where = f"{first.phase} of call {first.call}" if first.phase in ("forward", "backward") else first.phase
            lines.append(f"first difference: {first.name} (layer {first.layer}), {where}: {first.rel:.3g}, bound {first.bound:.3g}")
            if first.hint:
                lines.append(f"  {first.hint}")
        shown = self.differences
        if not everything and first is not None:
            place = shown.index(first)
            shown = shown[max(0, place - 3) : place + 4]
        if everything or first is not None:
            width = max((len(difference.name) for difference in shown), default=4)
            lines.append(f"{'phase':<9}  call  {'name':<{width}}  layer  difference  bound")
            for one in shown:
                mark = "" if one.ok else "  BEYOND"
                lines.append(f"{one.phase:<9}  {one.call:>4}  {one.name:<{width}}  {one.layer:>5}  {one.rel:<10.3g}  {one.bound:.3g}{mark}")
        return "\n".join(lines)

    def _missing(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return (("the test", self.only_in_test), ("the reference", self.only_in_reference))


def compare_dumps(
    test: str | Path,
    reference: str | Path,
    *,
    exact: bool = False,
    dtype: torch.dtype | None = None,
    growth: float = 1.03,
    factor: float = 4.0,
) -> DumpReport:
    """Compare what ``TensorRecorder`` wrote of two runs.

    Gradients may differ as ``expected_rel_bound`` says; hidden states by as much, counted from the other end, since their errors
    grow on the way forward.

    Args:
        test: folder of one run.
        reference: folder of the other.
        exact: nothing may differ.
        dtype: what the runs computed in; None for the coarser dtype of each pair of tensors.
        growth: as of ``expected_rel_bound``.
        factor: as of ``expected_rel_bound``.

    Raises:
        DumpError: folders that hold no dumps, tensors whose shapes differ, nothing that both hold.
        ImportError: the extra ``compare`` is not installed.
    """
    tests, references = read_entries(test), read_entries(reference)
    both = tests.keys() & references.keys()
    if not both:
        raise DumpError(f"{test} and {reference} have no tensor in common; record the same model in both runs")
    layers = max(num_layers(tests), num_layers(references))
    differences = []
    for key in sorted(both, key=lambda key: references[key].place(layers)):
        mine, theirs = tests[key], references[key]
        if mine.shape != theirs.shape:
            raise DumpError(f"{key} has the shape {mine.shape} in {test}, {theirs.shape} in {reference}; compare runs of the same batches")
        coarser = dtype or max((mine.dtype, theirs.dtype), key=precision)
        layer = layer_of(f"{mine.name}.", layers)
        behind = layers + 1 - layer if mine.phase == "forward" else layer
        bound = 0.0 if exact else expected_rel_bound(behind, layers, dtype=coarser, growth=growth, factor=factor)
        differences.append(_difference(mine, theirs, layer, bound))
    return DumpReport(tuple(differences), _only(tests, references), _only(references, tests))


def _only(here: Mapping[str, DumpEntry], there: Mapping[str, DumpEntry]) -> tuple[str, ...]:
    return tuple(sorted(here.keys() - there.keys()))


def _difference(mine: DumpEntry, theirs: DumpEntry, layer: int, bound: float) -> TensorDifference:
    a, b = read_tensor(mine), read_tensor(theirs)
    hint = ""
    if mine.is_statistics or theirs.is_statistics:
        a, b = (x.double() if entry.is_statistics else statistics(x) for x, entry in ((a, mine), (b, theirs)))
        rel, name = _of_statistics(a, b)
        hint = f"the {name} differs" if not rel <= bound else ""
    else:
        a, b = a.double(), b.double()
        rel = ((a - b).norm() / (b.norm() + 1e-30)).item()
        if not rel <= bound:
            hint = diagnose(a, b)
    return TensorDifference(phase=mine.phase, call=mine.call, name=mine.name, layer=layer, rel=rel, bound=bound, hint=hint)


def _of_statistics(a: torch.Tensor, b: torch.Tensor) -> tuple[float, str]:
    """The largest difference, and which of them it is."""
    reach = max(abs(float(b[STATISTICS.index(name)])) for name in ("min", "max")) + 1e-30
    norm = abs(float(b[STATISTICS.index("norm")])) + 1e-30
    rels = [abs(float(a[i] - b[i])) / (norm if name == "norm" else reach) for i, name in enumerate(STATISTICS)]
    worst = max(range(len(rels)), key=lambda i: math.inf if rels[i] != rels[i] else rels[i])
    return rels[worst], STATISTICS[worst]
