# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The norm of all gradients of a model, whatever its layout."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mcore_parallel._groups import ProcessGroups
from mcore_parallel._shards import NamedShard, Piece
from mcore_parallel.comm import all_reduce
from mcore_parallel.optim._unit import Placement, whole_piece


def global_grad_norm(gradients: Mapping[str, Tensor], shards: Sequence[NamedShard], groups: ProcessGroups) -> Tensor:
    """2-norm of the whole model's gradient, as a float64 scalar tensor that is bit for bit the same on every rank.

    Every part of every parameter counts on exactly one rank of the world (the one whose replica number is 0), and
    one sum over the world adds them up: dense and expert parameters, all stages and all replicas at once. Replicas
    therefore cannot drift apart through a last bit of the clipping factor.

    Args:
        gradients: complete gradients by parameter name.
        shards: parameters and placements, on every rank those of its stage.
        groups: the process groups.
    """
    solid = {name: gradient.contiguous() for name, gradient in gradients.items()}
    pieces = [whole_piece(shard.name, shard.spec, solid[shard.name], solid[shard.name], groups) for shard in shards]
    return GradientNorm(pieces, groups).totals()[0].sqrt()


class GradientNorm:
    """Sums over the whole model's gradient; which pieces count here is decided once.

    Args:
        pieces: those of this rank.
        groups: the process groups.
        device: of the sums on a rank without pieces, which takes part all the same; None for the CPU.
    """

    def __init__(self, pieces: Sequence[Piece], groups: ProcessGroups, device: torch.device | None = None) -> None:
        place = Placement(groups)
        self._groups = groups
        self._counted = [piece for piece in pieces if place.counts(piece)]
        self._device = pieces[0].gradient.device if pieces else device or torch.device("cpu")
        # Lists that a multi-tensor kernel takes in one go, by dtype and factor of the gradients.
        self._alike: dict[tuple[torch.dtype, float], list[Tensor]] = {}
        for piece in self._counted:
            self._alike.setdefault((piece.gradient.dtype, piece.factor), []).append(piece.gradient)

    def totals(self, *, count_zeros: bool = False) -> Tensor:
        """[squared norm, number of zeros (0 unless counted)], float64, the same on every rank."""
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for (dtype, factor), grads in self._alike.items():
            norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.promote_types(dtype, torch.float32)))  # pyright: ignore[reportPrivateImportUsage]
            totals[0] += norms.double().square().sum() * factor**2
        if count_zeros:
            for piece in self._counted:
                totals[1] += len(piece.gradient) - torch.count_nonzero(piece.gradient)
        return all_reduce(totals, self._groups.world)
