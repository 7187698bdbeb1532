# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From a run's configuration to its parts."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_moe import moe_feed_forward
from mcore_parallel import ProcessGroups
from mcore_parallel.data import (
    BlendedMegatronDatasetBuilder,
    GPTDataset,
    GPTDatasetConfig,
    MaskedTokensDataset,
    PretrainingSampler,
    Tokenizer,
    batches,
)
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import CudaGraphConfig, GraphedModel, freeze_gc_choice, graph_modules
from mcore_parallel.models import BertModel, GPTModel, dense_feed_forward, place_layers
from mcore_parallel.nn import AttentionCore
from mcore_parallel.optim import ConstantSchedule, CosineSchedule, InverseSquareRootSchedule, LinearSchedule, MegatronOptimizer, WSDSchedule
from mcore_parallel.pipeline import ModelChunks, Overlap, Schedule, StageLayout, plan_pipeline
from mcore_parallel.planner import ExpertSizes, ModelSizes
from mcore_parallel.training import (
    Batch,
    BatchSizeSchedule,
    BertObjective,
    CrossEntropyObjective,
    Objective,
    TensorShard,
    Throughput,
    model_state,
    optimizer_state,
    samples_after,
)
from mcore_parallel.training import Schedule as RateSchedule
from mcore_tools.assembly._fully_sharded import FullyShardedModel
from mcore_tools.assembly._torch_sharded import TorchShardedModel
from mcore_tools.recipes import RunConfig

PEAK_FLOPS: Mapping[str, float] = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense operations a second in bfloat16, by a part of the device's name, as its vendor gives them for the SXM form."""
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
Samples = GPTDataset | MaskedTokensDataset


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a training step needs."""

    groups: ProcessGroups
    model: GPTModel | BertModel | ModelChunks | FullyShardedModel | TorchShardedModel
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
) -> GPTModel | BertModel:
    """The model of a run, with the weights of its seed; one chunk of it when ``layers`` are given."""
    place = {"layers": layers, "dtype": DTYPES[config.train.dtype], "device": device, "seed": config.train.seed}
    if config.masked:
        # Sentence pairs are another matter than hidden tokens.
        return BertModel(config.model, groups, num_token_types=0, add_binary_head=False, **place)
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
) -> GPTModel | BertModel | ModelChunks:
    """What this rank's pipeline stage holds: a model, or several chunks of one."""
    plan = config.plan
    layout = place_layers(config.model, config.pipeline, num_stages=plan.pp, num_chunks=plan.vpp)
    chunks = [build_model(config, groups, device, layers=part, overlap=overlap) for part in layout.of_rank(groups.pp.rank)]
    return chunks[0] if len(chunks) == 1 else ModelChunks(chunks)


def assemble(config: RunConfig, device: torch.device | str) -> Parts:
    """Groups, model, gradient sync, optimizer and schedule of this rank; every rank of the world calls it.

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
    groups = ProcessGroups.build(config.plan)
    model = build_stage(config, groups, device, overlap)
    shared = {"groups": groups, "objective": objective(config), "pipeline": pipeline, "overlap": overlap}
    if config.data_parallel != "ddp":
        assert isinstance(model, GPTModel | ModelChunks), "RunConfig refuses masked with fsdp and fsdp2"
        if config.data_parallel == "fsdp2":
            assert isinstance(model, GPTModel), "RunConfig refuses pipelines with fsdp2"
            sharded = TorchShardedModel(model, groups)
        else:
            sharded = FullyShardedModel(model, groups)
        rule = dataclasses.replace(config.optimizer, use_distributed_optimizer=True)
        optimizer = MegatronOptimizer(rule, sharded, groups)
        return Parts(model=sharded, sync=sharded, optimizer=optimizer, **shared)
    slices = config.optimizer.use_distributed_optimizer
    gradients = DistributedDataParallelConfig(
        use_distributed_optimizer=slices,
        gradient_accumulation_fusion=train.gradient_accumulation_fusion,
        # No graph can replay the wait of a module for its parameters.
        overlap_param_gather=slices and not config.cuda_graphs,
    )
    sync = DistributedDataParallel(gradients, model, groups)
    optimizer = MegatronOptimizer(config.optimizer, sync, groups)
    graphs = graph_modules(model, config.cuda_graphs, _graph_config(config.cuda_graph)) if config.cuda_graphs else None
    return Parts(model=model, sync=sync, optimizer=optimizer, graphs=graphs, **shared)


def _graph_config(config: CudaGraphConfig) -> CudaGraphConfig:
    """With what the environment says of the garbage collector, where the run says nothing."""
    return dataclasses.replace(config, freeze_gc=freeze_gc_choice(os.environ)) if config.freeze_gc is None else config


def objective(config: RunConfig) -> Objective:
    """What the run trains on."""
    return BertObjective() if config.masked else CrossEntropyObjective()


def schedule(config: RunConfig) -> RateSchedule:
    """Learning rates of the run's steps."""
    train, high, low = config.train, config.optimizer.lr, config.optimizer.min_lr
    warm_up: Any = {"max_lr": high, "warmup_steps": train.warmup_steps}
    if train.lr_schedule == "constant":
        return ConstantSchedule(**warm_up)
    warm_up |= {"min_lr": low, "decay_steps": train.steps}
    if train.lr_schedule == "wsd":
        return WSDSchedule(**warm_up, wsd_decay_steps=train.wsd_decay_steps)
    kinds = {"linear": LinearSchedule, "cosine": CosineSchedule, "inverse_square_root": InverseSquareRootSchedule}
    return kinds[train.lr_schedule](**warm_up)


def throughput(config: RunConfig, device: torch.device | str) -> Throughput:
    """Operations a token of the run, and those that a device can do in its dtype."""
    moe, sizes = config.moe, ModelSizes(config=config.model)
    if moe is not None:
        experts = ExpertSizes(
            num_experts=moe.num_moe_experts,
            topk=moe.moe_router_topk,
            ffn_hidden_size=moe.moe_ffn_hidden_size or config.model.ffn_size,
        )
        sizes = ModelSizes(config=config.model, experts=experts)
    peak = config.log.peak_tflops * 1e12
    if not peak and torch.device(device).type == "cuda" and config.train.dtype == "bfloat16":
        name = torch.cuda.get_device_name(device)
        peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), 0.0)
    return Throughput(flops_per_token=sizes.flops_per_token(config.train.seq_len), peak_flops=peak or None)


def datasets(config: RunConfig, tokenizer: Tokenizer) -> tuple[Samples, Samples]:
    """Training and validation samples.

    Raises:
        ValueError: ``data.split`` leaves one of them without a document.
    """
    train = config.train
    evaluations = 1 + (train.steps // train.eval_interval if train.eval_interval else 0)
    data = GPTDatasetConfig(
        random_seed=train.seed,
        sequence_length=train.seq_len,
        blend=([config.data.prefix], None),
        split=config.data.split,
        tokenizer=tokenizer,
        path_to_cache=str(Path(config.output) / "index_cache"),
    )
    sizes = [samples_after(train.batch_sizes(), train.steps), evaluations * train.eval_batches * train.global_batch_size, 0]
    # One rank checks the indices; where they are damaged its error ends the run.
    first = not dist.is_initialized() or dist.get_rank() == 0
    builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, data, is_verified_on_rank=lambda: first)
    train_set, valid_set, _ = builder.build()
    for name, dataset in (("training", train_set), ("validation", valid_set)):
        if dataset is None:
            raise ValueError(
                f"data.split={config.data.split!r} leaves no document of {config.data.prefix} for {name}; give it a larger share"
            )
    return _hidden(config, tokenizer, train_set, train.seed), _hidden(config, tokenizer, valid_set, train.seed + 1)


def _hidden(config: RunConfig, tokenizer: Tokenizer, samples: GPTDataset, seed: int) -> Samples:
    """Samples as the run trains on them."""
    if config.masked is None:
        return samples
    if (mask := config.masked.mask_token) in range(tokenizer.vocab_size) and mask != tokenizer.special_tokens_dict.get("mask"):
        raise ValueError(
            f"masked.mask_token={mask} is a token of text among the {tokenizer.vocab_size} of {config.data.tokenizer}; "
            f"set it to {tokenizer.vocab_size} or more, below model.vocab_size"
        )
    special = [token for token in (tokenizer.eod, tokenizer.bos, tokenizer.pad) if token is not None]
    return MaskedTokensDataset(samples, config.masked, vocab_size=tokenizer.vocab_size, seed=seed, special_tokens=special)


def step_batches(
    config: RunConfig,
    dataset: Samples,
    groups: ProcessGroups,
    device: torch.device | str,
    consumed: int = 0,
    sizes: BatchSizeSchedule | None = None,
) -> Iterator[list[Batch]]:
    """The micro-batches of this rank, one list an optimizer step, from sample ``consumed`` on.

    Args:
        config: the run.
        dataset: of all replicas.
        groups: the layout.
        device: of the batches.
        consumed: samples that the steps before took.
        sizes: sequences of each step; None for ``global_batch_size``.
    """
    train = config.train
    stride = train.micro_batch_size * groups.dp.size
    stream = batches(dataset, PretrainingSampler(len(dataset), consumed, train.micro_batch_size, groups.dp.rank, groups.dp.size, stride))
    while True:
        size = train.global_batch_size if sizes is None else sizes.size(consumed)
        micro = [sample for _, sample in zip(range(size // stride), stream, strict=False)]
        if len(micro) < size // stride:
            return
        consumed += size
        yield [_batch(sample, device) for sample in micro]


def _batch(sample: Mapping[str, Tensor], device: torch.device | str) -> Batch:
    move = {name: sample[name].to(device, non_blocking=True) for name in ("tokens", "labels", "loss_mask")}
    return Batch(tokens=move["tokens"], labels=move["labels"], loss_mask=move["loss_mask"])
