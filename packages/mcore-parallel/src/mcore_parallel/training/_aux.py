# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Auxiliary losses and token counts of a step: added up over micro-batches, and laid out in the vector that is summed over ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_parallel.models import Aux, AuxSpec


@dataclass(frozen=True)
class AuxReport:
    """Means and counts of a step on the host."""

    losses: Mapping[tuple[int, str], float]
    """By global layer number and name, without coefficients: means over micro-batches, weighted by what each counts (tokens)."""
    counts: Mapping[int, tuple[int, ...]]
    """By global layer number: tokens of each expert."""

    def values(self, *, per_layer: bool = True) -> dict[str, float]:
        """Numbers for the log.

        ``aux/<name>`` is the mean over the layers with that loss, ``aux/load`` the mean of their highest count over their mean count
        (1 is balanced), ``aux/idle_experts`` the sum of the experts without a token; ``aux/<name>/layer_<number>`` of one layer.

        Example:
            >>> AuxReport({(0, "z_loss"): 1.0, (2, "z_loss"): 3.0}, {0: (3, 1)}).values(per_layer=False)
            {'aux/z_loss': 2.0, 'aux/load': 1.5, 'aux/idle_experts': 0}
        """
        rows: dict[str, dict[int, float]] = {}
        for (layer, name), value in self.losses.items():
            rows.setdefault(name, {})[layer] = value
        for layer, counts in self.counts.items():
            mean = sum(counts) / len(counts)
            rows.setdefault("load", {})[layer] = max(counts) / mean if mean else 1.0
        values = {f"aux/{name}": sum(layers.values()) / len(layers) for name, layers in rows.items()}
        if self.counts:
            values["aux/idle_experts"] = sum(count == 0 for counts in self.counts.values() for count in counts)
        if per_layer:
            values |= {f"aux/{name}/layer_{layer}": value for name, layers in rows.items() for layer, value in layers.items()}
        return values


@dataclass
class AuxSums:
    """Sums over the micro-batches that ran so far, on this rank."""

    total: Tensor | None = None
    """Of the losses times coefficients and weights."""
    losses: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """Times weights."""
    counts: dict[int, Tensor] = field(default_factory=dict)
    """Never changed in place: what a micro-batch saw stays what it saw."""

    def add(self, aux: Aux, weight: Tensor) -> Tensor | None:
        """One micro-batch of one chunk; returns its weighted total, to be differentiated, or None when there is none.

        Args:
            aux: of its layers.
            weight: scalar, what it counts (tokens).
        """
        total = aux.total()
        if total is not None:
            total = total * weight.to(total.dtype)
            self.total = total.detach().double() if self.total is None else self.total + total.detach()
        if aux.losses:
            values = torch.stack([loss.value.detach() for loss in aux.losses.values()]).double() * weight.double()
            for key, value in zip(aux.losses, values.unbind(), strict=True):
                self.losses[key] = self.losses[key] + value if key in self.losses else value
        for layer, counts in aux.counts.items():
            # A copy: a graph fills the memory of its outputs anew for the next micro-batch.
            self.counts[layer] = self.counts[layer] + counts.detach() if layer in self.counts else counts.detach().clone()
        return total

    def clear(self) -> None:
        """Forget all."""
        self.total = None
        self.losses.clear()
        self.counts.clear()


@dataclass(frozen=True)
class AuxLayout:
    """Where the sums of all layers lie in a vector; equal on every rank."""

    losses: tuple[tuple[int, str], ...] = ()
    counts: tuple[tuple[int, int], ...] = ()
    """Layer and number of counts."""

    @classmethod
    def of(cls, specs: Mapping[int, AuxSpec], sums: AuxSums | None = None) -> "AuxLayout":
        """Of what the layers declare, and of what ``sums`` holds beside."""
        losses = dict.fromkeys((layer, name) for layer, spec in specs.items() for name in spec.losses)
        counts = {layer: spec.num_counts for layer, spec in specs.items() if spec.num_counts}
        if sums is not None:
            losses |= dict.fromkeys(sums.losses)
            counts |= {layer: len(values) for layer, values in sums.counts.items()}
        return cls(tuple(sorted(losses)), tuple(sorted(counts.items())))

    @property
    def size(self) -> int:
        return len(self.losses) + sum(number for _, number in self.counts)

    def vector(self, sums: AuxSums, device: torch.device) -> Tensor:
        """float64 [size], zero where this rank has nothing."""
        zero = torch.zeros((), dtype=torch.float64, device=device)
        parts = [torch.stack([sums.losses.get(key, zero) for key in self.losses])] if self.losses else []
        for layer, number in self.counts:
            counts = sums.counts.get(layer)
            parts.append(zero.expand(number) if counts is None else counts.double())
        return torch.cat(parts) if parts else zero.new_zeros(0)

    def counts_of(self, vector: Tensor) -> dict[int, Tensor]:
        """Views of the counts by layer."""
        sizes = [len(self.losses), *(number for _, number in self.counts)]
        return {layer: part for (layer, _), part in zip(self.counts, vector.split(sizes)[1:], strict=True)}

    def read(self, values: Sequence[float], count: float) -> AuxReport:
        """From the vector's numbers on the host; losses are divided by ``count``."""
        losses = {key: value / count if count else 0.0 for key, value in zip(self.losses, values, strict=False)}
        counts, begin = {}, len(self.losses)
        for layer, number in self.counts:
            counts[layer] = tuple(map(round, values[begin : begin + number]))
            begin += number
        return AuxReport(losses, counts)
