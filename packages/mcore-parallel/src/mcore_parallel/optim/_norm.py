# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The norm of all gradients of a model, whatever its layout."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import NamedShard, Piece, ProcessGroups
from mcore_parallel.optim._piece_state import Placement, whole_piece


def global_grad_norm(
    gradients: Mapping[str, Tensor], shards: Sequence[NamedShard], groups: ProcessGroups, *, norm_type: float = 2.0
) -> Tensor:
    """p-norm of the whole model's gradient, as a float64 scalar tensor that is bit for bit the same on every rank.

    Every part of every parameter counts on exactly one rank of the world (the one whose replica number is 0), and
    one sum over the world adds them up: dense and expert parameters, all stages and all replicas at once. Replicas
    therefore cannot drift apart through a last bit of the clipping factor.

    Args:
        gradients: complete gradients by parameter name.
        shards: parameters and placements, on every rank those of its stage.
        groups: the process groups.
        norm_type: p; ``math.inf`` for the largest absolute value.
    """
    solid = {name: gradient.contiguous() for name, gradient in gradients.items()}
    pieces = [whole_piece(shard.name, shard.spec, solid[shard.name], solid[shard.name], groups) for shard in shards]
    return GradientNorm(pieces, groups, norm_type=norm_type).totals()[0][0]


# G groups of parameters whose norms are taken apart.
class GradientNorm:
    """Norms of the whole model's gradient; which pieces count here is decided once.

    Args:
        pieces: those of this rank.
        groups: the process groups.
        device: of the sums on a rank without pieces, which takes part all the same; None for the CPU.
        norm_type: p; ``math.inf`` for the largest absolute value.
        parts: number of the group of each parameter, by name; those without an entry are in group 0.
        num_parts: G, the same on every rank.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        groups: ProcessGroups,
        device: torch.device | None = None,
        *,
        norm_type: float = 2.0,
        parts: Mapping[str, int] | None = None,
        num_parts: int = 1,
    ) -> None:
        place = Placement(groups)
        self._groups = groups
        self._counted = [piece for piece in pieces if place.counts(piece)]
        self._device = pieces[0].gradient.device if pieces else device or torch.device("cpu")
        self._norm_type, self._num_parts = norm_type, num_parts
        # Lists that a multi-tensor kernel takes in one go, by dtype and factor of the gradients and by group.
        self._alike: dict[tuple[torch.dtype, float, int], list[Tensor]] = {}
        for piece in self._counted:
            part = 0 if parts is None else parts.get(piece.name, 0)
            self._alike.setdefault((piece.gradient.dtype, piece.factor, part), []).append(piece.gradient)

    def totals(self, *, count_zeros: bool = False) -> tuple[Tensor, Tensor]:
        """Norms [G] and the number of zeros (0 unless counted), float64, the same on every rank."""
        p = self._norm_type
        totals = torch.zeros(self._num_parts + 1, dtype=torch.float64, device=self._device)
        for (dtype, factor, part), grads in self._alike.items():
            norms = torch.stack(torch._foreach_norm(grads, p, dtype=torch.promote_types(dtype, torch.float32)))  # pyright: ignore[reportPrivateImportUsage]
            if p == math.inf:
                # A maximum over ranks may lose what is not a number.
                largest = norms.double().nan_to_num(nan=math.inf, posinf=math.inf).amax() * factor
                totals[part] = torch.maximum(totals[part], largest)
            else:
                totals[part] += norms.double().pow(p).sum() * factor**p
        if count_zeros:
            for piece in self._counted:
                totals[-1] += len(piece.gradient) - torch.count_nonzero(piece.gradient)
        if p == math.inf:
            zeros = all_reduce(totals[-1:].clone(), self._groups.world)[0] if count_zeros else totals[-1]
            return all_reduce(totals[:-1].clone(), self._groups.world, "max"), zeros
        totals = all_reduce(totals, self._groups.world)
        return (totals[:-1].sqrt() if p == 2.0 else totals[:-1].pow(1.0 / p)), totals[-1]


def joint_norm(norms_G: Tensor, norm_type: float) -> Tensor:
    """Norm of all groups together."""
    if len(norms_G) == 1:
        return norms_G[0]
    return norms_G.amax() if norm_type == math.inf else norms_G.pow(norm_type).sum().pow(1.0 / norm_type)
