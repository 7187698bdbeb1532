# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Updates in host memory, and state that waits there between two steps."""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.groups import Piece
from mcore_parallel.optim._adam import Numbers, adam
from mcore_parallel.optim._config import OptimizerConfig
from mcore_parallel.optim._piece_state import PieceState
from mcore_parallel.optim._state import BLOCK

_ALIGNMENT = 256
_SLOTS = 3
"""Windows on the device at a time while state streams through: one comes, one is updated, one goes."""
_PIECE_BYTES = 1 << 25
"""Of one copy: what is small and goes the same way, such as the tokens of a step or the batches of the next one, waits for no more."""


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


class _Window:
    """Tensors that travel together, one behind the other: as bytes of one block.

    Args:
        tensors: contiguous, each all of its storage at first.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        ends = list(accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in self.tensors))
        self._begins = [0, *ends[:-1]]
        self.num_bytes = ends[-1]
        self.block: Tensor | None = None
        """uint8 [num_bytes] on the device, where the tensors lie since they came back; None while they lie where they were made."""

    def lie_in(self, block: Tensor) -> None:
        """Let the tensors be parts of a block."""
        for tensor, begin in zip(self.tensors, self._begins, strict=True):
            tensor.set_(block.untyped_storage(), begin // tensor.element_size(), tensor.shape, tensor.stride())

    def images(self, host: Tensor) -> list[Tensor]:
        """The tensors as parts of their bytes on the host."""
        places = zip(self.tensors, self._begins, strict=True)
        return [host[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for tensor, begin in places]

    def copy_to(self, host: Tensor, gaps: Tensor | None) -> None:
        """Queue the copy to the host, as ``_copy``."""
        if self.block is not None:
            _copy(host, self.block, gaps)
            return
        for tensor, begin in zip(self.tensors, self._begins, strict=True):
            _copy(host[begin : begin + tensor.nbytes], tensor.view(-1).view(torch.uint8), gaps)

    def free(self, reader: torch.cuda.Stream | None) -> None:
        """Give the device memory back; it is used again when what is queued on ``reader`` is done."""
        for tensor in self.tensors if self.block is None else (self.block,):
            if reader is not None:
                tensor.record_stream(reader)
            tensor.untyped_storage().resize_(0)

    def allocate(self) -> Tensor:
        """Take device memory again; the contents are to come."""
        if self.block is None:
            first = self.tensors[0]
            self.block = torch.empty(self.num_bytes, dtype=torch.uint8, device=first.device)
        else:
            self.block.untyped_storage().resize_(self.num_bytes)
        self.lie_in(self.block)
        return self.block


class ParkedTensors:
    """Tensors whose contents can move to host memory, and whose device memory is free meanwhile.

    They travel in windows, each one block of memory. The host memory is taken once, page-locked, and kept. Copies of a GPU have streams of
    their own: those to the host go beside what is queued after ``park``, those back beside what is queued until ``wait``.

    Args:
        tensors: of one device, in groups that ``stream`` wants there together.
        window_bytes: of the groups of a window, at least one.
    """

    def __init__(self, tensors: Sequence[Sequence[Tensor]], *, window_bytes: int = 1 << 28) -> None:
        self.windows = _windows([sum(tensor.nbytes for tensor in group) for group in tensors], window_bytes)
        """Numbers of the groups in each window."""
        self._windows = [_Window([tensor for number in numbers for tensor in tensors[number]]) for numbers in self.windows]
        self._device = self._windows[0].tensors[0].device if self._windows else torch.device("cpu")
        self._hosts: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._arrived: torch.cuda.Event | None = None
        on_gpu = self._device.type == "cuda"
        self._down = torch.cuda.Stream(self._device) if on_gpu else None
        self._up = torch.cuda.Stream(self._device) if on_gpu else None
        self._gaps = torch.zeros(1, device=self._device) if on_gpu else None
        self._away: list[int] = []

    @property
    def are_parked(self) -> bool:
        """Whether some of the windows are in host memory."""
        return bool(self._away)

    def park(self, keep_bytes: int = 0) -> None:
        """Start to copy to the host, and free.

        Args:
            keep_bytes: the first windows, as many as have so many bytes together, stay on the device; those that were away come back.

        Raises:
            torch.OutOfMemoryError: as of ``restore``, of windows that come back.
        """
        ends = accumulate(window.num_bytes for window in self._windows)
        away = [number for number, end in enumerate(ends) if end > keep_bytes]
        self._bring([number for number in self._away if number not in away])
        leaving = [number for number in away if number not in self._away]
        if not leaving:
            return
        self.wait()
        if not self._hosts:
            self._hosts = self._host_memory()
        _go_behind(self._down, self._current())
        with torch.cuda.stream(self._down):
            for number in leaving:
                self._windows[number].copy_to(self._hosts[number], self._gaps)
        for number in leaving:
            self._windows[number].free(self._down)
        self._away = away

    def restore(self) -> None:
        """Take device memory again, and start to copy back.

        Raises:
            torch.OutOfMemoryError: there is too little; what was in host memory still is.
        """
        self._bring(self._away)

    def _bring(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        windows = [self._windows[number] for number in numbers]
        try:
            blocks = [window.allocate() for window in windows]
        except RuntimeError:
            for window in windows:
                if window.block is not None:
                    window.block.untyped_storage().resize_(0)
            raise
        # Earlier work may still use what the memory was before, and the host may not have all yet.
        _go_behind(self._up, self._current(), self._down)
        with torch.cuda.stream(self._up):
            for number, block in zip(numbers, blocks, strict=True):
                _copy(block, self._hosts[number], self._gaps)
        self._arrived = _mark(self._up)
        self._away = [number for number in self._away if number not in numbers]

    def wait(self) -> None:
        """Let what is queued from now on find the restored values."""
        _go_behind_mark(self._current(), self._arrived)
        self._arrived = None

    def stream(self, update: Callable[[int], None]) -> None:
        """Bring one window after the other to the device and back to the host, where they stay; others travel while one is updated, and
        those that are on the device are updated while the first one travels.

        Args:
            update: queues what changes the tensors of ``windows[n]``; gets n.
        """
        assert self._away
        sizes = [self._windows[number].num_bytes for number in self._away]
        slots = [max(sizes[first::_SLOTS]) for first in range(min(_SLOTS, len(sizes)))]
        if [len(slot) for slot in self._slots] != slots:
            self._slots = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in slots]
        for slot in self._slots:
            slot.untyped_storage().resize_(len(slot))
        up, down, current = self._up, self._down, self._current()
        left: list[torch.cuda.Event | None] = []
        _go_behind(up, current, down)
        for place, number in enumerate(self._away):
            window, host = self._windows[number], self._hosts[number]
            block = self._slots[place % _SLOTS][: window.num_bytes]
            window.lie_in(block)
            if place >= _SLOTS:
                _go_behind_mark(up, left[place - _SLOTS])
            with torch.cuda.stream(up):
                _copy(block, host, self._gaps)
            if not place:
                for staying in sorted(set(range(len(self._windows))) - set(self._away)):
                    update(staying)
            _go_behind(current, up)
            update(number)
            _go_behind(down, current)
            with torch.cuda.stream(down):
                _copy(host, block, self._gaps)
            left.append(_mark(down))
        _go_behind(current, down)
        for slot in self._slots:
            slot.untyped_storage().resize_(0)

    def host_images(self) -> dict[int, Tensor]:
        """What is in host memory: by ``id`` of a tensor, its values there, of its shape and dtype. They are live: whatever is written
        there comes back. Waits until all of them have arrived."""
        if self._down is not None and self._away:
            self._down.synchronize()
        return {
            id(tensor): image
            for number in self._away
            for tensor, image in zip(self._windows[number].tensors, self._windows[number].images(self._hosts[number]), strict=True)
        }

    def _current(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _host_memory(self) -> list[Tensor]:
        sizes = [window.num_bytes for window in self._windows]
        # Pages that exist are locked sooner.
        flat = torch.zeros(sum(sizes), dtype=torch.uint8)
        if self._device.type == "cuda" and sizes:
            cudart: Any = torch.cuda.cudart()
            if int(cudart.cudaHostRegister(flat.data_ptr(), flat.nbytes, 0)) == 0:
                # Not with the tensor, which ends here: its views go on.
                weakref.finalize(self, _unlock, flat)
        return list(flat.split(sizes))


def _copy(destination: Tensor, source: Tensor, gaps: Tensor | None) -> None:
    """Queue the copy of bytes, in pieces.

    Args:
        destination: [n] uint8.
        source: [n] uint8.
        gaps: one number on the device, which a kernel counts up behind each piece: the copy engine, which would go on with this stream as
            long as it has copies, serves others while that runs. None without a GPU.
    """
    for begin in range(0, len(source), _PIECE_BYTES):
        end = begin + _PIECE_BYTES
        destination[begin:end].copy_(source[begin:end], non_blocking=True)
        if gaps is not None:
            gaps.add_(1.0)


def _go_behind(stream: torch.cuda.Stream | None, *others: torch.cuda.Stream | None) -> None:
    """What is queued on a stream from now on runs behind what the others have by now; None, without a GPU, for the host's own order."""
    for other in others:
        if stream is not None and other is not None:
            stream.wait_stream(other)


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Behind what a stream has by now."""
    if stream is None:
        return None
    mark = torch.cuda.Event()
    mark.record(stream)
    return mark


def _go_behind_mark(stream: torch.cuda.Stream | None, mark: torch.cuda.Event | None) -> None:
    if stream is not None and mark is not None:
        stream.wait_event(mark)


def _windows(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive numbers of groups of at most ``limit`` bytes together, or of one that is larger; those without bytes are left out."""
    windows: list[list[int]] = []
    room = 0
    for number, size in enumerate(sizes):
        if not size:
            continue
        if size > room:
            windows.append([])
            room = limit
        windows[-1].append(number)
        room -= size
    return windows


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
