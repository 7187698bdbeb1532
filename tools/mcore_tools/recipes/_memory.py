# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory of a run's GPU by the planner, with what a run has beside a training: adapters, engines, weights that are rounded once loaded."""

import functools
from dataclasses import dataclass

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, dense_feed_forward
from mcore_parallel.planner import ExpertSizes, Layout, ModelSizes, RankMemory, Workload, estimate
from mcore_parallel.tensor_parallel import LoraConfig, adapted_layers, add_lora, is_adapter
from mcore_tools.recipes._config import RunConfig

_GIB = 1 << 30
# Weight and gradient of two bytes and of four, master and two moments of four each.
_ADAPTER_BYTES = 18
_EXPERTS = ".experts."


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """Bytes of one GPU at the worst moment of a step.

    Without graphs, and with evenly loaded experts, as the planner takes them to be.
    """

    weights: int
    """That are trained, or frozen beside adapters."""
    gradients: int
    optimizer: int
    """Masters and moments on the device."""
    activations: int
    """With the buffers of the worst moment."""
    adapters: int = 0
    """Weights, gradients and optimizer state of them, whole on every replica."""
    engine: int = 0
    """Weights and cache of the engine beside the trainer."""
    context: int = 0
    """Outside of torch's allocator."""
    loading: int = 0
    """Weights as they are loaded, before they are rounded to eight bits; 0 where they are not."""

    @property
    def total(self) -> int:
        """The most at one time."""
        held = self.weights + self.gradients + self.optimizer + self.activations + self.engine
        return max(held, self.loading) + self.adapters + self.context

    @property
    def gib(self) -> float:
        """``total`` in GiB."""
        return self.total / _GIB

    def text(self) -> str:
        """Each part with its GiB, the largest first; those below half a GiB are left out."""
        names = ("weights", "gradients", "optimizer", "activations", "adapters", "engine", "context")
        parts = {name: getattr(self, name) / _GIB for name in names} | ({"weights": self.loading / _GIB} if self.loading else {})
        named = {"weights": "weights while they load"} if self.loading else {}
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{named.get(name, name)} {gib:.0f}" for name, gib in ordered if gib >= 0.5)


def model_sizes(config: RunConfig) -> ModelSizes:
    """The model of a run as the planner takes it: with experts in every layer, if in any."""
    moe = config.moe
    if moe is None:
        return ModelSizes(config=config.model)
    experts = ExpertSizes(
        num_experts=moe.num_moe_experts,
        topk=moe.moe_router_topk,
        ffn_hidden_size=moe.moe_ffn_hidden_size or config.model.ffn_size,
        shared_ffn_hidden_size=moe.moe_shared_expert_intermediate_size or 0,
    )
    return ModelSizes(config=config.model, experts=experts)


def run_memory(config: RunConfig, *, exact: bool = True) -> RunMemory:
    """Memory of the GPU that needs most.

    Activations that are offloaded count as if they were not.

    Args:
        config: the run, with its layout.
        exact: with the padding of flat buffers; False is faster.

    Raises:
        PlannerError: degrees that do not fit the model or the batch.

    Example:
        >>> from mcore_tools.recipes import recipe
        >>> round(run_memory(recipe("llama3_8b@8")).gib)
        49
    """
    train, model = config.train, model_sizes(config)
    workload = Workload(
        model=model,
        sequence=train.seq_len,
        global_batch=train.global_batch_size,
        micro_batch=train.micro_batch_size,
        optimizer=config.optimizer,
    )
    sync = config.ddp or DistributedDataParallelConfig(use_distributed_optimizer=config.optimizer.use_distributed_optimizer)
    strategy = config.fsdp.zero_dp_strategy if config.data_parallel == "fsdp" else None
    rank = estimate(workload, Layout(plan=config.plan, recompute=config.recompute, sync=sync, zero_dp_strategy=strategy), exact=exact)
    return _of(config, model, rank)


def _of(config: RunConfig, model: ModelSizes, rank: RankMemory) -> RunMemory:
    grads, optimizer, weights, adapters, engine, loading = rank.grads, rank.optimizer, rank.params, 0, 0, 0
    plan = config.plan
    if config.lora is not None:
        size = _adapter_sizes(config.model, config.moe, config.lora)
        # Those beside experts are cut as they are; others, of which tensor parallelism cuts a half at most, count whole.
        adapters = _ADAPTER_BYTES * (size.beside_experts // plan.ep + size.beside_linear) // plan.pp
        grads = optimizer = 0
        if config.lora.base_dtype is not None:
            loading = weights
            weights -= (size.experts // (plan.ep * plan.expert_tp) + size.linear // plan.tp) // plan.pp
    if config.rl is not None:
        optimizer = 0 if config.rl.memory.stream_optimizer else optimizer
        if config.rl.served is None and config.rl.placement is None:
            engine = 2 * model.num_parameters // config.rl.engine_tp + int(config.rl.cache_gb * _GIB)
    return RunMemory(
        weights=weights, gradients=grads, optimizer=optimizer, activations=rank.activations + rank.buffers, adapters=adapters,
        engine=engine, context=rank.context, loading=loading,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _AdapterSizes:
    """Elements, over the whole model."""

    beside_experts: int
    beside_linear: int
    experts: int
    """Of weights beside adapters."""
    linear: int
    """The same of linear layers."""


@functools.lru_cache(maxsize=64)
def _adapter_sizes(config: TransformerConfig, moe: MoEConfig | None, lora: LoraConfig) -> _AdapterSizes:
    groups = ProcessGroups.single()
    model = GPTModel(config, groups, feed_forward=moe_feed_forward(moe) if moe else dense_feed_forward, device="meta")
    add_lora(model, lora, groups)
    adapters = {name: parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name)}
    beside_experts = sum(numel for name, numel in adapters.items() if _EXPERTS in name)
    stacked = sum(weight.numel() for name, weight in model.named_parameters() if _EXPERTS in name and not is_adapter(name))
    return _AdapterSizes(
        beside_experts=beside_experts,
        beside_linear=sum(adapters.values()) - beside_experts,
        experts=stacked if beside_experts else 0,
        linear=sum(layer.weight.numel() for _, layer in adapted_layers(model)),
    )
