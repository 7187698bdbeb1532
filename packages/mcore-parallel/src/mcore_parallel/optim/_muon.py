# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Muon: momentum whose matrices are made orthogonal, each matrix on the replica that owns it."""

import heapq
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from mcore_parallel.comm import all_gather
from mcore_parallel.groups import Group, Piece, ProcessGroups
from mcore_parallel.optim._adam import Numbers
from mcore_parallel.optim._config import OptimizerConfig
from mcore_parallel.optim._piece_state import PieceState

# Quintic whose iteration takes singular values of (0, 1] to about 1 in five steps (Keller Jordan's Muon).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def assign_largest_first(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """The rank of each item: the largest item first, to the rank that has the least (the lowest of equals).

    Example:
        >>> assign_largest_first([5, 4, 3, 3, 3], 2)
        [0, 1, 1, 0, 1]
    """
    heap = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        load, rank = heapq.heappop(heap)
        owners[index] = rank
        heapq.heappush(heap, (load + sizes[index], rank))
    return owners


def orthogonalise(matrices: Tensor, num_steps: int = 5) -> Tensor:
    """About U V^T of each matrix [..., r, c] = U S V^T, by Newton-Schulz steps: singular values come to lie between 0.7 and 1.2.

    16-bit tensor cores are exact enough for it, so on a GPU the GEMMs are bfloat16.
    """
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(num_steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class LayerwiseMuon:
    """Updates whole tensors, each on one replica, and hands the results to the others.

    Args:
        pieces: whole parameters of two or more dims, in the model's order; alike on all replicas.
        groups: gathers matrices that tensor parallelism cuts.
        config: the update rule.

    Raises:
        ValueError: a piece that is a slice, or a parameter without two dims.
    """

    def __init__(self, pieces: Sequence[Piece], groups: ProcessGroups, config: OptimizerConfig) -> None:
        for piece in pieces:
            if not piece.is_whole:
                raise ValueError(f"muon updates {piece.name} whole, but its gradient is sliced; add it to layerwise_param_patterns")
            if len(piece.shape) < 2:
                raise ValueError(f"muon needs matrices, but {piece.name} has the shape {piece.shape}; use another optimizer for it")
        self._groups, self._config = groups, config
        self._by_group: dict[tuple[Group, torch.dtype], list[Piece]] = {}
        for piece in pieces:
            self._by_group.setdefault((piece.data_group, piece.parameter.dtype), []).append(piece)
        self._owners = {
            (group, dtype): assign_largest_first([len(piece.parameter) for piece in members], group.size)
            for (group, dtype), members in self._by_group.items()
        }

    def owned(self) -> list[Piece]:
        """Pieces that this rank updates."""
        return [
            piece
            for (group, dtype), members in self._by_group.items()
            for piece, owner in zip(members, self._owners[group, dtype], strict=True)
            if owner == group.rank
        ]

    def update(self, unit: PieceState, numbers: Numbers) -> None:
        """One step of one owned piece."""
        config, piece = self._config, unit.piece
        p, m = unit.master.read(), unit.exp_avg.read()
        lr, decay = numbers.rate(unit.rule), numbers.decay(unit.rule)
        g = piece.gradient.to(p.dtype) * numbers.factor(unit)
        if decay and not config.decoupled_weight_decay:
            g.add_(p, alpha=decay)
        m.mul_(config.muon_momentum).add_(g)
        direction = g.add(m, alpha=config.muon_momentum) if config.muon_nesterov else m
        step = self._direction(piece, direction.view(piece.shape))
        if config.decoupled_weight_decay:
            p.mul_(1.0 - lr * decay)
        p.add_(step.reshape(-1), alpha=-lr)
        unit.exp_avg.write(m)
        unit.master.write(p)

    def share(self) -> None:
        """Give every replica the parameters that the others updated."""
        for (group, dtype), members in self._by_group.items():
            if group.size == 1:
                continue
            owners = self._owners[group, dtype]
            sizes = [0] * group.size
            for piece, owner in zip(members, owners, strict=True):
                sizes[owner] += len(piece.parameter)
            mine = torch.zeros(max(sizes), dtype=dtype, device=members[0].parameter.device)
            own = [piece.parameter for piece, owner in zip(members, owners, strict=True) if owner == group.rank]
            if own:
                mine[: sizes[group.rank]] = torch.cat(own)
            rows = all_gather(mine, group).view(group.size, -1)
            at = [0] * group.size
            for piece, owner in zip(members, owners, strict=True):
                numel = len(piece.parameter)
                if owner != group.rank:
                    piece.parameter.copy_(rows[owner, at[owner] : at[owner] + numel])
                at[owner] += numel

    def _direction(self, piece: Piece, matrices: Tensor) -> Tensor:
        """The scaled orthogonal update of this rank's part."""
        rows = next((rows for pattern, rows in self._config.muon_split_rows if fnmatchcase(piece.name, pattern)), 0)
        if rows:
            if piece.shape[-2] % rows:
                raise ValueError(
                    f"muon_split_rows gives {piece.name} blocks of {rows} rows, which do not divide its {piece.shape[-2]} rows"
                )
            blocks = matrices.unflatten(-2, (-1, rows))
            return self._scaled(orthogonalise(blocks, self._config.muon_num_ns_steps)).flatten(-3, -2)
        spec = piece.spec
        cuts = [(self._groups.axis(spec.view, axis), dim) for axis, dim in spec.shards.items() if dim >= len(piece.shape) - 2]
        whole = matrices
        for group, dim in cuts:
            whole = all_gather(whole, group, dim)
        whole = self._scaled(orthogonalise(whole, self._config.muon_num_ns_steps))
        for group, dim in cuts:
            whole = whole.chunk(group.size, dim)[group.rank]
        return whole

    def _scaled(self, update: Tensor) -> Tensor:
        rows, columns = update.shape[-2:]
        spectral = self._config.muon_scale_mode == "spectral"
        scale = max(rows, columns) ** 0.5 if spectral else max(1.0, rows / columns) ** 0.5
        return update * (scale * self._config.muon_extra_scale)
