# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Over how many ranks an engine is split, and how many engines share the experts of a mixture."""

from dataclasses import dataclass

from mcore_inference import ExpertBalancing
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_moe.serving import ExpertPlacement
from mcore_parallel import ParallelPlan
from mcore_parallel.models import TransformerConfig, check_layout, dense_feed_forward, place_layers
from mcore_parallel.pipeline import PipelineConfig


@dataclass(frozen=True, kw_only=True)
class EngineLayout:
    """The ranks of a world of engines, a process each: tp ranks of an engine first, then the engines, then the stages.

    Args:
        tp: ranks of one stage, which split its layers.
        pp: stages of an engine, which share its layers out.
        num_sharing: engines that share the experts of a mixture, each with requests of its own; 1 for an engine that has all of them.

    Example:
        >>> EngineLayout(tp=2, num_sharing=2).num_ranks
        4
    """

    tp: int = 1
    pp: int = 1
    num_sharing: int = 1

    def __str__(self) -> str:
        parts = [f"--tp {self.tp}"]
        parts += [] if self.pp == 1 else [f"--pp {self.pp}"]
        parts += [] if self.num_sharing == 1 else [f"--data-parallel {self.num_sharing} --expert-parallel"]
        return " ".join(parts)

    @property
    def ranks_each(self) -> int:
        """Of one engine."""
        return self.tp * self.pp

    @property
    def num_ranks(self) -> int:
        return self.ranks_each * self.num_sharing

    def engine_of(self, rank: int) -> int:
        """The number of its engine among those that share experts."""
        return rank // self.tp % self.num_sharing

    def describe(self, rank: int) -> str:
        """What messages call a rank of an engine; empty for an engine of one."""
        place, stage = rank % self.tp, rank // (self.tp * self.num_sharing)
        if self.pp > 1:
            return f"tp rank {place} of stage {stage}"
        return f"tp rank {place}" if self.tp > 1 else ""

    def plan(self, moe: MoEConfig | None) -> ParallelPlan:
        """The degrees of a model.

        An engine alone spreads experts over its tp ranks where they are even. Engines that share them spread them over all of these, or
        over the engines only, each of which then cuts its experts over its tp ranks.

        Raises:
            ValueError: engines cannot share the experts of this model.
        """
        if self.num_sharing == 1:
            even = moe is not None and moe.num_moe_experts % self.tp == 0
            return ParallelPlan(tp=self.tp, pp=self.pp, ep=self.tp if even else 1, sequence_parallel=False)
        if moe is None:
            raise ValueError("--expert-parallel spreads experts over engines, and the model has none; leave it out")
        if moe.num_moe_experts % self.num_sharing:
            raise ValueError(
                f"--data-parallel {self.num_sharing} with --expert-parallel must divide num_moe_experts={moe.num_moe_experts}; choose "
                "another number"
            )
        even = moe.num_moe_experts % (self.num_sharing * self.tp) == 0
        ep, etp = (self.num_sharing * self.tp, 1) if even else (self.num_sharing, self.tp)
        return ParallelPlan(tp=self.tp, pp=self.pp, dp=self.num_sharing, ep=ep, etp=etp, sequence_parallel=False)

    def check(self, model: TransformerConfig, moe: MoEConfig | None, balancing: ExpertBalancing | None = None) -> None:
        """See that a model can be split so, and its experts move; it costs no tensor and no process.

        Raises:
            ValueError: names the size that does not fit.
        """
        check_layout(model, self.plan(moe), feed_forward=moe_feed_forward(moe) if moe else dense_feed_forward)
        if self.pp > 1:
            place_layers(model, PipelineConfig(), num_stages=self.pp)
        if balancing is None:
            return
        ep = self.plan(moe).ep
        if moe is None or ep == 1:
            lacks = "the model has no experts" if moe is None else f"{self} leaves all experts on each rank"
            raise ValueError(f"--redundant-experts and --rebalance-steps move experts between ranks, and {lacks}; leave them out")
        ExpertPlacement.home(moe.num_moe_experts, ep, balancing.num_redundant_experts)
