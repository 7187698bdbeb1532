# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What feed-forwards return beside their output: named auxiliary losses and token counts, by layer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from mcore_parallel.models._config import TransformerConfig


class AuxLoss(NamedTuple):
    """One auxiliary loss of one layer and micro-batch."""

    value: Tensor
    """Scalar, differentiable, without its coefficient: this rank's part. The parts of the tp and cp ranks add up."""
    coefficient: float
    """Weight in the loss that is differentiated; 0 for a value that is only reported, and needs no gradient."""


@dataclass(frozen=True, kw_only=True)
class Aux:
    """Losses and counts of some layers, of one micro-batch.

    A recomputed forward returns it a second time, to nobody: so nothing counts twice.

    Example:
        >>> import torch
        >>> one = Aux(losses={(3, "z_loss"): AuxLoss(torch.tensor(2.0), 0.5)}, counts={3: torch.tensor([1, 0])})
        >>> two = Aux(counts={4: torch.tensor([0, 1])})
        >>> both = Aux.merged([one, None, two])
        >>> both.total(), sorted(both.counts)
        (tensor(1.), [3, 4])
    """

    losses: Mapping[tuple[int, str], AuxLoss] = field(default_factory=dict)
    """By global layer number and name."""
    counts: Mapping[int, Tensor] = field(default_factory=dict)
    """By global layer number: integers [E], this rank's tokens of each expert. Those of all ranks add up."""

    def total(self) -> Tensor | None:
        """Sum of the losses times their coefficients; None when no coefficient differs from 0."""
        weighted = [loss.value * loss.coefficient for loss in self.losses.values() if loss.coefficient]
        return sum(weighted[1:], start=weighted[0]) if weighted else None

    @staticmethod
    def merged(parts: "Iterable[Aux | None]") -> "Aux | None":
        """All in one; a layer that ran twice has the sum. None when there is none."""
        present = [part for part in parts if part is not None]
        if len(present) < 2:
            return present[0] if present else None
        losses: dict[tuple[int, str], AuxLoss] = {}
        counts: dict[int, Tensor] = {}
        for part in present:
            for key, loss in part.losses.items():
                losses[key] = AuxLoss(losses[key].value + loss.value, loss.coefficient) if key in losses else loss
            for layer, count in part.counts.items():
                counts[layer] = counts[layer] + count if layer in counts else count
        return Aux(losses=losses, counts=counts)


@dataclass(frozen=True, kw_only=True)
class AuxSpec:
    """What the ``Aux`` of one layer holds."""

    losses: tuple[str, ...] = ()
    """Names."""
    num_counts: int = 0
    """E; 0 for no counts."""
    reads_counts: bool = False
    """The layer wants ``Step.counts``."""


@runtime_checkable
class DeclaresAux(Protocol):
    """A builder of feed-forwards that says what the ``Aux`` of a layer holds, also on stages that do not hold the layer."""

    def aux_spec(self, layer: int, config: TransformerConfig) -> AuxSpec | None: ...


@runtime_checkable
class ReportsAux(Protocol):
    """A model that says what its layers report."""

    @property
    def aux_specs(self) -> Mapping[int, AuxSpec]:
        """By global layer number, of all pipeline stages; layers whose builder declares nothing are left out."""
        ...


@runtime_checkable
class CountsHook(Protocol):
    """A module that learns once a global batch what its layer counted."""

    @property
    def layer(self) -> int:
        """Global layer number."""
        ...

    def end_of_batch(self, counts: Tensor, skipped: Tensor, step: int | None) -> None:
        """After the update.

        Args:
            counts: float64 [E], over all micro-batches and ranks.
            skipped: scalar bool on the device, whether the optimizer updated nothing.
            step: at which the learning rate was taken from its schedule, counted from 0; None where it came from none.
        """
        ...
