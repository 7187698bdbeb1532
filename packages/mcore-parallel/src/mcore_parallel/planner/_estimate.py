# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The memory of one rank at its worst moment."""

from dataclasses import dataclass

from mcore_parallel.planner._activations import stage_activations
from mcore_parallel.planner._errors import PlannerError
from mcore_parallel.planner._parameters import stage_parts, static_bytes
from mcore_parallel.planner._sharded import unit_bytes
from mcore_parallel.planner._sizes import sizes
from mcore_parallel.planner._workload import Layout, Workload

_GIB = 1 << 30
_WORKSPACE = 2 * (32 << 20)
"""cuBLAS asks the allocator for 32 MiB a thread on this generation; forward and backward run in two."""
_CONTEXT = 600 << 20
"""What CUDA and the loaded kernels take outside the allocator."""
_COMMUNICATOR = 300 << 20
"""The same for one NCCL communicator."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the moment of a step at which most is alive."""

    stage: int
    """Pipeline stage of the rank."""
    params: int
    grads: int
    """The flat buffers of the main gradients."""
    optimizer: int
    """Masters and moments on the device."""
    activations: int
    """What all live micro-batches keep for their backward."""
    buffers: int
    """What the worst moment needs beside (logits of a chunk, gradients on their way, workspaces, transfers, batches)."""
    context: int
    """Outside torch's allocator: CUDA, loaded kernels, NCCL."""
    moment: str
    """Name of the worst moment."""

    @property
    def allocated(self) -> int:
        """What ``torch.cuda.max_memory_allocated`` should say."""
        return self.params + self.grads + self.optimizer + self.activations + self.buffers

    @property
    def total(self) -> int:
        """With what lies outside the allocator."""
        return self.allocated + self.context

    @property
    def largest(self) -> str:
        """Name of the largest part."""
        return max(("params", "grads", "optimizer", "activations", "buffers"), key=lambda name: getattr(self, name))

    def gib(self) -> dict[str, float]:
        """Every part in GiB."""
        names = ("params", "grads", "optimizer", "activations", "buffers", "context", "allocated", "total")
        return {name: getattr(self, name) / _GIB for name in names}


def estimate(workload: Workload, layout: Layout, *, stage: int | None = None, exact: bool = True, kernels: bool = True) -> RankMemory:
    """The memory of a rank of ``stage``, or of the stage that needs most.

    Experts are taken to be evenly loaded. Mamba-2 is taken to keep what its kernels keep, a delta net roughly what torch code does;
    without kernels both need several times as much. Offloaded activations are not modelled.

    Args:
        workload: what is trained.
        layout: where.
        stage: pipeline stage; None for the worst.
        exact: with the padding of flat buffers; False is faster.
        kernels: on a GPU with Triton; False for operators on a CPU.

    Raises:
        PlannerError: degrees that do not fit the model or the batch; no such stage.

    Example:
        >>> from mcore_parallel import ParallelPlan
        >>> from mcore_parallel.planner import find_model
        >>> run = Workload(model=find_model("llama3-8b"), sequence=8192, global_batch=8)
        >>> round(estimate(run, Layout(plan=ParallelPlan(tp=8))).gib()["params"], 1)
        1.9
    """
    check_fit(workload, layout)
    pp = layout.plan.pp
    if stage is not None and not 0 <= stage < pp:
        raise PlannerError(f"stage={stage} must lie in [0, pp={pp})")
    # Stages between have as many layers as stage 1 at most, and hold fewer micro-batches.
    wanted = sorted({0, min(1, pp - 1), pp - 1}) if stage is None else [stage]
    return max((_rank(workload, layout, number, exact, kernels) for number in wanted), key=lambda memory: memory.allocated)


def check_fit(workload: Workload, layout: Layout) -> None:
    """Refuse a layout in which the model cannot be built or the batch not be cut.

    Raises:
        PlannerError: names the degree and what it must divide.
    """
    plan, config, experts = layout.plan, workload.model.config, workload.model.experts
    checks = [("tp", plan.tp, "num_query_groups", config.kv_heads), ("tp", plan.tp, "ffn_hidden_size", config.ffn_size)]
    if config.mamba is not None:
        checks += [("tp", plan.tp, "num_groups of mamba", config.mamba.num_groups)]
    if config.delta_net is not None:
        checks += [("tp", plan.tp, "num_key_heads of delta_net", config.delta_net.num_key_heads)]
    mixed = checks[2:]
    if experts is not None:
        checks = [checks[0], ("ep", plan.ep, "num_experts", experts.num_experts)]
        checks += [*mixed, ("etp", plan.expert_tp, "ffn_hidden_size of an expert", experts.ffn_hidden_size)]
        checks += [("tp", plan.tp, "shared_ffn_hidden_size", experts.shared_ffn_hidden_size)]
    elif plan.ep > 1:
        raise PlannerError(f"ep={plan.ep} needs a model with experts; set ep=1")
    pieces = 2 * plan.cp if plan.cp > 1 else 1
    checks += [("2*cp", pieces, "sequence", workload.sequence)]
    if layout.sequence_parallel:
        checks += [("tp", plan.tp, "tokens of a micro-batch", workload.micro_batch * workload.sequence // plan.cp)]
    for name, degree, what, size in checks:
        if size % degree:
            raise PlannerError(f"{name}={degree} must divide {what}={size}; lower {name.removeprefix('2*')}")
    if config.num_layers < plan.pp * plan.vpp:
        raise PlannerError(f"pp*vpp={plan.pp}*{plan.vpp} must not exceed num_layers={config.num_layers}; lower one of them")
    if experts is not None and plan.tp > 1 and not layout.sequence_parallel and plan.tp % (plan.ep * plan.expert_tp):
        raise PlannerError(
            f"ep={plan.ep} and etp={plan.expert_tp} spread the experts beyond the tp={plan.tp} ranks that hold the same tokens without "
            "sequence parallelism; switch it on, or lower ep or etp"
        )
    try:
        stage_parts(config, plan.pp, plan.vpp, 0)
    except ValueError as error:
        raise PlannerError(str(error)) from error
    num_microbatches = layout.num_microbatches(workload)
    if plan.vpp > 1 and not group_size(num_microbatches, plan.pp):
        raise PlannerError(
            f"vpp={plan.vpp} needs at least pp={plan.pp} micro-batches, found {num_microbatches}; raise global_batch or set vpp=1"
        )


def group_size(num_microbatches: int, pp: int) -> int:
    """Micro-batches that take a chunk together in the interleaved schedule; 0 when there are too few."""
    return next((n for n in range(pp, num_microbatches + 1) if num_microbatches % n == 0 or num_microbatches % n >= pp), 0)


def live_forwards(layout: Layout, stage: int, num_microbatches: int) -> int:
    """Forwards of a chunk that a stage holds at once, by the default schedules: 1F1B and the interleaved one."""
    plan = layout.plan
    if plan.vpp == 1:
        return min(plan.pp - stage, num_microbatches)
    ahead = 2 * (plan.pp - stage - 1) + (plan.vpp - 1) * group_size(num_microbatches, plan.pp)
    return min(ahead + 1, plan.vpp * num_microbatches)


def _rank(workload: Workload, layout: Layout, stage: int, exact: bool, kernels: bool) -> RankMemory:
    plan, config = layout.plan, workload.model.config
    num_microbatches = layout.num_microbatches(workload)
    parts = stage_parts(config, plan.pp, plan.vpp, stage)
    live = live_forwards(layout, stage, num_microbatches)
    static = static_bytes(workload, layout, stage, exact=exact)
    units = unit_bytes(workload, layout, parts, sizes(workload, layout, kernels=kernels), stage)
    activations = stage_activations(workload, layout, parts, live, kernels=kernels, units=units)
    tokens = workload.micro_batch * workload.sequence // plan.cp
    # Tokens, labels and mask of the whole step lie on the device, uncut, and the positions of the live ones.
    batches = 20 * tokens * plan.cp * num_microbatches
    buffers = activations.work + batches + 8 * tokens * live + (_WORKSPACE if kernels else 0)
    if plan.pp > 1:
        share = plan.tp if layout.sequence_parallel else 1
        # Something comes and something goes while a micro-batch is worked on.
        buffers += 2 * tokens // share * config.hidden_size * workload.dtype.itemsize
    communicators = sum(size > 1 for size in (plan.tp, plan.cp, plan.pp, plan.dp * plan.cp, plan.ep, plan.world_size))
    return RankMemory(
        stage=stage, params=static.params, grads=static.grads, optimizer=static.optimizer, activations=activations.kept, buffers=buffers,
        context=_CONTEXT + communicators * _COMMUNICATOR, moment=activations.moment,
    )  # fmt: skip
