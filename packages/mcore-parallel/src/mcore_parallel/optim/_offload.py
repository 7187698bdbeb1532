# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Updates in host memory, and state that waits there between two steps."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.groups import Piece
from mcore_parallel.optim._adam import Numbers, adam
from mcore_parallel.optim._config import OptimizerConfig
from mcore_parallel.optim._piece_state import PieceState
from mcore_parallel.optim._state import BLOCK

_ALIGNMENT = 64


def split_for_host(pieces: Sequence[Piece], fraction: float) -> list[tuple[Piece, bool]]:
    """(piece, whether its state is on the host): the first elements in the model's order that reach ``fraction`` of all.

    The piece in which the share ends is cut in two, at a multiple of 1024 elements, so that scaled states keep their blocks.
    """
    left = math.ceil(fraction * sum(len(piece.parameter) for piece in pieces))
    parts: list[tuple[Piece, bool]] = []
    for piece in pieces:
        numel = len(piece.parameter)
        cut = min(numel, -(-left // BLOCK) * BLOCK)
        parts += [(part, on_host) for part, on_host in ((cut_piece(piece, 0, cut), True), (cut_piece(piece, cut, numel), False)) if part]
        left = max(0, left - cut)
    return parts


def cut_piece(piece: Piece, begin: int, end: int) -> Piece | None:
    """The elements [begin, end) of a piece; None for none, and the piece itself for all of them."""
    if begin >= end:
        return None
    if (begin, end) == (0, len(piece.parameter)):
        return piece
    ranges = {"parameter": piece.parameter[begin:end], "gradient": piece.gradient[begin:end]}
    return replace(piece, start=piece.start + begin, end=piece.start + end, **ranges)


class ParkedTensors:
    """Tensors whose contents can move to host memory, and whose device memory is free meanwhile.

    The host memory is taken once, page-locked to the byte, and kept. Copies from a GPU are queued behind its work, in its order; those
    back travel on a stream of their own, beside what is computed until ``wait``.

    Args:
        tensors: of one device, each all of its storage.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._cuda = bool(tensors) and tensors[0].is_cuda
        self._copies: list[Tensor] | None = None
        self._arrived: torch.cuda.Event | None = None
        self._upwards = torch.cuda.Stream(tensors[0].device) if self._cuda else None
        self.are_parked = False

    def park(self) -> None:
        """Copy to the host, and free."""
        if self.are_parked:
            return
        self.wait()
        if self._copies is None:
            self._copies = self._host_memory()
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
            # Whoever gets the memory next is queued behind the copy.
            tensor.untyped_storage().resize_(0)
        self.are_parked = True

    def restore(self) -> None:
        """Take device memory again, and start to copy back."""
        if not self.are_parked:
            return
        copies = self._copies or []
        for tensor, copy in zip(self._tensors, copies, strict=True):
            tensor.untyped_storage().resize_(copy.nbytes)
        if self._upwards is None:
            for tensor, copy in zip(self._tensors, copies, strict=True):
                tensor.copy_(copy)
        else:
            # Earlier work may still use what the memory was before.
            self._upwards.wait_stream(torch.cuda.current_stream(self._upwards.device))
            with torch.cuda.stream(self._upwards):
                for tensor, copy in zip(self._tensors, copies, strict=True):
                    tensor.copy_(copy, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(self._upwards)
        self.are_parked = False

    def wait(self) -> None:
        """Let what is queued from now on find the restored values."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._tensors[0].device).wait_event(self._arrived)
            self._arrived = None

    def _host_memory(self) -> list[Tensor]:
        rooms = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in self._tensors]
        # Pages that exist are locked sooner.
        flat = torch.zeros(sum(rooms), dtype=torch.uint8)
        if self._cuda:
            cudart: Any = torch.cuda.cudart()
            if int(cudart.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)) == 0:
                # Not with the tensor, which ends here: its views go on.
                weakref.finalize(self, _unlock, flat)
        parts = flat.split(rooms)
        return [part[: tensor.nbytes].view(tensor.dtype) for part, tensor in zip(parts, self._tensors, strict=True)]


def _unlock(memory: Tensor) -> None:
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(memory.data_ptr())


class HostUpdates:
    """Copies gradients to the host, updates there, and copies parameters, already rounded to their dtype, back.

    Args:
        units: with state on the host.
        config: the update rule; ``overlap_cpu_optimizer_d2h_h2d`` moves the copies of a GPU to streams of their own, one event
            a unit, so that the host updates one unit while others travel.
    """

    def __init__(self, units: Sequence[PieceState], config: OptimizerConfig) -> None:
        self.units, self._config = tuple(units), config
        self._overlaps = config.overlap_cpu_optimizer_d2h_h2d and any(unit.piece.parameter.is_cuda for unit in units)
        self._down = torch.cuda.Stream() if self._overlaps else None
        self._up = torch.cuda.Stream() if self._overlaps else None
        self._arrived: list[torch.cuda.Event] = []

    def fetch(self) -> None:
        """Start the copies of the gradients; call before the device's own updates."""
        if self._down is None:
            return
        self._down.wait_stream(torch.cuda.current_stream())
        self._arrived = []
        with torch.cuda.stream(self._down):
            for unit in self.units:
                assert unit.staging is not None
                unit.staging.copy_(unit.piece.gradient, non_blocking=True)
                self._arrived.append(torch.cuda.Event())
                self._arrived[-1].record(self._down)

    def run(self, numbers: Numbers) -> None:
        """Update; the compute stream waits for the parameters at the end."""
        for number, unit in enumerate(self.units):
            assert unit.staging is not None
            if self._up is None:
                unit.staging.copy_(unit.piece.gradient)
            else:
                self._arrived[number].synchronize()
            if numbers.skip:
                continue
            adam(unit, unit.staging, self._config, numbers)
            if self._up is None:
                unit.piece.parameter.copy_(unit.target)
            else:
                # The device may still read the parameter in the last forward or backward.
                self._up.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._up):
                    unit.piece.parameter.copy_(unit.target, non_blocking=True)
        if self._up is not None:
            torch.cuda.current_stream().wait_stream(self._up)
            # The host image must not change before it has left.
            self._up.synchronize()
