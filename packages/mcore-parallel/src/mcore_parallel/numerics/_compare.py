# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gradients of one run against those of another, parameter by parameter, and what kind of mistake a difference looks like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.numerics._bound import Difference, expected_rel_bound, layer_of

_NEAR = 0.05
"""Relative distance below which two tensors count as the same, in any precision that trains."""
_PARTS = (2, 3, 4, 6, 8)


def diagnose(test: Tensor, reference: Tensor) -> str:
    """One line about a gradient that differs; empty when it looks like none of the known mistakes.

    Example:
        >>> g = torch.randn(8, 4)
        >>> diagnose(2 * g, g)
        '2 times the reference: a sum over ranks is doubled or missing, or a division by their number'
        >>> diagnose(g.roll(4, 0), g)
        'the 2 parts of dim 0 come in the order [1, 0]: shards in the wrong place, or swapped q, k and v'
    """
    if test.shape != reference.shape:
        return f"shape {tuple(test.shape)} is not the reference's {tuple(reference.shape)}"
    test, reference = test.double(), reference.double()
    if not torch.isfinite(test).all():
        return "not finite"
    size = reference.norm()
    if not test.any():
        return "zero: no gradient arrived" if size else ""
    if not size:
        return "the reference is zero"
    ratio = ((test * reference).sum() / size**2).item()
    if abs(ratio - 1.0) > _NEAR and (test - ratio * reference).norm() <= _NEAR * abs(ratio) * size:
        return f"{ratio:.4g} times the reference: a sum over ranks is doubled or missing, or a division by their number"
    return _parts(test, reference)


def _parts(test: Tensor, reference: Tensor) -> str:
    """Parts of a dim that are in each other's place, or only some of which are right."""
    some_right = ""
    for dim, length in enumerate(test.shape):
        for count in (count for count in _PARTS if length % count == 0):
            ours, theirs = test.chunk(count, dim), reference.chunk(count, dim)
            order = [_match(part, theirs) for part in ours]
            if sorted(place for place in order if place is not None) == list(range(count)) and order != list(range(count)):
                return f"the {count} parts of dim {dim} come in the order {order}: shards in the wrong place, or swapped q, k and v"
            wrong = [index for index in range(count) if not _near(ours[index], theirs[index])]
            if 0 < len(wrong) < count and not some_right:
                some_right = f"of the {count} parts of dim {dim} only {wrong} differ: look at the ranks or projections that own them"
    return some_right


def _match(part: Tensor, candidates: tuple[Tensor, ...]) -> int | None:
    return next((index for index, other in enumerate(candidates) if _near(part, other)), None)


def _near(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).norm() <= _NEAR * b.norm())


@dataclass(frozen=True, kw_only=True)
class GradientCheck(Difference):
    """How one gradient fares."""


@dataclass(frozen=True)
class GradientReport:
    """All gradients, the worst relative to its bound first."""

    checks: tuple[GradientCheck, ...]

    @property
    def ok(self) -> bool:
        """Every gradient is within its bound."""
        return all(check.ok for check in self.checks)

    @property
    def worst(self) -> GradientCheck:
        """The one that is furthest beyond its bound, or closest to it."""
        return self.checks[0]

    def table(self) -> str:
        """One line a gradient, for people."""
        width = max((len(check.name) for check in self.checks), default=0)
        lines = [f"{'name':<{width}}  layer  difference  bound     share"]
        for check in self.checks:
            share = check.rel / check.bound
            line = f"{check.name:<{width}}  {check.layer:>5}  {check.rel:<10.3g}  {check.bound:<8.3g}  {share:<6.3g}"
            lines.append((line if check.ok else f"{line}  BEYOND  {check.hint}").rstrip())
        return "\n".join(lines)


def relative_grad_diff(test: Tensor, reference: Tensor, *, spec: ShardSpec | None = None, groups: ProcessGroups | None = None) -> float:
    """||test - reference|| / (||reference|| + 1e-30) of the whole tensor, with norms in float64.

    Args:
        test: a gradient, or this rank's part of it. The first moment of Adam after one step does as well: it is a multiple.
        reference: the one it is compared with, of the same shape.
        spec: how both are cut; None for whole tensors.
        groups: what the ``spec`` refers to.

    Returns:
        The same number on all ranks that hold a part.

    Raises:
        ValueError: shapes that differ, or a ``spec`` without ``groups``.

    Example:
        >>> relative_grad_diff(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
        0.1
    """
    if (spec is None) != (groups is None):
        raise ValueError(f"spec={spec} and groups={groups} go together; pass both for parts, none for whole tensors")
    specs = {} if spec is None else {"": spec}
    return _differences({"": test}, {"": reference}, specs, groups)[""]


def check_gradient(
    name: str,
    test: Tensor,
    reference: Tensor,
    *,
    num_layers: int,
    dtype: torch.dtype = torch.bfloat16,
    growth: float = 1.03,
    factor: float = 4.0,
    spec: ShardSpec | None = None,
    groups: ProcessGroups | None = None,
) -> GradientCheck:
    """Compare one gradient with the reference and with the bound of its layer.

    Args:
        name: global name of the parameter, which says what layer it belongs to.
        test: as in ``relative_grad_diff``, as are ``reference``, ``spec`` and ``groups``.
        reference: see there.
        num_layers: of the model.
        dtype: what the run computes in.
        growth: as in ``expected_rel_bound``, as is ``factor``.
        factor: see there.
        spec: see ``relative_grad_diff``.
        groups: see there.

    Example:
        >>> g = torch.ones(4, 4)
        >>> check = check_gradient("layers.0.mlp.up.weight", 2 * g, g, num_layers=1)
        >>> check.ok, check.rel, check.bound
        (False, 1.0, 0.0321875)
    """
    rel = relative_grad_diff(test, reference, spec=spec, groups=groups)
    return _check(name, rel, test, reference, num_layers, dtype, growth, factor)


def compare_gradients(
    tests: Mapping[str, Tensor],
    references: Mapping[str, Tensor],
    *,
    num_layers: int,
    dtype: torch.dtype = torch.bfloat16,
    growth: float = 1.03,
    factor: float = 4.0,
    specs: Mapping[str, ShardSpec] | None = None,
    groups: ProcessGroups | None = None,
) -> GradientReport:
    """Compare the gradients of two runs, by name.

    Args:
        tests: gradients of one run by global name, or this rank's parts; ranks of one stage hold the same names in the same order.
        references: those of the other, cut alike.
        num_layers: of the whole model.
        dtype: what the run computes in.
        growth: as in ``expected_rel_bound``, as is ``factor``.
        factor: see there.
        specs: placements by name; names without one are whole.
        groups: what they refer to.

    Returns:
        The gradients of this rank's stage.

    Raises:
        ValueError: the runs do not hold the same names, or a gradient has another shape.
    """
    if tests.keys() != references.keys():
        raise ValueError(f"only one of the runs holds {sorted(tests.keys() ^ references.keys())}; compare the same parameters")
    differences = _differences(tests, references, specs or {}, groups)
    checks = [_check(name, rel, tests[name], references[name], num_layers, dtype, growth, factor) for name, rel in differences.items()]
    # Not a number comes first.
    return GradientReport(tuple(sorted(checks, key=lambda check: -check.rel / check.bound if check.rel == check.rel else float("-inf"))))


def _check(
    name: str, rel: float, test: Tensor, reference: Tensor, num_layers: int, dtype: torch.dtype, growth: float, factor: float
) -> GradientCheck:
    layer = layer_of(name, num_layers)
    bound = expected_rel_bound(layer, num_layers, dtype=dtype, growth=growth, factor=factor)
    return GradientCheck(name=name, layer=layer, rel=rel, bound=bound, hint="" if rel <= bound else diagnose(test, reference))


def _differences(
    tests: Mapping[str, Tensor], references: Mapping[str, Tensor], specs: Mapping[str, ShardSpec], groups: ProcessGroups | None
) -> dict[str, float]:
    """Relative differences; parts are added up over the axes that cut them, all parameters of an axis at once."""
    names = list(tests)
    rows: list[Tensor] = []
    for name in names:
        test, reference = tests[name].detach(), references[name].detach()
        if test.shape != reference.shape:
            raise ValueError(f"{name or 'test'} has the shape {tuple(test.shape)}, its reference {tuple(reference.shape)}")
        reference = reference.double()
        rows.append(torch.stack([(test.double() - reference).square().sum(), reference.square().sum()]))
    if not rows:
        return {}
    squares = torch.stack(rows)
    if groups is not None:
        for view, axis in dict.fromkeys((spec.view, axis) for spec in specs.values() for axis in spec.shards):
            _add_parts(
                squares, [n for n, name in enumerate(names) if name in specs and _is_cut(specs[name], view, axis)], groups, view, axis
            )
    return {name: (row[0] ** 0.5) / (row[1] ** 0.5 + 1e-30) for name, row in zip(names, squares.tolist(), strict=True)}


def _add_parts(squares: Tensor, rows: Sequence[int], groups: ProcessGroups, view: str, axis: str) -> None:
    if rows:
        index = torch.tensor(rows, device=squares.device)
        squares[index] = all_reduce(squares[index], groups.axis(view, axis))


def _is_cut(spec: ShardSpec, view: str, axis: str) -> bool:
    return spec.view == view and axis in spec.shards
