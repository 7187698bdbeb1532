# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a model would reach on growing numbers of GPUs, on paper."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mcore_parallel.planner._cost import Cluster
from mcore_parallel.planner._errors import PlannerError
from mcore_parallel.planner._search import Limits, Proposal, propose
from mcore_parallel.planner._workload import Workload


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The fastest layout that fits a number of GPUs; its step is an estimate of ``step_cost``."""

    gpus: int
    workload: Workload
    proposal: Proposal
    batch: Literal["grows", "stays"]
    """Whether the global batch is the first number's times the GPUs, or the first number's."""
    efficiency: float
    """Tokens a second and GPU, in parts of the first number's."""

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.workload.tokens / self.proposal.cost.total / self.gpus

    @property
    def flops_per_gpu(self) -> float:
        """Operations of the model a second."""
        return self.tokens_per_s_per_gpu * self.workload.model.flops_per_token(self.workload.sequence)


def scale(workload: Workload, counts: Sequence[int], cluster: Cluster, *, limits: Limits | None = None) -> list[ScalePoint]:
    """Points for each number of GPUs with a batch that grows with it, then for those where the batch may stay.

    Failures, stragglers and storage are not modelled, and the network is taken to be free of contention.

    Args:
        workload: with the global batch of the first number.
        counts: numbers of GPUs, increasing.
        cluster: memory, rates and latencies.
        limits: what not to search.

    Raises:
        PlannerError: numbers that do not increase, a batch that does not grow to a whole number, nothing that fits the first.

    Example:
        >>> from mcore_parallel.planner import find_model
        >>> run = Workload(model=find_model("llama3-8b"), sequence=8192, global_batch=128)
        >>> [round(point.efficiency, 1) for point in scale(run, [64, 1024], Cluster())]
        [1.0, 1.0, 1.0, 0.9]
    """
    if not counts or list(counts) != sorted(set(counts)):
        raise PlannerError(f"scale={list(counts)} must be numbers of GPUs that increase")
    points: list[ScalePoint] = []
    for batch in ("grows", "stays"):
        first = None
        for gpus in counts:
            grown, rest = divmod(workload.global_batch * gpus, counts[0])
            if batch == "grows" and rest:
                raise PlannerError(f"global_batch={workload.global_batch} does not grow to a whole number from {counts[0]} to {gpus} GPUs")
            here = dataclasses.replace(workload, global_batch=grown) if batch == "grows" else workload
            try:
                best = propose(here, gpus, cluster, limits=limits, top=1)[0]
            except PlannerError:
                # More replicas than sequences; the batch that grows has as many as the first.
                if batch == "grows":
                    raise
                continue
            if not best.fits:
                raise PlannerError(f"{gpus} GPUs of {cluster.gpu_memory_gib:g} GiB hold no layout of the model; begin with more")
            point = ScalePoint(gpus=gpus, workload=here, proposal=best, batch=batch, efficiency=1.0)
            first = point if first is None else first
            points.append(dataclasses.replace(point, efficiency=point.tokens_per_s_per_gpu / first.tokens_per_s_per_gpu))
    return points
