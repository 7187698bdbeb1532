# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Estimated against measured memory of training steps, on each rank of several models and layouts.

python -m tools.bench.memory_estimate --ranks 1 2 4 --output docs/benchmarks/memory_estimate.json
python -m tools.bench.memory_estimate --ranks 1 2 --model tiny
"""

import argparse
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, dense_feed_forward
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineLayout
from mcore_parallel.planner import Layout, ModelSizes, RankMemory, Workload, estimate, find_model
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from mcore_tools.launch import launch
from tools.bench._record import record

_LLAMA = {"num_query_groups": 8, "vocab_size": 128_256}
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 512},
    "1b": {**_LLAMA, "num_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "ffn_hidden_size": 8192},
    "3b": {**_LLAMA, "num_layers": 28, "hidden_size": 3072, "num_attention_heads": 24, "ffn_hidden_size": 8192},
    "moe": {
        **_LLAMA, "num_layers": 8, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 4, "ffn_hidden_size": 4096,
        "vocab_size": 32_000, "num_moe_experts": 8, "moe_router_topk": 2,
    },
}  # fmt: skip

NORM = RecomputeConfig(modules=("norm",))
NORM_MLP = RecomputeConfig(modules=("norm", "mlp"))
FULL = RecomputeConfig(granularity="full")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    model: str
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    recompute: RecomputeConfig | None = None
    micro_batch: int = 2
    num_microbatches: int = 2
    gradient_accumulation_fusion: bool = True
    precision_aware: bool = False

    def parts(self, sequence: int, dtype: torch.dtype) -> tuple[Workload, Layout]:
        """What the planner is asked."""
        sync = DistributedDataParallelConfig(
            use_distributed_optimizer=self.plan.dp * self.plan.cp > 1, gradient_accumulation_fusion=self.gradient_accumulation_fusion
        )
        narrow: dict[str, Any] = {}
        if self.precision_aware:
            narrow = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
        workload = Workload(
            model=find_model(overrides=MODELS[self.model]),
            sequence=sequence,
            micro_batch=self.micro_batch,
            global_batch=self.micro_batch * self.num_microbatches * self.plan.dp,
            dtype=dtype,
            optimizer=OptimizerConfig(lr=1e-4, use_distributed_optimizer=sync.use_distributed_optimizer, **narrow),
        )
        return workload, Layout(plan=self.plan, recompute=self.recompute, sync=sync)


def cases(ranks: int, dense: str, mixture: str | None) -> list[Case]:
    """What is run on so many ranks."""
    if ranks == 1:
        runs = [
            Case(model=dense),
            Case(model=dense, micro_batch=4),
            Case(model=dense, recompute=NORM),
            Case(model=dense, recompute=NORM_MLP),
            Case(model=dense, recompute=FULL, micro_batch=8),
            Case(model=dense, gradient_accumulation_fusion=False),
            Case(model=dense, precision_aware=True),
        ]
        if dense == "1b":
            runs.append(Case(model="3b", recompute=FULL))
        return runs + ([Case(model=mixture)] if mixture else [])
    if ranks == 2:
        plans = [
            ParallelPlan(tp=2),
            ParallelPlan(tp=2, sequence_parallel=False),
            ParallelPlan(pp=2),
            ParallelPlan(dp=2),
            ParallelPlan(cp=2),
        ]
        runs = [Case(model=dense, plan=plan, num_microbatches=4) for plan in plans]
        runs.append(Case(model=dense, plan=ParallelPlan(pp=2, vpp=2), num_microbatches=4))
        return runs + ([Case(model=mixture, plan=ParallelPlan(dp=2, ep=2))] if mixture else [])
    if ranks % 4:
        raise SystemExit(f"--ranks {ranks}: choose 1, 2 or a multiple of 4")
    rest = ranks // 4
    plans = [ParallelPlan(tp=2, dp=2 * rest), ParallelPlan(tp=2, pp=2, dp=rest), ParallelPlan(pp=4, dp=rest), ParallelPlan(dp=4 * rest)]
    runs = [Case(model=dense, plan=plan, num_microbatches=8) for plan in plans]
    return runs + ([Case(model=mixture, plan=ParallelPlan(tp=2, ep=2, dp=2 * rest))] if mixture else [])


def measure(case: Case, sequence: int, dtype: torch.dtype, kind: str, steps: int) -> dict[str, Any]:
    """Train and report this rank's peak beside its estimate."""
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    workload, layout = case.parts(sequence, dtype)
    groups = ProcessGroups.build(case.plan)
    memory = estimate(workload, layout, stage=groups.pp.rank, kernels=kind == "cuda")
    model = build(workload.model, groups, layout, dtype, device)
    sync = DistributedDataParallel(layout.sync, model, groups)
    optimizer = MegatronOptimizer(workload.optimizer, sync, groups)
    static = _static_bytes(sync, optimizer)
    batches = _batches(workload, layout, groups, device)
    if kind == "cuda":
        # What the construction left behind is no part of a step.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=1e-4, groups=groups)
    row = {"rank": groups.world.rank, "stage": groups.pp.rank, **_estimated(memory), "static_bytes": static}
    row["static_ratio"] = (memory.params + memory.grads + memory.optimizer) / static
    if kind != "cuda":
        return {**row, "measured": None, "ratio": None}
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated()
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.max_memory_reserved()
    outside = total - free - torch.cuda.memory_reserved()
    return {**row, "measured": measured, "ratio": memory.allocated / measured, "reserved": reserved, "outside_allocator": outside}


def build(sizes: ModelSizes, groups: ProcessGroups, layout: Layout, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """This rank's model, or its chunks."""
    config, experts = sizes.config, sizes.experts
    feed_forward = dense_feed_forward
    if experts is not None:
        mixture = MoEConfig(num_moe_experts=experts.num_experts, moe_router_topk=experts.topk, moe_ffn_hidden_size=experts.ffn_hidden_size)
        feed_forward = moe_feed_forward(mixture)
    placed = PipelineLayout.even(config.num_layers, num_stages=layout.plan.pp, num_chunks=layout.plan.vpp)

    def chunk(part: Any) -> GPTModel:
        return GPTModel(
            config, groups, feed_forward=feed_forward, layers=part, recompute=layout.recompute, dtype=dtype, device=device, seed=None
        )

    chunks = [_fill(chunk(part)) for part in placed.of_rank(groups.pp.rank)]
    return chunks[0] if len(chunks) == 1 else ModelChunks(chunks)


def _fill(model: GPTModel) -> GPTModel:
    """Small random weights, drawn where they lie: a billion of them on the host would take minutes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
            else:
                parameter.fill_(1.0)
    return model


def _batches(workload: Workload, layout: Layout, groups: ProcessGroups, device: torch.device) -> list[Batch]:
    generator = torch.Generator().manual_seed(groups.dp.rank)
    shape = (workload.micro_batch, workload.sequence)

    def draw() -> torch.Tensor:
        return torch.randint(workload.model.config.vocab_size, shape, generator=generator).to(device)

    count = layout.num_microbatches(workload)
    return [Batch(tokens=draw(), labels=draw(), loss_mask=torch.ones(shape, device=device)) for _ in range(count)]


def _static_bytes(sync: DistributedDataParallel, optimizer: MegatronOptimizer) -> int:
    """Of parameters, main gradients and states, as they are."""
    tensors = [*sync.module.parameters(), *(buffer.data for buffer in sync.grad_buffers)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values()) + optimizer.state_bytes["device"]


def _estimated(memory: RankMemory) -> dict[str, Any]:
    return {"estimated": memory.allocated, "moment": memory.moment, "estimated_parts": asdict(memory)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--model", choices=[name for name in MODELS if name != "moe"], default="1b" if cuda else "tiny", help="the dense one"
    )
    parser.add_argument("--no-moe", action="store_true", help="leave out the mixture of experts")
    parser.add_argument("--sequence", type=int, default=4096 if cuda else 64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kind = "cuda" if cuda else "cpu"
    inputs = {"sequence": arguments.sequence, "dtype": getattr(torch, arguments.dtype), "kind": kind, "steps": arguments.steps}
    mixture = None if arguments.no_moe or arguments.model == "tiny" else "moe"
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        for case in cases(ranks, arguments.model, mixture):
            plan = {axis: degree for axis in ("tp", "pp", "vpp", "cp", "ep", "dp") if (degree := getattr(case.plan, axis)) > 1}
            choices = {
                "model": case.model,
                "ranks": ranks,
                **plan,
                "sequence_parallel": case.plan.sequence_parallel and case.plan.tp > 1,
                "recompute": None if case.recompute is None else asdict(case.recompute),
                "micro_batch": case.micro_batch,
                "num_microbatches": case.num_microbatches,
                "gradient_accumulation_fusion": case.gradient_accumulation_fusion,
                "precision_aware": case.precision_aware,
            }
            results = launch(measure, ranks, device=kind, case=case, **inputs)
            rows += [{**choices, **result} for result in results]
            for result in results:
                measured = "-" if result["measured"] is None else f"{result['measured'] / 2**30:.2f} GiB, ratio {result['ratio']:.3f}"
                print(
                    f"{choices} rank {result['rank']}: {result['estimated'] / 2**30:.3f} GiB ({result['moment']}), measured {measured}",
                    flush=True,
                )
    if arguments.output:
        facts = {"sequence": arguments.sequence, "dtype": arguments.dtype, "steps": arguments.steps}
        record(arguments.output, {"work": "peak memory of training steps, estimated and measured", **facts, "rows": rows})


if __name__ == "__main__":
    main()
