# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One piece of a parameter with its optimizer state."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_parallel.groups import Piece, ProcessGroups, ShardSpec, boxes
from mcore_parallel.optim._config import OptimizerConfig, Rule
from mcore_parallel.optim._state import Master, Plain, Remainder, StateStorage, moment

WIDE = (torch.float32, torch.float64)


class PieceState:
    """State of one piece, in the device's memory or the host's.

    Args:
        piece: what is updated.
        rule: how.
        config: dtypes of the state.
        on_host: keep the state in host memory.
    """

    def __init__(self, piece: Piece, rule: Rule, config: OptimizerConfig, *, on_host: bool = False) -> None:
        self.piece, self.rule, self.on_host = piece, rule, on_host
        parameter = piece.parameter
        device = torch.device("cpu") if on_host else parameter.device
        pinned = on_host and parameter.is_cuda and config.pin_cpu_params
        self.target = _host_like(parameter, parameter.dtype, pinned).copy_(parameter) if on_host else parameter
        """What the update writes: the piece, or its image in host memory."""
        self.staging = _host_like(piece.gradient, piece.gradient.dtype, parameter.is_cuda and config.pin_cpu_grads) if on_host else None
        """Where the host finds the gradient."""
        narrow = config.use_precision_aware_optimizer and parameter.dtype != torch.float64
        maths = parameter.dtype if parameter.dtype in WIDE else torch.float32
        self.master: StateStorage
        if parameter.dtype in WIDE:
            self.master = Plain(self.target)
        elif config.store_param_remainders and parameter.dtype == torch.bfloat16:
            self.master = Remainder(torch.zeros_like(self.target, dtype=torch.int16), self.target)
        else:
            self.master = Master(self.target.float(), self.target)
        adam = rule.kind == "adam"
        numel = len(parameter)
        self.exp_avg = moment(numel, config.exp_avg_dtype if narrow and adam else maths, device, rooted=False)
        """First moment, or the momentum of the other rules."""
        self.exp_avg_sq = moment(numel, config.exp_avg_sq_dtype if narrow else maths, device, rooted=True) if adam else None

    @property
    def has_master(self) -> bool:
        """Whether the state holds bits that the parameter lacks."""
        return self.piece.parameter.dtype not in WIDE

    def storages(self) -> Iterator[tuple[str, StateStorage]]:
        """The state by kind."""
        yield ("exp_avg" if self.rule.kind == "adam" else "momentum"), self.exp_avg
        if self.exp_avg_sq is not None:
            yield "exp_avg_sq", self.exp_avg_sq
        if self.has_master:
            yield "master", self.master

    def refresh_image(self) -> None:
        """Bring the host's image of the parameter in line with what was loaded: the image follows the parameter."""
        self.target.copy_(self.piece.parameter)

    def reload(self) -> None:
        """Take the master from the parameter."""
        if self.on_host:
            self.target.copy_(self.piece.parameter)
        if self.has_master:
            self.master.write(self.target.float())


class Placement:
    """Where pieces lie in global tensors, and which rank counts them."""

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = groups

    def replica(self, piece: Piece, *, owned: bool = False) -> int:
        """Number of this copy of a piece; 0 counts.

        Args:
            piece: which.
            owned: of all replicas, only this one holds the state.
        """
        spec = piece.spec
        if piece.is_whole and not owned:
            return spec.replica(self._groups)
        number = spec.pipeline_copy(self._groups)
        if piece.instance is not None:
            number = number * piece.data_group.size + piece.instance
        for axis in ("tp", "ep") if spec.view == "expert" else ("tp",):
            if axis not in spec.shards:
                group = self._groups.axis(spec.view, axis)
                number = number * group.size + group.rank
        return number

    def counts(self, piece: Piece) -> bool:
        """Whether this rank counts the piece in a sum over the world."""
        return self.replica(piece) == 0

    def parts(self, piece: Piece, flat: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
        """A flat tensor of the piece as boxes of the global tensor: (view, global offset)."""
        base = piece.spec.offset(self._groups)
        parts, at = [], 0
        for offset, size in boxes(piece.shape, piece.start, piece.end):
            numel = torch.Size(size).numel()
            place = tuple(begin + more for begin, more in zip(base, offset, strict=True))
            parts.append((flat[at : at + numel].view(size), place))
            at += numel
        return parts


def whole_piece(name: str, spec: ShardSpec, parameter: Tensor, gradient: Tensor, groups: ProcessGroups) -> Piece:
    """All of a parameter as one piece, for sources that know no pieces."""
    flat = parameter.detach().view(-1)
    return Piece(name, spec, 0, len(flat), flat, gradient.view(-1), tuple(parameter.shape), groups.data(spec.view))


def _host_like(tensor: Tensor, dtype: torch.dtype, pinned: bool) -> Tensor:
    return torch.empty(len(tensor), dtype=dtype, device="cpu", pin_memory=pinned)
