# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The parameters of one rank, and the bytes of everything that is kept for them."""

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mcore_parallel.data_parallel import lay_out_slices
from mcore_parallel.groups import ParallelPlan, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.models import GPTModel, Site, TransformerConfig, dense_feed_forward, place_layers, read_pattern
from mcore_parallel.nn import Activation
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.pipeline import PipelineConfig
from mcore_parallel.planner._model import ModelSizes
from mcore_parallel.planner._workload import Layout, Workload
from mcore_parallel.tensor_parallel import pad_vocab_size

# D model

_TABLE_BYTES = 8 / 1024
"""What the fused optimizer's tables take an element: two int32 a block of 1024."""


@dataclass(frozen=True)
class StaticBytes:
    """What a rank holds all the time."""

    params: int
    grads: int
    optimizer: int
    numel: int
    """Of whole parameters, before replicas divide them."""


@dataclass(frozen=True)
class Part:
    """What one virtual stage holds."""

    symbols: str
    """Its layers, as in ``hybrid_layer_pattern``; "L" for one with attention and feed-forward."""
    first: bool
    last: bool
    depths: tuple[str, ...] = ()
    """Layers of each depth that predicts a further token."""

    @property
    def num_layers(self) -> int:
        return len(self.symbols)


@functools.lru_cache(maxsize=4096)
def stage_parts(config: TransformerConfig, pp: int, vpp: int, stage: int) -> tuple[Part, ...]:
    """The chunks of one stage, in order."""
    pattern = read_pattern(config.hybrid_layer_pattern)
    depths = ("L",) * config.mtp_num_layers if pattern is None else pattern.mtp
    symbols = "L" * config.num_layers if pattern is None else pattern.layers
    chunks = place_layers(config, PipelineConfig(), num_stages=pp, num_chunks=vpp).of_rank(stage)
    return tuple(
        Part(symbols[chunk.layers.start : chunk.layers.stop], chunk.embedding, chunk.loss, depths if chunk.loss else ()) for chunk in chunks
    )


def padded_vocab(model: ModelSizes, tp: int) -> int:
    """Rows of the embedding: those of the config when tp divides them, else padded."""
    rows = model.config.vocab_size
    return rows if rows % tp == 0 else pad_vocab_size(rows, tp)


Shapes = tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=4096)
def layer_shapes(model: ModelSizes, symbol: str, tp: int, ep: int, etp: int) -> dict[str, Shapes]:
    """Local shapes of one layer's parameters by the buffer their gradients go to, in the order of their registration.

    "dense" ones are cut over tp, "partial" ones are whole and see a share of the tokens, "expert" ones are cut over ep and etp.
    """
    specs = {name: spec for name, spec in _specs(model, symbol).items() if name.startswith("layers.")}
    dense, partial = _cut(specs, tp)
    experts, D = model.experts, model.config.hidden_size
    if experts is None or symbol not in ("L", "E"):
        return {"dense": dense, "partial": partial, "expert": ()}
    if experts.shared_ffn_hidden_size:
        dense += _feed_forward(model.config, experts.shared_ffn_hidden_size // tp)
    local, width = experts.num_experts // ep, experts.ffn_hidden_size // etp
    stacked = tuple((local, *shape) for shape in _feed_forward(model.config, width))
    gate = ((experts.num_experts, D), *([(experts.num_experts,)] if model.config.add_bias_linear else []))
    return {"dense": dense, "partial": (*partial, *gate), "expert": stacked}


@functools.lru_cache(maxsize=512)
def _specs(model: ModelSizes, symbol: str) -> dict[str, ShardSpec]:
    """Of a model of one such layer: its parameters by name, but for experts."""
    config = model.config
    own = {"M": "mamba", "G": "delta_net", "+": "latent_attention"}
    plain: dict[str, Any] = {"window_attn_skip_freq": None, "no_rope_freq": None, "mtp_num_layers": 0, "mtp_detach": False}
    if symbol != "L":
        plain["hybrid_layer_pattern"] = symbol
        plain |= {field: None for kind, field in own.items() if kind != symbol}
    one = dataclasses.replace(config, num_layers=1, **plain)
    elsewhere = symbol == "E" or (symbol == "L" and model.experts is not None)
    built = GPTModel(one, ProcessGroups.single(), feed_forward=_nothing if elsewhere else dense_feed_forward, device="meta")
    return {shard.name: shard.spec for shard in named_shards(built)}


def _nothing(site: Site) -> nn.Module:
    return nn.Identity()


def _cut(specs: Mapping[str, ShardSpec], tp: int) -> tuple[Shapes, Shapes]:
    """Shapes of those that tp cuts, on one rank, and of the others."""
    dense, partial = [], []
    for spec in specs.values():
        dim = spec.shards.get("tp")
        (partial if dim is None else dense).append(tuple(size // tp if number == dim else size for number, size in enumerate(spec.shape)))
    return tuple(dense), tuple(partial)


def static_bytes(workload: Workload, layout: Layout, stage: int, *, exact: bool) -> StaticBytes:
    """Parameters, gradients and optimizer state of one rank.

    Args:
        workload: what is trained.
        layout: where.
        stage: pipeline stage.
        exact: lay the buffers out as ``DistributedDataParallel`` does, with their padding; else without it, which is fast.
    """
    plan = layout.plan
    shapes = stage_shapes(workload.model, plan, stage)
    if layout.zero_dp_strategy is not None:
        return _sharded_bytes(workload, layout, {kind: numel for kind, (_, numel) in shapes.items()})
    params = owned = 0
    for kind, (members, numel) in shapes.items():
        replicas = replicas_of(plan, kind)
        sliced = layout.sync.use_distributed_optimizer
        slices = replicas // layout.sync.num_distributed_optimizer_instances if sliced else 1
        total = numel
        if exact and sliced and members:
            total = lay_out_slices(members[::-1], layout.sync.bucket_elements(replicas), slices).total
        params += total
        owned += -(-total // slices)
    grads = params * gradient_itemsize(workload, layout)
    return StaticBytes(params * workload.dtype.itemsize, grads, int(owned * state_bytes(workload.optimizer, workload.dtype)), params)


def _sharded_bytes(workload: Workload, layout: Layout, numels: Mapping[str, int]) -> StaticBytes:
    """By ``megatron_fsdp``, which keeps the reduced gradients that the optimizer reads; padding is below 5 % and left out."""
    params = grads = owned = 0
    for kind, numel in numels.items():
        replicas = replicas_of(layout.plan, kind)
        slices = 1 if layout.zero_dp_strategy == "no_shard" else replicas
        share = -(-numel // slices)
        params += share if layout.divides_params else numel
        # One strategy keeps whole gradients between steps, beside those that are reduced.
        grads += share + (numel if layout.zero_dp_strategy == "optim" and slices > 1 else 0)
        owned += share
    states = int(owned * state_bytes(workload.optimizer, workload.dtype))
    return StaticBytes(params * workload.dtype.itemsize, grads * gradient_itemsize(workload, layout), states, sum(numels.values()))


def gradient_itemsize(workload: Workload, layout: Layout) -> int:
    """Bytes of an element of the gradients that the optimizer reads."""
    wide = workload.dtype == torch.float32 or layout.zero_dp_strategy is not None or layout.sync.grad_reduce_in_fp32
    return 4 if wide else workload.dtype.itemsize


def replicas_of(plan: ParallelPlan, kind: str) -> int:
    """Ranks that hold the same parameters of a kind of buffer."""
    return plan.edp if kind == "expert" else plan.dp * plan.cp


def stage_shapes(model: ModelSizes, plan: ParallelPlan, stage: int) -> dict[str, tuple[Shapes, int]]:
    """Shapes of a stage's parameters by buffer, and how many elements they have."""
    return _stage_shapes(model, plan.tp, plan.ep, plan.expert_tp, plan.pp, plan.vpp, stage)


def state_bytes(optimizer: OptimizerConfig, dtype: torch.dtype) -> float:
    """Bytes of master and moments an element that this rank updates, with the scales of narrow moments."""
    narrow = optimizer.use_precision_aware_optimizer
    master = 0 if dtype == torch.float32 else 2 if optimizer.store_param_remainders and dtype == torch.bfloat16 else 4
    adam = optimizer.optimizer != "sgd"
    moments = [optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype] if adam else [torch.float32]
    stored = sum((kind.itemsize if narrow else 4) + (4 / 1024 if narrow and _scaled(kind) else 0) for kind in moments)
    # The states of the first pieces are in host memory.
    on_device = 1.0 - optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else 1.0
    return (master + stored + _TABLE_BYTES) * on_device


@functools.lru_cache(maxsize=4096)
def _stage_shapes(model: ModelSizes, tp: int, ep: int, etp: int, pp: int, vpp: int, stage: int) -> dict[str, tuple[Shapes, int]]:
    config = model.config
    parts = stage_parts(config, pp, vpp, stage)
    by_kind: dict[str, Shapes] = {"dense": (), "partial": (), "expert": ()}
    symbols = "".join((*(part.symbols for part in parts), *(depth for part in parts for depth in part.depths)))
    for symbol, count in collections.Counter(symbols).items():
        for kind, members in layer_shapes(model, symbol, tp, ep, etp).items():
            by_kind[kind] += members * count
    first, last = any(part.first for part in parts), any(part.last for part in parts)
    depths = sum(len(part.depths) for part in parts)
    tied, D = config.share_embeddings_and_output_weights, config.hidden_size
    table = (padded_vocab(model, tp) // tp, D)
    norm = ((D,),) * (2 if config.normalization == "LayerNorm" else 1)
    learned = config.position_embedding_type == "learned_absolute"
    positions: Shapes = ((config.max_position_embeddings or 0, D),) if learned else ()
    if (tied or config.mtp_num_layers) and pp > 1:
        # Each end has a copy, whose gradients are summed over both by themselves.
        by_kind["ends"] = (table, *(positions if config.mtp_num_layers else ())) * (first or last)
        by_kind["partial"] += positions * (first and not config.mtp_num_layers)
    elif first:
        by_kind["dense"] = (table, *by_kind["dense"])
        by_kind["partial"] += positions
    if last:
        # Of a depth two norms and the one at its end, and the projection.
        by_kind["partial"] += norm + (norm * 3 + ((D, 2 * D),)) * depths
        if not tied:
            by_kind["dense"] = (*by_kind["dense"], table)
    if tp == 1:
        # Nothing is partial, so all dense gradients share a buffer.
        by_kind["dense"], by_kind["partial"] = (*by_kind["partial"], *by_kind["dense"]), ()
    return {kind: (members, sum(map(math.prod, members))) for kind, members in by_kind.items()}


def _feed_forward(config: TransformerConfig, width: int) -> Shapes:
    """Of one feed-forward: weights, then biases."""
    features = (2, width) if Activation(name=config.activation).gated else (width,)
    weights = (*features, config.hidden_size), (config.hidden_size, width)
    return (*weights, features, (config.hidden_size,)) if config.add_bias_linear else weights


def _scaled(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.float8_e4m3fn)
