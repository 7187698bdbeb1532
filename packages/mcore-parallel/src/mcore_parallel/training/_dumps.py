# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Statistics, or the tensors themselves, of some steps of a run on disk."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.numerics import TensorRecorder
from mcore_parallel.training._step import GradientPass
from mcore_parallel.training._totals import Totals

Check = Callable[[GradientPass], Totals]


@runtime_checkable
class WholeGradients(Protocol):
    """A ``GradSync`` that knows the summed gradients by global name, as ``DistributedDataParallel`` does."""

    def gradients(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class DumpConfig:
    """Which steps are written down, and what of them.

    Raises:
        ValueError: a negative number.
    """

    every: int = 0
    """Steps between two dumps, of which the first is that of step 1; 0 for none. A dump waits for the device at every tensor."""
    statistics_only: bool = True
    """Norm, mean, deviation, smallest and largest element in place of each tensor."""
    gradients: bool = True
    """The gradients of the parameters, summed over the replicas and the tokens, and the parameters before the update. A distributed
    optimizer has neither whole: false leaves the outputs of the blocks and their gradients."""
    output: str = "dumps"
    """Folder that gets a folder for each step, which ``mcore-compare`` reads."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"every={self.every} must not be negative")

    def build(self, model: nn.Module, groups: ProcessGroups, gradients: WholeGradients | None = None) -> "StepDumps":
        """The dumps of a run; ``gradients`` is needed where they are dumped."""
        return StepDumps(self, model, groups, gradients)


class StepDumps:
    """Writes the dumps of a run; every rank has one.

    Args:
        config: which steps.
        model: a stage, or its chunks.
        groups: the layout.
        gradients: of the parameters.

    Raises:
        ValueError: ``config.gradients`` without ``gradients``; context parallelism.
    """

    def __init__(self, config: DumpConfig, model: nn.Module, groups: ProcessGroups, gradients: WholeGradients | None = None) -> None:
        if config.every and config.gradients and gradients is None:
            raise ValueError("gradients=True needs gradients that are whole on every replica; pass them, or set gradients=False")
        self.config, self.model, self.groups, self._gradients = config, model, groups, gradients
        if config.every:
            self._recorder(0)

    @contextmanager
    def step(self, number: int, check: Check | None) -> Iterator[Check | None]:
        """A context around ``train_step``, whose ``check`` it gives.

        Args:
            number: of the step.
            check: what would have been passed.
        """
        every = self.config.every
        if not every or (number - 1) % every:
            yield check
            return
        with self._recorder(number) as recorder:
            yield functools.partial(self._check, recorder, check)

    def _check(self, recorder: TensorRecorder, check: Check | None, work: GradientPass) -> Totals:
        totals = work() if check is None else check(work)
        if self.config.gradients and self._gradients is not None:
            recorder.add("gradient", self._gradients.gradients())
            recorder.add("parameter", dict(self.model.named_parameters()))
        return totals

    def _recorder(self, number: int) -> TensorRecorder:
        folder = Path(self.config.output) / f"step_{number:08d}"
        return TensorRecorder(self.model, folder, groups=self.groups, statistics_only=self.config.statistics_only)
