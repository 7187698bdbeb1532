# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The parameters of one rank, and the bytes of everything that is kept for them."""

import functools
import math
from dataclasses import dataclass

import torch

from mcore_parallel.data_parallel import lay_out_slices
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.pipeline import partition_layers
from mcore_parallel.planner._model import ModelSizes
from mcore_parallel.planner._workload import Layout, Workload
from mcore_parallel.tensor_parallel import pad_vocab_size

# L layers, D model, A heads, K key-value heads, d width of a head, F feed-forward, E experts, V vocabulary

_TABLE_BYTES = 8 / 1024
"""What the fused optimizer's tables take an element: two int32 a block of 1024."""


@dataclass(frozen=True)
class StaticBytes:
    """What a rank holds all the time."""

    params: int
    grads: int
    optimizer: int


@dataclass(frozen=True)
class Part:
    """The layers of one virtual stage, and which ends of the model it holds."""

    num_layers: int
    first: bool
    last: bool


@functools.lru_cache(maxsize=4096)
def stage_parts(num_layers: int, pp: int, vpp: int, stage: int) -> tuple[Part, ...]:
    """The chunks of one stage, in order."""
    total = pp * vpp
    places = [chunk * pp + stage for chunk in range(vpp)]
    return tuple(Part(len(partition_layers(num_layers, total, place)), place == 0, place == total - 1) for place in places)


def padded_vocab(model: ModelSizes, tp: int) -> int:
    """Rows of the embedding: those of the config when tp divides them, else padded."""
    rows = model.config.vocab_size
    return rows if rows % tp == 0 else pad_vocab_size(rows, tp)


@functools.lru_cache(maxsize=4096)
def layer_shapes(model: ModelSizes, tp: int, ep: int, etp: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Local shapes of one layer's parameters by the buffer their gradients go to, in the order of their registration.

    "dense" ones are cut over tp, "partial" ones are whole and see a share of the tokens, "expert" ones are cut over ep and etp.
    """
    config, experts = model.config, model.experts
    D, d = config.hidden_size, config.head_dim
    norm: tuple[int, ...] = (D,)
    dense = [(config.kv_heads // tp, (config.num_attention_heads // config.kv_heads + 2) * d, D), (D, config.num_attention_heads * d // tp)]
    if experts is None:
        return {"dense": (*dense, *_gated(config.ffn_size // tp, D)), "partial": (norm, norm), "expert": ()}
    if experts.shared_ffn_hidden_size:
        dense += _gated(experts.shared_ffn_hidden_size // tp, D)
    local, width = experts.num_experts // ep, experts.ffn_hidden_size // etp
    stacked = tuple((local, *shape) for shape in _gated(width, D))
    return {"dense": tuple(dense), "partial": (norm, norm, (experts.num_experts, D)), "expert": stacked}


def static_bytes(workload: Workload, layout: Layout, stage: int, *, exact: bool) -> StaticBytes:
    """Parameters, gradients and optimizer state of one rank.

    Args:
        workload: what is trained.
        layout: where.
        stage: pipeline stage.
        exact: lay the buffers out as ``DistributedDataParallel`` does, with their padding; else without it, which is fast.
    """
    plan = layout.plan
    shapes = _stage_shapes(workload.model, plan.tp, plan.ep, plan.expert_tp, plan.pp, plan.vpp, stage)
    params = owned = 0
    for kind, (members, numel) in shapes.items():
        replicas = plan.edp if kind == "expert" else plan.dp * plan.cp
        sliced = layout.sync.use_distributed_optimizer
        slices = replicas // layout.sync.num_distributed_optimizer_instances if sliced else 1
        total = numel
        if exact and sliced and members:
            total = lay_out_slices(members[::-1], layout.sync.bucket_elements(replicas), slices).total
        params += total
        owned += -(-total // slices)
    wide = workload.dtype == torch.float32 or layout.sync.grad_reduce_in_fp32
    grads = params * (4 if wide else workload.dtype.itemsize)
    return StaticBytes(params * workload.dtype.itemsize, grads, int(owned * state_bytes(workload.optimizer, workload.dtype)))


def state_bytes(optimizer: OptimizerConfig, dtype: torch.dtype) -> float:
    """Bytes of master and moments an element that this rank updates, with the scales of narrow moments."""
    narrow = optimizer.use_precision_aware_optimizer
    master = 0 if dtype == torch.float32 else 2 if narrow and optimizer.store_param_remainders and dtype == torch.bfloat16 else 4
    adam = optimizer.optimizer != "sgd"
    moments = [optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype] if adam else [torch.float32]
    stored = sum((kind.itemsize if narrow else 4) + (4 / 1024 if narrow and _scaled(kind) else 0) for kind in moments)
    # The states of the first pieces are in host memory.
    kept = 1.0 - optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 1.0
    return (master + stored + _TABLE_BYTES) * kept


@functools.lru_cache(maxsize=4096)
def _stage_shapes(
    model: ModelSizes, tp: int, ep: int, etp: int, pp: int, vpp: int, stage: int
) -> dict[str, tuple[tuple[tuple[int, ...], ...], int]]:
    """Shapes by buffer, and how many elements they have."""
    config = model.config
    layer = layer_shapes(model, tp, ep, etp)
    table = (padded_vocab(model, tp) // tp, config.hidden_size)
    parts = stage_parts(config.num_layers, pp, vpp, stage)
    count = sum(part.num_layers for part in parts)
    found = {kind: members * count for kind, members in layer.items()}
    first, last = any(part.first for part in parts), any(part.last for part in parts)
    tied = config.share_embeddings_and_output_weights
    if tied and pp > 1:
        # Each end has a copy, whose gradients are summed over both by themselves.
        found["ends"] = (table,) * (first or last)
    elif first:
        found["dense"] = (table, *found["dense"])
    if last:
        found["partial"] = (*found["partial"], (config.hidden_size,))
        if not tied:
            found["dense"] = (*found["dense"], table)
    if tp == 1:
        # Nothing is partial, so all dense gradients share a buffer.
        found["dense"], found["partial"] = (*found["partial"], *found["dense"]), ()
    return {kind: (members, sum(map(math.prod, members))) for kind, members in found.items()}


def _gated(width: int, hidden_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (2, width, hidden_size), (hidden_size, width)


def _scaled(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.float8_e4m3fn)
