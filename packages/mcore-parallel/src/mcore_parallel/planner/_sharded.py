# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a model sharded by ``megatron_fsdp`` holds: shards all the time, and whole units while they compute."""

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass

from mcore_parallel.planner._parameters import Part, layer_shapes, replicas_of, stage_shapes
from mcore_parallel.planner._sizes import WIDE, RankSizes
from mcore_parallel.planner._workload import Layout, Workload


@dataclass(frozen=True, kw_only=True)
class FsdpUnit:
    """Whole parameters that are gathered and whole gradients that are summed together, in bytes that are not there all the time."""

    gathered: int = 0
    summed: int = 0
    """Float32 gradients, between the backward and their sum over ranks."""
    shards: int = 0
    """This rank's sum, where it is added to that of earlier micro-batches."""


@dataclass(frozen=True, kw_only=True)
class UnitBytes:
    """Of one stage, beside its shards, at the moments of a step."""

    layer: FsdpUnit = FsdpUnit()
    """The largest."""
    embedding: FsdpUnit = FsdpUnit()
    """Empty where the output layer shares it, which makes it part of the root."""
    root: FsdpUnit = FsdpUnit()
    """Output layer and final norm; gathered from the forward on. In the first backward, nobody knows yet that it is over before others."""

    @property
    def loss(self) -> int:
        """Forward: the root, and the last layer, with which the backward begins."""
        return self.root.gathered + self.layer.gathered

    @property
    def loss_backward(self) -> int:
        return self.loss + self.root.summed

    def layers(self, num_gathered: int, num_layers: int) -> int:
        """Backward of a layer that kept ``kept``: two are gathered, and while its gradients are written those of others are summed."""
        ahead = self.layer.gathered if num_layers > 1 else 0
        running = self.layer.summed + self.layer.shards - num_gathered
        return self.loss_backward + ahead + self.layer.summed + max(0, running) * min(self._running, num_layers - 1)

    @property
    def embedding_backward(self) -> int:
        """The last, beside the sums of layers."""
        running = self._running * (self.layer.summed + self.layer.shards)
        return self.root.gathered + self.root.summed + self.embedding.gathered + self.embedding.summed + running

    @property
    def _running(self) -> int:
        """Sums of layers under way: as many as the largest unit has bytes for, one at least."""
        most = max(unit.summed for unit in (self.layer, self.embedding, self.root))
        return max(1, most // self.layer.summed) if self.layer.summed else 0


def unit_bytes(workload: Workload, layout: Layout, parts: tuple[Part, ...], s: RankSizes, stage: int) -> UnitBytes:
    """Those of a stage; nothing where ``DistributedDataParallel`` is meant.

    Args:
        workload: what is trained.
        layout: where.
        parts: chunks of the stage.
        s: what the rank sees.
        stage: its number.
    """
    if layout.zero_dp_strategy is None:
        return UnitBytes()
    plan, model = layout.plan, workload.model
    again = layout.num_microbatches(workload) > 1

    def unit(numels: dict[str, int]) -> FsdpUnit:
        gathered = summed = shards = 0
        for kind, numel in numels.items():
            replicas = replicas_of(plan, kind)
            gathered += workload.dtype.itemsize * numel if layout.divides_params and replicas > 1 else 0
            if layout.divides_grads and (replicas > 1 or again):
                summed += WIDE * numel
                shards += WIDE * numel // replicas if again and replicas > 1 else 0
        return FsdpUnit(gathered=gathered, summed=summed, shards=shards)

    sizes_of = _layer_sizes(workload, layout)
    symbols = "".join(symbol for part in parts for symbol in (*part.symbols, *part.depths))
    layers = [unit(sizes_of(symbol)) for symbol in sorted(set(symbols))]
    rest = collections.Counter({kind: numel for kind, (_, numel) in stage_shapes(model, plan, stage).items()})
    alone = parts[0].first and not model.config.share_embeddings_and_output_weights
    own = {"ends" if "ends" in rest else "dense": s.V * s.D if alone else 0}
    for symbol, count in collections.Counter(symbols).items():
        rest.subtract({kind: numel * count for kind, numel in sizes_of(symbol).items()})
    rest.subtract(own)
    return UnitBytes(
        layer=max(layers, key=lambda each: each.gathered + each.summed, default=FsdpUnit()), embedding=unit(own), root=unit(dict(rest))
    )


def _layer_sizes(workload: Workload, layout: Layout) -> Callable[[str], dict[str, int]]:
    plan = layout.plan

    def of(symbol: str) -> dict[str, int]:
        by_name = {
            kind: sum(map(math.prod, shapes))
            for kind, shapes in layer_shapes(workload.model, symbol, plan.tp, plan.ep, plan.expert_tp).items()
        }
        if plan.tp == 1:
            # As in the stage, nothing is partial.
            by_name["dense"] += by_name.pop("partial")
        return by_name

    return of
