# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""All layouts of a number of GPUs, and those that fit."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mcore_parallel.data_parallel import DistributedDataParallelConfig
from mcore_parallel.groups import ParallelPlan
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.planner._cost import Cluster, StepCost, step_cost
from mcore_parallel.planner._errors import PlannerError
from mcore_parallel.planner._estimate import RankMemory, check_fit, estimate
from mcore_parallel.planner._workload import Layout, Workload

AXES = ("tp", "pp", "vpp", "cp", "ep", "etp")

# In the order of what they cost.
RECOMPUTE: Mapping[str, RecomputeConfig | None] = {
    "none": None,
    "norm": RecomputeConfig(modules=("norm",)),
    "norm+mlp": RecomputeConfig(modules=("norm", "mlp")),
    "full": RecomputeConfig(granularity="full"),
}

_MOST_STAGES, _MOST_CHUNKS, _LEAST_TOKENS = 64, (1, 2, 3, 4, 6, 8), 4096
_IMBALANCE = 1.15
"""A stage may have so many times its share of the layers, when more even numbers of stages exist."""

_SAME = 0.03
"""Durations closer than this are the same to a heuristic."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the search leaves alone.

    Raises:
        PlannerError: an axis or a recomputation that does not exist.
    """

    fixed: Mapping[str, int] = field(default_factory=dict)
    """Axis (tp, pp, vpp, cp, ep, etp) -> the only degree to look at. Experts are not cut (etp=1) unless it is named here."""
    recompute: tuple[str, ...] = tuple(RECOMPUTE)
    sync: DistributedDataParallelConfig = field(default_factory=DistributedDataParallelConfig)
    """Choices beside ``use_distributed_optimizer``."""
    distributed_optimizer: bool = True
    """Slice the optimizer wherever there are replicas: it needs less memory and sends no more."""
    zero_dp_strategy: str | None = None
    """As of ``Layout``."""

    def __post_init__(self) -> None:
        for axis, degree in self.fixed.items():
            if axis not in AXES:
                raise PlannerError(f"{axis}={degree} fixes no axis; choose among {', '.join(AXES)}")
            if degree < 1:
                raise PlannerError(f"{axis}={degree} must be at least 1")
        if unknown := [name for name in self.recompute if name not in RECOMPUTE]:
            raise PlannerError(f"recompute={unknown[0]!r} must be among {', '.join(RECOMPUTE)}")
        if not self.recompute:
            raise PlannerError(f"recompute is empty; name at least one of {', '.join(RECOMPUTE)}")


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A layout, its memory and its rough duration."""

    layout: Layout
    recompute: str
    """Name in ``RECOMPUTE``."""
    memory: RankMemory
    """Of the rank that needs most."""
    cost: StepCost
    fits: bool


def propose(workload: Workload, num_gpus: int, cluster: Cluster, *, limits: Limits | None = None, top: int = 10) -> list[Proposal]:
    """The layouts that fit, fastest first (of about equal ones the simplest); each with the least recomputation with which it fits.

    If none fits, the ones that need least memory come, with ``fits=False``.

    Args:
        workload: what is trained.
        num_gpus: ranks of the world.
        cluster: memory and links.
        limits: what not to search.
        top: how many to return.

    Raises:
        PlannerError: no layout divides the GPUs, the model and the batch.
    """
    for name, value in (("gpus", num_gpus), ("top", top)):
        if value < 1:
            raise PlannerError(f"{name}={value} must be at least 1")
    limits = Limits() if limits is None else limits
    names = sorted(set(limits.recompute), key=list(RECOMPUTE).index)
    fitting: list[Proposal] = []
    others: list[Proposal] = []
    refusal = None
    for plan in _plans(workload, num_gpus, cluster, limits):
        sliced = limits.distributed_optimizer and num_gpus > plan.tp * plan.pp
        sync = dataclasses.replace(limits.sync, use_distributed_optimizer=sliced)
        layout = Layout(plan=plan, recompute=RECOMPUTE[names[0]], sync=sync, zero_dp_strategy=limits.zero_dp_strategy)
        try:
            check_fit(workload, layout)
        except PlannerError as error:
            refusal = error
            continue
        candidate = _least(workload, layout, names, cluster)
        (fitting if candidate.fits else others).append(candidate)
    if not fitting and not others:
        degrees = " ".join(f"{axis}={degree}" for axis, degree in limits.fixed.items()) or "any degrees"
        raise refusal or PlannerError(
            f"gpus={num_gpus} with {degrees} divide neither the model nor global_batch={workload.global_batch}; "
            "change the number of GPUs or the batch"
        )
    fastest = min((proposal.cost.total for proposal in fitting), default=1.0)
    fitting.sort(key=lambda proposal: _order(proposal, fastest))
    others.sort(key=lambda proposal: proposal.memory.total)
    exact = [_exact(workload, proposal, cluster) for proposal in fitting[: 2 * top]]
    chosen = [proposal for proposal in exact if proposal.fits]
    return chosen[:top] or [_exact(workload, proposal, cluster) for proposal in others[:top]] or exact[:top]


def advice(proposal: Proposal, workload: Workload, limits: Limits | None = None) -> str:
    """Why even this layout does not fit, and what would help."""
    memory, plan = proposal.memory, proposal.layout.plan
    limits = Limits() if limits is None else limits
    share = getattr(memory, memory.largest)
    ideas = {
        "params": ["more GPUs", "larger tp or pp" if workload.model.experts is None else "larger ep or pp"],
        "grads": ["more GPUs", "larger pp or tp", "gradients in 16 bits (grad_reduce_in_fp32=False)"],
        "optimizer": ["more GPUs", "a precision-aware or offloaded optimizer"],
        "activations": ["a smaller micro-batch", "larger cp or tp", "full recomputation"],
        "buffers": ["a smaller micro-batch", "larger tp, which cuts the vocabulary", "gradient_accumulation_fusion"],
    }[memory.largest]
    if memory.largest == "activations" and workload.micro_batch == 1:
        ideas = [idea for idea in ideas if "micro-batch" not in idea]
    if limits.recompute and "full" in limits.recompute:
        ideas = [idea for idea in ideas if "recomputation" not in idea]
    if limits.fixed:
        ideas.append(f"freeing {', '.join(f'{axis}={degree}' for axis, degree in limits.fixed.items())}")
    return (
        f"nothing fits: the smallest is tp={plan.tp} pp={plan.pp} cp={plan.cp} ep={plan.ep} dp={plan.dp} "
        f"with recompute={proposal.recompute}, {memory.total / (1 << 30):.1f} GiB a GPU, "
        f"most of it {memory.largest} ({share / (1 << 30):.1f} GiB); "
        f"what would help: {', '.join(ideas)}"
    )


def _least(workload: Workload, layout: Layout, names: list[str], cluster: Cluster) -> Proposal:
    """With the least recomputation that fits; the most there is if none does."""
    for name in names:
        layout = dataclasses.replace(layout, recompute=RECOMPUTE[name])
        memory = estimate(workload, layout, exact=False)
        fits = memory.total <= cluster.usable_bytes
        if fits or name == names[-1] or memory.params + memory.grads + memory.optimizer > cluster.usable_bytes:
            return Proposal(layout=layout, recompute=name, memory=memory, cost=step_cost(workload, layout, cluster), fits=fits)
    raise AssertionError("names is not empty")


def _exact(workload: Workload, proposal: Proposal, cluster: Cluster) -> Proposal:
    memory = estimate(workload, proposal.layout)
    return dataclasses.replace(proposal, memory=memory, fits=memory.total <= cluster.usable_bytes)


def _plans(workload: Workload, num_gpus: int, cluster: Cluster, limits: Limits) -> Iterator[ParallelPlan]:
    config, experts = workload.model.config, workload.model.experts
    fixed = limits.fixed
    for tp in _degrees(num_gpus, fixed.get("tp"), min(cluster.domain, config.kv_heads)):
        for cp in _degrees(num_gpus // tp, fixed.get("cp"), max(1, workload.sequence // _LEAST_TOKENS)):
            for pp in _degrees(num_gpus // (tp * cp), fixed.get("pp"), min(_MOST_STAGES, config.num_layers), any_number=True):
                dp = num_gpus // (tp * cp * pp)
                if workload.global_batch % (dp * workload.micro_batch) and not fixed:
                    continue
                chunks = (fixed["vpp"],) if "vpp" in fixed else _MOST_CHUNKS if pp > 1 else (1,)
                most = experts.num_experts if experts is not None else 1
                etp = fixed.get("etp", 1)
                for ep in _degrees(tp * cp * dp, fixed.get("ep"), most):
                    if tp * cp * dp % (etp * ep):
                        continue
                    for vpp in chunks:
                        if vpp > 1 and "vpp" not in fixed and _uneven(config.num_layers, pp * vpp):
                            continue
                        yield ParallelPlan(tp=tp, cp=cp, pp=pp, vpp=vpp, ep=ep, etp=None if etp == 1 else etp, dp=dp)


def _order(proposal: Proposal, fastest: float) -> tuple[int, int, float]:
    """By time; of those that the heuristic cannot tell apart, the ones with fewer parts first."""
    plan, time = proposal.layout.plan, proposal.cost.total
    return int(math.log(time / fastest) / math.log(1.0 + _SAME)), plan.tp * plan.cp * plan.pp * plan.vpp, time


def _degrees(whole: int, fixed: int | None, most: int, *, any_number: bool = False) -> list[int]:
    """Divisors of ``whole`` up to ``most``: powers of two, or any."""
    if fixed is not None:
        return [fixed] if whole % fixed == 0 else []
    degrees = range(1, min(most, whole) + 1)
    return [degree for degree in degrees if whole % degree == 0 and (any_number or degree & (degree - 1) == 0)]


def _uneven(num_layers: int, parts: int) -> bool:
    return parts > num_layers or -(-num_layers // parts) * parts > _IMBALANCE * num_layers
