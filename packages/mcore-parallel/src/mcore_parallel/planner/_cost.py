# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A rough duration of a step, to put layouts in an order."""

from dataclasses import dataclass

from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.planner._errors import PlannerError
from mcore_parallel.planner._model import ModelSizes
from mcore_parallel.planner._parameters import gradient_itemsize, stage_parts, static_bytes
from mcore_parallel.planner._sizes import sizes
from mcore_parallel.planner._workload import Layout, Workload


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What the GPUs and their links can do; the defaults are those of eight H200s a machine.

    Raises:
        PlannerError: a number that is not positive.
    """

    gpu_memory_gib: float = 141.0
    flops: float = 989e12
    """Dense 16-bit operations a second and GPU."""
    efficiency: float = 0.56
    """Part of them that a model reaches on one GPU. With it and ``nvlink``, ``step_cost`` is within 4 % of Llama-3 8B on four H200s in
    every layout measured (docs/benchmarks/dense_step.json)."""
    domain: int = 8
    """GPUs that reach each other over NVLink."""
    nvlink: float = 360e9
    """Bytes a second that a GPU sends inside a domain."""
    network: float = 40e9
    """Bytes a second that a GPU sends to another domain; an assumption: 80 % of a link of 400 Gbit/s a GPU."""
    hop_s: float = 8e-6
    """Seconds of one hop of a ring between domains, whatever it carries; an assumption."""
    memory_bandwidth: float = 4e12
    headroom: float = 0.04
    """Part of the memory that fragmentation may take."""

    def __post_init__(self) -> None:
        for name in ("gpu_memory_gib", "flops", "efficiency", "domain", "nvlink", "network", "memory_bandwidth", "hop_s"):
            if not getattr(self, name) > 0:
                raise PlannerError(f"{name}={getattr(self, name)} must be positive")
        if not 0.0 <= self.headroom < 1.0:
            raise PlannerError(f"headroom={self.headroom} must lie in [0, 1)")

    @property
    def usable_bytes(self) -> float:
        """Memory of a GPU that may be planned with."""
        return self.gpu_memory_gib * (1 << 30) * (1.0 - self.headroom)

    def bandwidth(self, span: int) -> float:
        """Of a group whose ranks lie within ``span`` consecutive ones."""
        return self.nvlink if span <= self.domain else self.network


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of one step by what they go to; a heuristic."""

    compute: float
    """With the rows of experts, with what is computed again, and with the share of the stage that has most layers."""
    bubble: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float
    """What the last backward does not hide of the sums and gathers over the replicas."""
    optimizer: float
    bytes_sent: float
    """By one GPU, in all collectives and transfers of the step."""

    @property
    def total(self) -> float:
        return self.compute + self.bubble + self.tensor + self.context + self.expert + self.pipeline + self.data + self.optimizer


_ROW_PASSES = 52
"""Times that the routed rows of a mixture cross the memory, forward and backward, beside what a dense model does: their gather and sum, the
activation, the order of the picks, and the GEMMs of small experts in place of one large one. Fitted to moe-l6 on one H200
(docs/benchmarks/moe.json); its layouts on two H100s are then within 15 % (many_two.json)."""
# How much of a transfer is not hidden behind work.
_TENSOR_EXPOSED, _CONTEXT_EXPOSED, _PIPELINE_EXPOSED = 1.0, 0.3, 0.3


def step_cost(workload: Workload, layout: Layout, cluster: Cluster) -> StepCost:
    """Duration of one step, roughly.

    Products run at a fixed part of the peak rate, and rows of experts cross the memory beside them. Tensor, context and expert parallelism
    send what the layers exchange (forward and backward) at the rate of the links that the group's ranks span in the order
    tp-cp-ep-dp-pp; the pipeline idles for
    (p - 1) / (V m) of its work.
    """
    plan, model = layout.plan, workload.model
    count = layout.num_microbatches(workload)
    s = sizes(workload, layout)
    parts = stage_parts(model.config, plan.pp, plan.vpp, min(1, plan.pp - 1))
    layers = sum(part.num_layers for part in parts)
    imbalance = layers * plan.pp / model.config.num_layers
    again = recompute_share(model, layout.recompute)
    flops = workload.tokens * model.flops_per_token(workload.sequence) / plan.world_size
    runs, hidden = layers * count, s.e * s.T * s.D
    routed = runs * _ROW_PASSES * s.e * s.rows * s.D / cluster.memory_bandwidth
    compute = (flops * imbalance / (cluster.flops * cluster.efficiency) + routed) * (1.0 + again)
    # Gathers and scatters of the tokens: two a branch forward, three backward (the input comes once more). What runs again sends again.
    branches = 1 if model.experts is not None and not model.experts.shared_ffn_hidden_size else 2
    tensor = runs * branches * (5 if layout.sequence_parallel else 4) * hidden * (1.0 + again) * (plan.tp - 1) / plan.tp
    context = runs * 6 * (plan.cp - 1) * s.e * s.T * s.k
    # Picks go to the rank of their expert, and from there to those that share it.
    expert = runs * 4 * s.e * s.picks * s.D * ((plan.ep - 1) / plan.ep + plan.expert_tp - 1) * (1.0 + again)
    pipeline = 0.0 if plan.pp == 1 else count * plan.vpp * 2 * s.hidden
    data, data_time = _data(workload, layout, cluster, s.gates)
    static = static_bytes(workload, layout, 0, exact=False)
    bubble = (plan.pp - 1) / (plan.vpp * count)
    tensor_time = tensor / cluster.bandwidth(plan.tp) * _TENSOR_EXPOSED
    expert_time = expert / cluster.bandwidth(plan.expert_tp * plan.ep)
    return StepCost(
        compute=compute,
        bubble=bubble * (compute + tensor_time + expert_time),
        tensor=tensor_time,
        context=context / cluster.bandwidth(plan.tp * plan.cp) * _CONTEXT_EXPOSED,
        expert=expert_time,
        pipeline=pipeline / cluster.bandwidth(plan.world_size) * _PIPELINE_EXPOSED,
        data=max(0.0, data_time - compute / (1 if layout.divides_grads else count) * 2 / 3),
        optimizer=(2 * static.optimizer + static.grads) / cluster.memory_bandwidth,
        bytes_sent=tensor + context + expert + pipeline + data,
    )


def recompute_share(model: ModelSizes, recompute: RecomputeConfig | None) -> float:
    """Operations that are done again, as a part of all those of forward and backward."""
    if recompute is None:
        return 0.0
    if recompute.granularity == "full":
        return 1 / 3
    inside = model.feed_forward_flops_share
    # Norms and cores are little arithmetic, but their memory traffic takes time.
    shares = {"norm": 0.01, "core_attention": 0.03, "attention": (1.0 - inside) / 3 + 0.02, "mlp": inside / 3, "moe_act": 0.01}
    shares["shared_experts"] = model.shared_experts_share * inside / 3
    return sum(shares[part] for part in recompute.parts)


def _data(workload: Workload, layout: Layout, cluster: Cluster, gates: int) -> tuple[float, float]:
    """Bytes a GPU sends to the other replicas, and how long that takes."""
    plan, model = layout.plan, workload.model
    experts = 0
    if model.experts is not None:
        each = (1 + gates) * model.config.hidden_size * model.experts.ffn_hidden_size
        experts = model.config.num_layers * model.experts.num_experts * each // (plan.ep * plan.expert_tp * plan.pp)
    static = static_bytes(workload, layout, 0, exact=False)
    dense = max(0, static.numel - experts)
    grad, count = gradient_itemsize(workload, layout), layout.num_microbatches(workload)
    # A sum to slices and a gather of parameters, or a sum for all, which is a scatter and a gather of gradients.
    sliced = layout.sync.use_distributed_optimizer if layout.zero_dp_strategy is None else layout.zero_dp_strategy != "no_shard"
    each = grad * (count if layout.divides_grads else 1) + (workload.dtype.itemsize if sliced else grad)
    if layout.divides_params:
        # Gathered for every forward and every backward.
        each += workload.dtype.itemsize * (2 * count - 1)
    sent = time = 0.0
    for numel, replicas, span in (
        (dense, plan.dp * plan.cp, plan.tp * plan.cp * plan.dp),
        (experts, plan.edp, plan.tp * plan.cp * plan.dp),
    ):
        volume = numel * each * (replicas - 1) / replicas
        sent += volume
        time += volume / cluster.bandwidth(span)
        if span > cluster.domain:
            # Each bucket goes around a ring of machines twice: sums, and parameters.
            buckets = -(-numel // (layout.sync.bucket_size or max(40_000_000, 1_000_000 * replicas)))
            time += 2 * buckets * (min(replicas, -(-span // cluster.domain)) - 1) * cluster.hop_s
    return sent, time
