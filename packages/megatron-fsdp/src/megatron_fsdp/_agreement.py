# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checking, before a collective that could hang, that all ranks are about to start the same one."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_fsdp._ranks import Ranks


class Agreement:
    """Compares what ranks do next, call by call, while the order of communication is learnt.

    Args:
        all_ranks: process groups that together connect all ranks of the model.
        device: of the tensors that are exchanged.

    Example:
        >>> Agreement((Ranks(),), torch.device("cpu")).check("forward of", 0, ["layers.0"])
    """

    def __init__(self, all_ranks: Sequence[Ranks], device: torch.device) -> None:
        self._all_ranks = tuple(ranks for ranks in all_ranks if ranks.size > 1)
        self._device = device
        self._count = 0

    def check(self, what: str, unit: int, names: Sequence[str]) -> None:
        """A collective: compare the unit that each rank is at; ``len(names)`` stands for the end.

        Raises:
            RuntimeError: on every rank, when they differ; names the units and the ranks.
        """
        self._count += 1
        if not self._all_ranks:
            return
        ranks_at: dict[int, list[int]] = {}
        for index, rank in rows_of_all(self._all_ranks, (unit, dist.get_rank()), self._device):
            ranks_at.setdefault(index, []).append(rank)
        if len(ranks_at) == 1:
            return
        parts = []
        for index, found in ranks_at.items():
            name = repr(names[index]) if index < len(names) else "the end"
            parts.append(f"{name} on rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}")
        raise RuntimeError(
            f"ranks differ at call {self._count}: {what} {' and '.join(parts)}; every rank must call the same units of fsdp_unit_modules "
            "in the same order, so leave out modules that some ranks skip"
        )


def rows_of_all(all_ranks: Sequence[Ranks], row: tuple[int, ...], device: torch.device) -> list[tuple[int, ...]]:
    """The distinct rows of numbers that the ranks give, sorted; a collective over groups that together connect them."""
    table = torch.tensor([row], dtype=torch.int64, device=device)
    for ranks in all_ranks:
        table = ranks.all_gather(table)
    return sorted(set(map(tuple, table.tolist())))
