# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Updates in host memory."""

from collections.abc import Sequence

import torch

from mcore_parallel._shards import Piece
from mcore_parallel.optim._adam import Numbers, adam
from mcore_parallel.optim._config import OptimizerConfig
from mcore_parallel.optim._unit import Unit


def choose_offloaded(pieces: Sequence[Piece], fraction: float) -> set[str]:
    """Names of the first pieces, in the model's order, that reach ``fraction`` of all elements."""
    wanted, taken = fraction * sum(len(piece.parameter) for piece in pieces), 0
    names: set[str] = set()
    for piece in pieces:
        if taken >= wanted:
            break
        names.add(piece.name)
        taken += len(piece.parameter)
    return names


class HostUpdates:
    """Copies gradients to the host, updates there, and copies parameters, already rounded to their dtype, back.

    Args:
        units: with state on the host.
        config: the update rule; ``overlap_cpu_optimizer_d2h_h2d`` moves the copies of a GPU to streams of their own, one event
            a unit, so that the host updates one unit while others travel.
    """

    def __init__(self, units: Sequence[Unit], config: OptimizerConfig) -> None:
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
