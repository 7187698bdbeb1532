# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which rank and tensor a wrong result comes from."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from mcore_parallel.comm import all_gather
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.training._step import GradientPass

# What a rank may say about itself.
_MAX_TENSORS, _MAX_BYTES = 4, 1024


@runtime_checkable
class NamedGradients(Protocol):
    """A gradient sync that shows the gradients, which in a backward without a sum are those of the rank."""

    def gradients(self) -> Mapping[str, Tensor]: ...


def find_evidence(work: GradientPass, rewind: Callable[[], None]) -> tuple[str, ...]:
    """What is not finite, or differs between two runs of the step, on each rank by itself; the same on every rank.

    Sums over replicas are left out, so that a replica does not spoil the others. Ranks of one replica see each other's activations: of
    several that are named in one replica, the fault lies in one.

    Args:
        work: the step; its gradients are overwritten.
        rewind: puts the random generators back, before each run.
    """
    evidence = []
    for _ in range(2):
        rewind()
        reports = work.alone()
        sums = {f"loss of micro-batch {number}": report.sum for number, report in enumerate(reports)}
        if isinstance(work.sync, NamedGradients):
            sums |= {f"gradient of {name}": gradient for name, gradient in work.sync.gradients().items()}
        evidence.append({name: _fingerprint(value) for name, value in sums.items()})
    first, second = evidence
    words = [f"{name} is not finite" for name in first if not first[name].isfinite().all() or not second[name].isfinite().all()]
    words += [f"{name} differs between runs" for name in first if not _equal_bits(first[name], second[name])]
    if len(words) > _MAX_TENSORS:
        words = [*words[:_MAX_TENSORS], f"and {len(words) - _MAX_TENSORS} more"]
    text = f"{_place(work.groups)}: {'; '.join(words)}" if words else ""
    return tuple(part for part in _gather_text(text, work.groups, work.stage.device) if part)


def _fingerprint(x: Tensor) -> Tensor:
    """[2] float64 on the host: sum and sum of squares."""
    wide = x.detach().double()
    return torch.stack([wide.sum(), wide.square().sum()]).cpu()


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


def _place(groups: ProcessGroups) -> str:
    """This rank, and the groups it lies in."""
    axes = {"tp": groups.tp, "cp": groups.cp, "pp": groups.pp, "dp": groups.dp, "ep": groups.ep}
    parts = [f"{name} {group.rank} of ranks {', '.join(map(str, group.ranks))}" for name, group in axes.items() if group.size > 1]
    return f"rank {groups.world.rank}" + (f" ({'; '.join(parts)})" if parts else "")


def _gather_text(text: str, groups: ProcessGroups, device: torch.device) -> list[str]:
    """Every rank's text, cut to a fixed size."""
    code = torch.zeros(_MAX_BYTES, dtype=torch.uint8)
    raw = text.encode()[:_MAX_BYTES]
    code[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
    rows = all_gather(code.to(device), groups.world).view(-1, _MAX_BYTES).cpu()
    return [bytes(row[row != 0].tolist()).decode(errors="replace") for row in rows]
