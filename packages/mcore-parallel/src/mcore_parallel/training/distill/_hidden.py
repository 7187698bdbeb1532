# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Losses between hidden states, and the map between their widths."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mcore_parallel.groups import ProcessGroups, ShardSpec

# T tokens, D width of the teacher


def hidden_cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """1 - cos(student, teacher) of every token, in float32 or wider.

    Args:
        student: [..., D].
        teacher: [..., D]; gets no gradient.

    Returns:
        [...], from 0 to 2.
    """
    student, teacher = _wide(student, teacher)
    return 1.0 - F.cosine_similarity(student, teacher, dim=-1)


def hidden_mse_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over the width of the squared difference, of every token, in float32 or wider.

    Args:
        student: [..., D].
        teacher: [..., D]; gets no gradient.

    Returns:
        [...].
    """
    student, teacher = _wide(student, teacher)
    return (student - teacher).square().mean(-1)


HIDDEN_LOSSES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType({"cosine": hidden_cosine_loss, "mse": hidden_mse_loss})


@dataclass(frozen=True, kw_only=True)
class HiddenPair:
    """A module of the student whose output should become like that of a module of the teacher.

    Raises:
        ValueError: an unknown loss.

    Example:
        >>> HiddenPair(student="layers.1", teacher="layers.3").loss
        'cosine'
    """

    student: str
    """Name of the module, for instance ``layers.1`` (numbers are global) or ``final_norm``."""
    teacher: str
    loss: str = "cosine"
    """"cosine" or "mse"."""

    def __post_init__(self) -> None:
        if self.loss not in HIDDEN_LOSSES:
            raise ValueError(f"loss={self.loss!r} must be one of {', '.join(HIDDEN_LOSSES)}")


class HiddenProjection(nn.Module):
    """Linear map with bias from the student's width to the teacher's, shared by all pairs; it is trained with the student.

    Weights are N(0, 0.01^2) and the bias is 0, the same on every rank.

    Args:
        student_size: width of the student.
        teacher_size: width of the teacher.
        groups: the layout of the student; with sequence parallelism each tp rank projects its tokens only.
        dtype: of the parameters.
        device: of the parameters.
        seed: of the initial values.
    """

    def __init__(
        self,
        student_size: int,
        teacher_size: int,
        groups: ProcessGroups,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.partial = ("tp",) if groups.sequence_parallel else ()
        values = torch.randn(teacher_size, student_size, generator=torch.Generator().manual_seed(seed)) * 0.01
        self.weight = nn.Parameter(values.to(device, dtype))
        self.bias = nn.Parameter(torch.zeros(teacher_size, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {name: ShardSpec(shape=tuple(value.shape), partial=self.partial) for name, value in self.named_parameters()}

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., student width] -> [..., teacher width]."""
        return F.linear(hidden, self.weight, self.bias)


def _wide(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    if student.shape != teacher.shape:
        raise ValueError(
            f"hidden states of shape {tuple(student.shape)} and {tuple(teacher.shape)} must be equal; "
            "models of different widths need a HiddenProjection"
        )
    dtype = torch.float64 if torch.float64 in (student.dtype, teacher.dtype) else torch.float32
    return student.to(dtype), teacher.detach().to(dtype)
