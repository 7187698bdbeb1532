# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the train step and the trainer ask of their parts."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from mcore_parallel.groups import Group
from mcore_parallel.training._batch import Batch
from mcore_parallel.training._objective import LossReport


class Objective(Protocol):
    """What is minimised: from the output of the last stage (``ModelOutput`` of a ``GPTModel``, ``BertOutput`` of a ``BertModel``) and its
    micro-batch to a sum over tokens."""

    def __call__(self, output: Any, batch: Batch) -> LossReport: ...


@runtime_checkable
class CountsUnits(Protocol):
    """An ``Objective`` that divides by the number of something else than tokens, as of pairs of sequences."""

    def num_units(self, batch: Batch, cp: Group) -> Tensor:
        """Scalar float64: what the reports of all ranks of ``cp`` on their shares of a micro-batch count together. Its auxiliary losses
        weigh as much, so that these are means over micro-batches, too."""
        ...


class GradSync(Protocol):
    """Sums gradients over the replicas."""

    def zero_grad_buffer(self) -> None: ...

    def no_sync(self) -> AbstractContextManager[None]: ...

    def finish_grad_sync(self) -> None: ...


@runtime_checkable
class DiscardsGradients(Protocol):
    """A ``GradSync`` whose sums can begin with the first gradient instead of zero."""

    def discard_gradients(self) -> None:
        """Called by ``train_step`` in place of ``zero_grad_buffer``; after ``finish_grad_sync`` the sums are the same."""
        ...


class UpdateResult(Protocol):
    """What an update reports."""

    @property
    def grad_norm(self) -> Tensor: ...
    @property
    def skipped(self) -> bool: ...


@runtime_checkable
class DeferredResult(Protocol):
    """A result that knows on the device whether the update was skipped."""

    @property
    def skip(self) -> Tensor: ...


@runtime_checkable
class LossScaler(Protocol):
    """An optimizer that wants losses multiplied before their backward, and divides the factor out."""

    @property
    def loss_scale(self) -> Tensor | None: ...


@runtime_checkable
class DynamicLossScaler(Protocol):
    """A ``LossScaler`` that lowers its factor after gradients that overflowed."""

    @property
    def can_lower_loss_scale(self) -> bool:
        """Whether the factor, as it is now, can become smaller; asked after overflows only."""
        ...


class Optimizer(Protocol):
    """Applies the summed gradients, multiplied by ``grad_scale``."""

    def step(self, *, grad_scale: float | Tensor, lr: float) -> UpdateResult: ...


class Schedule(Protocol):
    """Learning rate of each update, counted from 0."""

    def lr(self, step: int) -> float: ...


class Checkpointer(Protocol):
    """Keeps the state of steps."""

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any]) -> Any: ...

    def load(self, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """Fill the tensors of ``state`` from the newest step; returns that step and its extra values."""
        ...

    def latest(self) -> int | None: ...


class Writer(Protocol):
    """Takes the numbers of each step; used on the first rank only."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
