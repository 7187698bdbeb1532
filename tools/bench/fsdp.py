# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokens a second, memory and exposed communication of megatron_fsdp beside torch's FSDP2, both around the same compiled module.

python -m tools.bench.fsdp --runs dense-8b:fsdp2,dp2,mbs2,gbs4 dense-8b:ours,dp2,mbs2,gbs4 --output docs/benchmarks/fsdp.json

A run names a model and, by commas: who shards (ours, fsdp2, or trunk: ours around mcore_parallel's layers with its optimizer, or ddp: those
layers and that optimizer in mcore_parallel's DistributedDataParallel, state divided unless no_shard is said), dpN ranks, mbsN sequences a
micro-batch, gbsN a step, lN layers instead of the model's, seqN tokens a sequence, and optionally no_shard, optim or optim_grads (else
parameters are sharded too), narrow (gradients cross ranks in bfloat16 and are added in float32), cudnn (attention by cuDNN), plain (nothing
is compiled), ub (buffers registered with NCCL), norms, act (of trunk and ddp: outputs of norms, of the activation of experts are recomputed
in the backward), layers (of trunk, ddp and fsdp2: whole layers are computed again in the backward), prefetchN (units gathered ahead),
aheadN (at most that many MiB of them), epN (of trunk and ddp: ranks among which a layer's experts lie), cpN with heads or ring (of trunk,
ddp and fsdp2: ranks among which a sequence lies, and how its parts meet), keep (of fsdp2: parameters stay gathered between forward and
backward), fp8 or fp8_rows (of trunk and ddp: GEMMs in fp8, those of experts too, by the recipe tensorwise or rowwise), head (with one of
them: those of the loss, too), graphs (of ddp: layers are replayed from CUDA graphs).

On a CPU runs of one size share a world and take turns, so that a busy machine meets them alike.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from mcore_parallel.models import TransformerConfig, flops_per_token
from mcore_tools.launch import launch
from tools.bench._llama import Llama, LlamaBlock, LlamaShape, angles, compiled_loss, initialise
from tools.bench._record import record
from tools.bench._sequences import ring, whole_sequences
from tools.bench._timing import communication
from tools.bench._words import parse_run

_LLAMA_3 = LlamaShape(num_layers=32, hidden=4096, feed_forward=14336, num_heads=32, num_groups=8, vocab=128256, seq_len=4096)
_MIXTURE = LlamaShape(
    num_layers=24,
    hidden=2048,
    feed_forward=8 * 768,
    num_heads=32,
    num_groups=4,
    vocab=151936,
    seq_len=4096,
    num_experts=128,
    num_choices=8,
)
MODELS: Mapping[str, LlamaShape] = MappingProxyType(
    {
        "tiny": LlamaShape(num_layers=8, hidden=256, feed_forward=768, num_heads=4, num_groups=2, vocab=1024, seq_len=64),
        "dense-1b": replace(_LLAMA_3, num_layers=16, hidden=2048, feed_forward=8192),
        "dense-8b-l8": replace(_LLAMA_3, num_layers=8),
        "dense-8b": _LLAMA_3,
        "dense-30b": replace(_LLAMA_3, num_layers=48, hidden=7168, feed_forward=20480, num_heads=56),
        "moe-15b": _MIXTURE,
        "moe-l6": replace(_MIXTURE, num_layers=6),
        "mixtral-l4": replace(_LLAMA_3, num_layers=4, feed_forward=2 * 14336, vocab=32000, num_experts=8, num_choices=2),
        "moe-tiny": LlamaShape(
            num_layers=4, hidden=64, feed_forward=64, num_heads=4, num_groups=2, vocab=512, seq_len=32, num_experts=8, num_choices=2
        ),
    }
)
_NUMBERS = ("dp", "cp", "ep", "mbs", "gbs", "l", "seq", "prefetch", "ahead")
_WAYS = ("ours", "fsdp2", "trunk", "ddp")
_RECIPES: Mapping[str, Any] = MappingProxyType({"fp8": "tensorwise", "fp8_rows": "rowwise"})
_FLAGS = (
    *_WAYS,
    "no_shard",
    "optim",
    "optim_grads",
    "narrow",
    "cudnn",
    "plain",
    "ub",
    "norms",
    "act",
    "layers",
    "heads",
    "ring",
    "keep",
    "fp8",
    "fp8_rows",
    "head",
    "graphs",
)


@dataclass(frozen=True, kw_only=True)
class FsdpRun:
    """One line of the result."""

    text: str
    shape: LlamaShape
    numbers: Mapping[str, int] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "FsdpRun":
        model, counts, flags = parse_run(text, models=MODELS, numbers=_NUMBERS, flags=_FLAGS)
        numbers = {"dp": 1, "cp": 1, "ep": 1, "mbs": 1, "prefetch": 1, **counts}
        numbers.setdefault("gbs", numbers["dp"] * numbers["mbs"])
        shape = MODELS[model]
        shape = replace(shape, num_layers=numbers.get("l", shape.num_layers), seq_len=numbers.get("seq", shape.seq_len))
        run = cls(text=text, shape=shape, numbers=numbers, flags=flags)
        if shape.num_experts and run.way not in ("trunk", "ddp"):
            raise SystemExit(f"run {text!r} has experts, which plain modules have not; add trunk or ddp")
        if numbers["cp"] > 1 and (run.way == "ours" or not {"heads", "ring"} & set(flags)):
            raise SystemExit(f"run {text!r} splits sequences; add trunk, ddp or fsdp2, and heads or ring")
        return run

    @property
    def way(self) -> str:
        return next((flag for flag in self.flags if flag in _WAYS), "ours")

    @property
    def ranks(self) -> int:
        return self.numbers["dp"] * self.numbers["cp"]

    @property
    def strategy(self) -> str:
        return next((flag for flag in self.flags if flag in ("no_shard", "optim", "optim_grads")), "optim_grads_params")

    @property
    def num_microbatches(self) -> int:
        return self.numbers["gbs"] // (self.numbers["mbs"] * self.numbers["dp"])

    def config(self) -> TransformerConfig:
        """The same architecture for mcore_parallel."""
        shape = self.shape
        return TransformerConfig(
            num_layers=shape.num_layers, hidden_size=shape.hidden, ffn_hidden_size=shape.feed_forward, vocab_size=shape.vocab,
            num_attention_heads=shape.num_heads, num_query_groups=shape.num_groups, rotary_base=500000.0,
        )  # fmt: skip


Step = Callable[[], torch.Tensor | float]


def build(run: FsdpRun, device: torch.device) -> Step:
    """A whole training step on this rank's random tokens."""
    torch.manual_seed(0)
    if run.way in ("trunk", "ddp"):
        return _trunk(run, device)
    compiles = device.type == "cuda" and "plain" not in run.flags
    attend, share = None, _all_of
    if run.numbers["cp"] > 1:
        mesh = dist.device_mesh.init_device_mesh(device.type, (run.numbers["dp"], run.numbers["cp"]), mesh_dim_names=("dp", "cp"))
        attend, share = (ring if "ring" in run.flags else whole_sequences)(mesh["cp"])
    with torch.device("meta"):
        net = Llama(run.shape, cudnn="cudnn" in run.flags, attend=attend)
    if compiles:
        for block in net.blocks:
            block.compile(fullgraph="ring" not in run.flags)
    model, optimizer, clip, last = (_torch if run.way == "fsdp2" else _ours)(run, net, device)
    cos, sin = angles(run.shape, device)
    data = _tokens(run, device)
    loss_of = compiled_loss(compiles)
    count = run.num_microbatches

    def step() -> torch.Tensor:
        loss = torch.zeros((), device=device)
        for index in range(count):
            with last(index == count - 1):
                x = data[index % len(data)]
                with share(x[:, :-1], x[:, 1:], cos, sin, dims=(1, 1, 0, 0)) as (tokens, labels, *turns):
                    loss = loss_of(model(tokens, *turns), labels) / count
                    loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() * count

    return step


@contextlib.contextmanager
def _all_of(*tensors: torch.Tensor, dims: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Of sequences that lie on one rank."""
    yield tensors


def _ours(run: FsdpRun, net: Llama, device: torch.device) -> tuple[Any, Any, Step, Any]:
    from megatron_fsdp import MixedPrecisionPolicy, fully_shard

    cuda = device.type == "cuda"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if cuda else None, grad_comm_dtype=torch.bfloat16 if "narrow" in run.flags else None
    )
    ahead: dict[str, Any] = {"prefetch_bytes": run.numbers["ahead"] * 2**20} if "ahead" in run.numbers else {}
    model, optimizer = fully_shard(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-4, fused=cuda),
        zero_dp_strategy=run.strategy,
        fsdp_unit_modules=[LlamaBlock, "embedding", "head"],
        mixed_precision=policy,
        num_prefetch_units=run.numbers["prefetch"],
        nccl_ub="ub" in run.flags,
        device=device,
        reset_parameters=initialise,
        **ahead,
    )

    @contextlib.contextmanager
    def last(is_last: bool) -> Iterator[None]:
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield

    return model, optimizer, lambda: model.clip_grad_norm_(1.0), last


def _torch(run: FsdpRun, net: Llama, device: torch.device) -> tuple[Any, Any, Step, Any]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    cuda = device.type == "cuda"
    mesh = dist.device_mesh.init_device_mesh(device.type, (run.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if cuda else MixedPrecisionPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    for index, block in enumerate(net.blocks):
        net.blocks[index] = block = checkpoint_wrapper(block) if "layers" in run.flags else block
        fully_shard(block, reshard_after_forward=run.ranks > 1 and "keep" not in run.flags, **options)
    fully_shard([net.norm, net.head], **options)
    model: Any = fully_shard(net, **options)
    model.to_empty(device=device)
    with torch.no_grad():
        for module in model.modules():
            initialise(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=cuda)

    @contextlib.contextmanager
    def last(is_last: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(is_last)
        yield

    return model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0), last


def _trunk(run: FsdpRun, device: torch.device) -> Step:
    from mcore_moe import MoEConfig, moe_feed_forward
    from mcore_parallel import ParallelPlan, ProcessGroups
    from mcore_parallel.backends import Fp8Config, choose_backend
    from mcore_parallel.context_parallel import context_parallel_attention
    from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
    from mcore_parallel.graphs import graph_modules
    from mcore_parallel.models import GPTModel
    from mcore_parallel.nn import RecomputeConfig
    from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
    from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
    from mcore_tools.assembly import FullyShardedModel

    groups = ProcessGroups.build(ParallelPlan(dp=run.numbers["dp"], cp=run.numbers["cp"], ep=run.numbers["ep"]))
    options: dict[str, Any] = {"dtype": torch.bfloat16 if device.type == "cuda" else torch.float32, "device": device, "seed": None}
    if "layers" in run.flags:
        options["recompute"] = RecomputeConfig(granularity="full")
    elif parts := tuple(part for flag, part in (("norms", "norm"), ("act", "moe_act")) if flag in run.flags):
        options["recompute"] = RecomputeConfig(modules=parts)
    if run.numbers["cp"] > 1:
        options["attention_core"] = context_parallel_attention(groups, "p2p" if "ring" in run.flags else "a2a")
    if run.shape.num_experts:
        count, choices = run.shape.num_experts, run.shape.num_choices
        width = run.shape.feed_forward // choices
        experts = MoEConfig(num_moe_experts=count, moe_router_topk=choices, moe_ffn_hidden_size=width, moe_aux_loss_coeff=0.01)
        options["feed_forward"] = moe_feed_forward(experts)
    recipe = next((name for flag, name in _RECIPES.items() if flag in run.flags), None)
    backend = None if recipe is None else choose_backend("torch", fp8=Fp8Config(recipe=recipe, output_layer="head" in run.flags))
    model = GPTModel(run.config(), groups, backend=backend, **options)
    with torch.no_grad():
        for module in model.modules():
            initialise(module)
    divides = run.way == "trunk" or run.strategy != "no_shard"
    sharded: Any
    if run.way == "ddp":
        # As the sharded model does: weight gradients are written where they are summed, parameters gathered beside the forward.
        gathers = divides and "graphs" not in run.flags
        sync = DistributedDataParallelConfig(use_distributed_optimizer=divides, overlap_param_gather=gathers)
        sharded = DistributedDataParallel(sync, model, groups)
    else:
        sharded = FullyShardedModel(model, groups, zero_dp_strategy=run.strategy)
    settings = OptimizerConfig(lr=1e-4, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=divides)
    optimizer = MegatronOptimizer(settings, sharded, groups)
    whole = model if run.way == "ddp" else sharded
    if "graphs" in run.flags:
        graph_modules(model)
    mask = torch.ones(run.numbers["mbs"], run.shape.seq_len, device=device)
    data = [Batch(tokens=x[:, :-1].contiguous(), labels=x[:, 1:].contiguous(), loss_mask=mask) for x in _tokens(run, device)]
    batches = [data[index % len(data)] for index in range(run.num_microbatches)]
    return lambda: train_step(whole, batches, CrossEntropyObjective(), sharded, optimizer, lr=1e-4, groups=groups).loss


def _tokens(run: FsdpRun, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank() // run.numbers["cp"])
    return [torch.randint(run.shape.vocab, (run.numbers["mbs"], run.shape.seq_len + 1), generator=generator).to(device) for _ in range(4)]


def measure(runs: list[FsdpRun], kind: str, warmup: int, steps: int) -> list[dict[str, Any]]:
    """Times of the steps of each run on this rank, its peak memory and what communication it waited for."""
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    works = [build(run, device) for run in runs]
    if kind == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    losses = [[float(work()) for _ in range(warmup)] for work in works]
    times: list[list[float]] = [[] for _ in runs]
    if kind == "cuda":
        # One clock around all steps, as in training: nothing waits for the device between them.
        [work] = works
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            loss = work()
        torch.cuda.synchronize()
        times[0].append((time.perf_counter() - begin) / steps)
        losses[0].append(float(loss))
    else:
        for _ in range(steps):
            for index, work in enumerate(works):
                dist.barrier()
                begin = time.perf_counter()
                losses[index].append(float(work()))
                times[index].append(time.perf_counter() - begin)
    rows = [
        {"ms": statistics.median(spent) * 1e3, "first_loss": values[0], "last_loss": values[-1]}
        for spent, values in zip(times, losses, strict=True)
    ]
    if kind == "cuda":
        memory = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "reserved_gib": torch.cuda.max_memory_reserved() / 2**30}
        rows[0] |= memory | communication(works[0])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", nargs="+", default=[FsdpRun.parse(text) for text in ("tiny:fsdp2,dp4", "tiny:ours,dp4")], type=FsdpRun.parse
    )
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout-s", type=float, default=280.0, help="of one run")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    batches: list[list[FsdpRun]] = [[run] for run in arguments.runs]
    if kind == "cpu":
        sizes = dict.fromkeys(run.ranks for run in arguments.runs)
        batches = [[run for run in arguments.runs if run.ranks == size] for size in sizes]
    rows = []
    for runs in batches:
        size = runs[0].ranks
        options = {"kind": kind, "warmup": arguments.warmup, "steps": arguments.steps}
        try:
            values = launch(measure, size, device=kind, runs=runs, timeout_s=arguments.timeout_s, **options)
        except Exception as error:
            rows.append({"run": [run.text for run in runs], "error": str(error)[-1500:]})
            print(json.dumps(rows[-1]), flush=True)
            continue
        for index, run in enumerate(runs):
            rows.append(_row(run, [value[index] for value in values]))
            print(json.dumps(rows[-1]), flush=True)
    if arguments.output:
        record(arguments.output, {"work": "sharded training steps on random tokens", "rows": rows})


def _row(run: FsdpRun, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    slowest = max(rank["ms"] for rank in ranks)
    per_rank = run.numbers["gbs"] * run.shape.seq_len / slowest * 1e3 / run.ranks
    row: dict[str, Any] = {
        "run": run.text, "layers": run.shape.num_layers, "ranks": run.ranks, "ms": round(slowest, 2),
        "tokens_per_s_per_rank": round(per_rank),
        "tflops_per_rank": round(per_rank * flops_per_token(run.config(), run.shape.seq_len) / 1e12, 1),
    }  # fmt: skip
    for name in ("peak_gib", "reserved_gib", "communication_ms", "exposed_ms", "idle_ms"):
        if name in ranks[0]:
            row[name] = round(max(rank[name] for rank in ranks), 2)
    return {**row, "first_loss": ranks[-1]["first_loss"], "last_loss": ranks[-1]["last_loss"]}


if __name__ == "__main__":
    main()
