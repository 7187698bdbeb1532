# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From a run's configuration to its parts."""

import dataclasses
import fnmatch
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mcore_moe import moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, load_communicator_options, named_shards
from mcore_parallel.backends import choose_backend
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import GraphedModel, freeze_gc_choice, graph_modules
from mcore_parallel.models import BertModel, GPTModel, T5Model, dense_feed_forward, place_layers
from mcore_parallel.nn import AttentionCore
from mcore_parallel.optim import MegatronOptimizer
from mcore_parallel.pipeline import ModelChunks, Overlap, Schedule, StageLayout, plan_pipeline
from mcore_parallel.tensor_parallel import add_lora
from mcore_parallel.training import (
    BertObjective,
    CrossEntropyObjective,
    Objective,
    TensorShard,
    model_state,
    optimizer_state,
)
from mcore_tools.assembly._fully_sharded import FullyShardedModel
from mcore_tools.assembly._torch_sharded import TorchShardedModel
from mcore_tools.recipes import RunConfig

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a training step needs."""

    groups: ProcessGroups
    model: GPTModel | BertModel | T5Model | ModelChunks | FullyShardedModel | TorchShardedModel
    sync: DistributedDataParallel | FullyShardedModel | TorchShardedModel
    optimizer: MegatronOptimizer
    objective: Objective
    pipeline: Schedule
    overlap: Overlap | None
    graphs: GraphedModel | None = None

    def state(self) -> dict[str, TensorShard | list[TensorShard]]:
        """Everything a checkpoint holds, as the live tensors of this rank."""
        return {**model_state(self.model, self.groups), **optimizer_state(self.optimizer, self.groups)}

    def close(self) -> None:
        """Give up graphs and hooks, through which the parts would outlive their last user; the model stays usable."""
        if self.graphs is not None:
            self.graphs.remove()
        if isinstance(self.sync, DistributedDataParallel):
            self.sync.close()


def build_model(
    config: RunConfig,
    groups: ProcessGroups,
    device: torch.device | str,
    *,
    attention_core: AttentionCore | None = None,
    layers: StageLayout | None = None,
    overlap: Overlap | None = None,
    learns: bool = False,
) -> GPTModel | BertModel | T5Model:
    """The model of a run, with the weights of its seed; one chunk of it when ``layers`` are given.

    With ``learns`` it also has what the run says of memory and of fp8; otherwise it is that model in its own dtype. Batch-invariant it is
    either way.
    """
    place: dict[str, Any] = {"dtype": DTYPES[config.train.dtype], "device": device, "seed": config.train.seed}
    if config.spans:
        # On one stage, and without what else concerns training.
        return T5Model(config.model, groups, **place)
    place["layers"] = layers
    if learns:
        place |= {"recompute": config.recompute, "offload": config.offload}
    if config.masked:
        # Sentence pairs are another matter than hidden tokens.
        return BertModel(config.model, groups, num_token_types=0, add_binary_head=False, **place)
    if learns or config.batch_invariant:
        place["backend"] = choose_backend(config.backend, fp8=config.fp8, batch_invariant=config.batch_invariant)
    pause = None if overlap is None else overlap.pause
    return GPTModel(
        config.model,
        groups,
        feed_forward=moe_feed_forward(config.moe, pause=pause) if config.moe else dense_feed_forward,
        attention_core=attention_core,
        **place,
    )


def build_stage(
    config: RunConfig, groups: ProcessGroups, device: torch.device | str, overlap: Overlap | None = None
) -> GPTModel | BertModel | T5Model | ModelChunks:
    """What this rank's pipeline stage holds: a model, or several chunks of one."""
    plan = config.plan
    layout = place_layers(config.model, config.pipeline, num_stages=plan.pp, num_chunks=plan.vpp)
    chunks = [build_model(config, groups, device, layers=part, overlap=overlap, learns=True) for part in layout.of_rank(groups.pp.rank)]
    return chunks[0] if len(chunks) == 1 else ModelChunks(chunks)


def build_groups(config: RunConfig, plan: ParallelPlan | None = None) -> ProcessGroups:
    """The groups of a plan, by default ``config.plan``, on every rank of the world, with NCCL's choices of ``config.communicators``."""
    options = load_communicator_options(config.communicators) if config.communicators else None
    return ProcessGroups.build(plan or config.plan, options=options)


def assemble(config: RunConfig, device: torch.device | str, groups: ProcessGroups | None = None) -> Parts:
    """Groups, model, gradient sync, optimizer and schedule of this rank.

    Args:
        config: the run.
        device: of the model.
        groups: of ``config.plan``, where ranks are left to something else: those of the layout call it. None to build them, on every rank
            of the world.

    Raises:
        ScheduleError: a schedule that does not fit the stages, layers or micro-batches of the run.
        CaptureError: ``cuda_graphs`` names a block that no graph can replay.
        ValueError: it names no module.
    """
    pipeline = config.pipeline.build(config.plan.vpp)
    train = config.train
    for size in train.batch_sizes().sizes():
        plan_pipeline(pipeline, config.plan.pp, max(1, size // (train.micro_batch_size * config.plan.dp)))
    overlap = Overlap() if config.pipeline.schedule == "combined" else None
    if groups is None:
        groups = build_groups(config)
    model = build_stage(config, groups, device, overlap)
    if config.lora is not None:
        add_lora(model, config.lora, groups, seed=train.seed)
    # Gradients of float16 would vanish without a loss scale.
    rule = config.optimizer if train.dtype != "float16" else dataclasses.replace(config.optimizer, fp16=True)
    shared = {"groups": groups, "objective": objective(config), "pipeline": pipeline, "overlap": overlap}
    if config.data_parallel != "ddp":
        assert isinstance(model, GPTModel | ModelChunks), "RunConfig refuses encoders with fsdp and fsdp2"
        sharded = shard_stage(config, model, groups, eight_bit_parameters=_eight_bit_names(config, groups))
        optimizer = MegatronOptimizer(dataclasses.replace(rule, use_distributed_optimizer=True), sharded, groups)
        return Parts(model=sharded, sync=sharded, optimizer=optimizer, **shared)
    slices = config.optimizer.use_distributed_optimizer
    # No graph can replay the wait of a module for its parameters.
    fast = DistributedDataParallelConfig(use_distributed_optimizer=slices, overlap_param_gather=slices and not config.cuda_graphs)
    sync = DistributedDataParallel(config.ddp or fast, model, groups)
    optimizer = MegatronOptimizer(rule, sync, groups)
    return Parts(model=model, sync=sync, optimizer=optimizer, graphs=graph_stage(config, model, config.cuda_graphs), **shared)


def graph_stage(config: RunConfig, model: nn.Module, patterns: Sequence[str]) -> GraphedModel | None:
    """Let modules of a stage be replayed from graphs as ``config.cuda_graph`` says, after data parallelism took its parameters over; None
    without patterns.

    Args:
        config: the run.
        model: this rank's stage.
        patterns: names of modules, as of ``cuda_graphs``.

    Raises:
        CaptureError, ValueError: as of ``assemble``.
    """
    if not patterns:
        return None
    when = config.cuda_graph
    if when.freeze_gc is None:
        # What the environment says of the garbage collector, where the run says nothing.
        when = dataclasses.replace(when, freeze_gc=freeze_gc_choice(os.environ))
    return graph_modules(model, patterns, when)


def shard_stage(
    config: RunConfig, model: GPTModel | ModelChunks, groups: ProcessGroups, *, eight_bit_parameters: Collection[str] = ()
) -> FullyShardedModel | TorchShardedModel:
    """A stage divided among its replicas as ``config.data_parallel`` (fsdp or fsdp2) and ``config.fsdp`` say.

    Args:
        config: the run.
        model: this rank's stage, not sharded yet.
        groups: its process groups.
        eight_bit_parameters: names of those that are gathered in 8 bits; fsdp2 has none.
    """
    if config.data_parallel == "fsdp2":
        assert isinstance(model, GPTModel), "RunConfig refuses pipelines with fsdp2"
        return TorchShardedModel(model, groups)
    fsdp = config.fsdp
    return FullyShardedModel(
        model,
        groups,
        zero_dp_strategy=fsdp.zero_dp_strategy,
        num_prefetch_units=fsdp.num_prefetch_units,
        fsdp_double_buffer=fsdp.fsdp_double_buffer,
        eight_bit_parameters=eight_bit_parameters,
    )


def _eight_bit_names(config: RunConfig, groups: ProcessGroups) -> frozenset[str]:
    """Parameters of the whole model that ``fsdp.eight_bit_parameters`` match.

    Raises:
        ValueError: a pattern matches none, or one that nobody gathers.
    """
    names: set[str] = set()
    if not (patterns := config.fsdp.eight_bit_parameters):
        return frozenset()
    shards = list(named_shards(build_model(config, ProcessGroups.single(), "meta")))
    for pattern in patterns:
        matched = [shard for shard in shards if fnmatch.fnmatchcase(shard.name, pattern)]
        if not matched:
            there = ", ".join(shard.name for shard in shards[:5])
            raise ValueError(f"fsdp.eight_bit_parameters={pattern!r} matches no parameter; name some of {there} ...")
        for shard in matched:
            if groups.data(shard.spec.view).size == 1:
                raise ValueError(
                    f"fsdp.eight_bit_parameters={pattern!r} matches {shard.name}, of which there is one replica: it is not gathered; raise "
                    "plan.dp, or leave it out"
                )
        names |= {shard.name for shard in matched}
    return frozenset(names)


def objective(config: RunConfig) -> Objective:
    """What the run trains on."""
    return BertObjective() if config.masked else CrossEntropyObjective(mtp_loss_scaling_factor=config.train.mtp_loss_scaling_factor)
