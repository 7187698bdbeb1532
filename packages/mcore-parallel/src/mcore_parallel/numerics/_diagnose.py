# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What kind of mistake a wrong gradient looks like."""

import torch
from torch import Tensor

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
