# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts, their exchange, serving and RL over all GPUs of a machine; training beside what the planner foretells.

python -m tools.bench.many --gpus 8 --output docs/benchmarks/many.json \\
    --peer "Megatron-core=torchrun --nproc-per-node 8 train_megatron_core.py --model moe-l6 --ep 8 --mbs 2 --gbs 16"
python -m tools.bench.many --gpus 4 --parts experts --runs ep4 "ep4, skewed" "ep2 edp2"
python -m tools.bench.many --gpus 2 --small

experts: training steps of moe-l6 with its experts over all ranks, again with the first eighth of the experts, which are the first rank's,
four times as busy as the average, and with tokens that go to experts at random; on GPUs these three with the exchange by direct stores too;
then with the experts over one half of the ranks and again over the other, with each expert on two ranks, and with two pipeline stages.
Parameters of a skewed run stay as they are (its learning rate is 0), and so does its skew. "busiest_expert" and "busiest_rank" are loads
over their means; time and memory stand beside ``step_cost`` and ``estimate``. exchange: dispatch and
combine of the picks alone, by all-to-all and on GPUs by direct stores, and by DeepEP and HybridEP where they are installed, beside
all-to-alls and copies to the next GPU of as many bytes.
serving: one engine over all ranks, then an engine a rank, then an engine a rank whose experts are spread over all (a mixture), with and
without recorded steps; "graph_share" is the share of recorded ones. refit: from a fully sharded model over all ranks into these engines,
and from a mixture with experts over all ranks into engines that share them or are split. rl: GRPO with a fully sharded trainer on one half
and an engine on each rank of the other, by turns and one step off. turns: GRPO of qwen3-8b where every GPU trains its share and serves by
turns, the optimizer in host memory meanwhile; an iteration beside generation alone and training alone, and what handing over the memory
takes. killed: an engine a rank under load, one of which is killed. A peer is a command that prints JSON lines; they are kept as they are.
``--small`` is for a machine without GPUs: tiny shapes, ranks on gloo.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import DynamicInferenceEngine, ExecutionConfig
from mcore_moe import MoEConfig, MoELayer, Routing, moe_feed_forward
from mcore_moe.dispatch import MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher, choose_exchange
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.comm import SymmetricBuffer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, dense_feed_forward
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import PipelineConfig
from mcore_parallel.planner import Cluster, Layout, Workload, estimate, find_model, step_cost
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from mcore_rl import WeightTransfer, gather_weights, refit
from mcore_tools.assembly import FullyShardedModel
from mcore_tools.launch import launch
from tools.bench._halves import grpo_on_halves
from tools.bench._killed import killed_engine
from tools.bench._peers import peers
from tools.bench._record import record
from tools.bench._scale import Scale
from tools.bench._timing import communication
from tools.bench._turns import TURNS, grpo_by_turns
from tools.bench.rl import SIZES, Work
from tools.bench.serve import EXPERTS, run_case
from tools.bench.serve import MODELS as SERVED
from tools.bench.serve import build as build_engine

_FULL: dict[str, Any] = {
    "num_layers": 6, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "ffn_hidden_size": 768, "vocab_size": 151936,
    "num_moe_experts": 128, "moe_router_topk": 8,
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 32, "vocab_size": 512,
    "num_moe_experts": 16, "moe_router_topk": 2,
}  # fmt: skip
_DIRECT: dict[str, Any] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "symmetric"}
_LIBRARIES = {"deepep": "deep_ep_cpp", "hybridep": "hybrid_ep_cpp"}
"""Backends of the flex dispatcher, and the module by which each is known to be installed."""
_PARTS = ("experts", "exchange", "serving", "refit", "rl", "turns", "killed")
_EXCHANGE_KERNELS = ("_push_tokens_kernel", "_push_sums_kernel", "_add_sums_kernel", "barrier_kernel")
"""Of direct stores."""
_HOT_SHARE, _HOT_LOAD = 8, 4.0
"""One in so many experts gets so many times the average load."""
_CACHE_GB = 36.0
"""Of keys and values a GPU: 512 requests of 768 tokens of qwen3-8b over two of them, beside its weights on a card of 80 GB."""


@dataclass(frozen=True, kw_only=True)
class ExpertsRun:
    """Training steps in one layout."""

    name: str
    plan: ParallelPlan
    skewed: bool = False
    balanced: bool = False
    """Tokens go to experts at random."""
    symmetric: bool = False
    """Tokens travel by direct stores in the memory of the other GPUs."""
    micro_batch: int = 2

    def parts(self, scale: Scale) -> tuple[Workload, Layout]:
        """What the planner is asked."""
        divides = self.plan.dp > 1
        workload = Workload(
            model=find_model(overrides=_SMALL if scale.small else _FULL), sequence=32 if scale.small else 4096,
            micro_batch=self.micro_batch, global_batch=max(16, 4 * self.plan.dp), dtype=scale.dtype,
            optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=divides),
        )  # fmt: skip
        return workload, Layout(plan=self.plan, sync=DistributedDataParallelConfig(use_distributed_optimizer=divides))


def experts_runs(gpus: int, *, small: bool = False) -> list[ExpertsRun]:
    """Layouts that fill the machine; those of halves need ranks to divide, direct stores need GPUs."""
    runs = [
        ExpertsRun(name=f"ep{gpus}", plan=ParallelPlan(dp=gpus, ep=gpus)),
        ExpertsRun(name=f"ep{gpus}, skewed", plan=ParallelPlan(dp=gpus, ep=gpus), skewed=True),
        ExpertsRun(name=f"ep{gpus}, balanced", plan=ParallelPlan(dp=gpus, ep=gpus), balanced=True),
    ]
    if not small:
        runs += [dataclasses.replace(run, name=f"{run.name}, symmetric", symmetric=True) for run in runs]
    if gpus % 2 == 0:
        half = gpus // 2
        if half > 1:
            runs.append(ExpertsRun(name=f"ep{half} edp2", plan=ParallelPlan(dp=gpus, ep=half)))
        runs.append(ExpertsRun(name=f"ep{half} etp2", plan=ParallelPlan(dp=gpus, ep=half, etp=2)))
        runs.append(ExpertsRun(name=f"ep{half} pp2", plan=ParallelPlan(dp=half, ep=half, pp=2)))
    return runs


def hot_bias(num_experts: int, topk: int, std: float) -> Tensor:
    """[E] float32, what the router adds so that the first eighth of the experts gets four times the average, by bisection.

    Args:
        num_experts: E.
        topk: experts a token.
        std: of the logits before.
    """
    hot = max(1, num_experts // _HOT_SHARE)
    logits_TE = torch.randn(4096, num_experts, generator=torch.Generator().manual_seed(0)) * std
    low, high = 0.0, 20.0 * std
    for _ in range(30):
        middle = (low + high) / 2
        bias_E = torch.zeros(num_experts)
        bias_E[:hot] = middle
        share = ((logits_TE + bias_E).topk(topk).indices < hot).float().mean().item() * num_experts / hot
        low, high = (middle, high) if share < _HOT_LOAD else (low, middle)
    return bias_E


def busiest(counts: Sequence[float], num_parts: int) -> float:
    """Load of the busiest over the mean, when experts in order are cut into so many parts."""
    size = len(counts) // num_parts
    loads = [sum(counts[first : first + size]) for first in range(0, len(counts), size)]
    return max(loads) * num_parts / max(1, sum(loads))


def train(run: ExpertsRun, scale: Scale, warmup: int, steps: int) -> dict[str, Any]:
    """Time, memory and loads of this rank, beside the planner's."""
    workload, layout = run.parts(scale)
    groups = ProcessGroups.build(run.plan)
    config, sizes = workload.model.config, workload.model.experts
    assert sizes is not None
    mixture = MoEConfig(
        num_moe_experts=sizes.num_experts, moe_router_topk=sizes.topk, moe_ffn_hidden_size=sizes.ffn_hidden_size,
        moe_aux_loss_coeff=0.01, moe_router_bias=True, moe_router_force_load_balancing=run.balanced,
        **(_DIRECT if run.symmetric else {}),
    )  # fmt: skip
    pipeline = PipelineConfig()
    placed = pipeline.place(config.num_layers, num_stages=run.plan.pp, num_chunks=1)
    [part] = placed.of_rank(groups.pp.rank)
    model = GPTModel(config, groups, feed_forward=moe_feed_forward(mixture), layers=part, dtype=scale.dtype, device=scale.device, seed=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        bias_E = hot_bias(sizes.num_experts, sizes.topk, 0.02 * config.hidden_size**0.5)
        for layer in (module for module in model.modules() if isinstance(module, MoELayer)):
            assert layer.router.bias is not None
            layer.router.bias.copy_(bias_E if run.skewed else torch.zeros_like(bias_E))
    sync = DistributedDataParallel(layout.sync, model, groups)
    optimizer = MegatronOptimizer(workload.optimizer, sync, groups)
    generator = torch.Generator().manual_seed(groups.dp.rank)
    shape = (workload.micro_batch, workload.sequence)

    def draw() -> Tensor:
        return torch.randint(config.vocab_size, shape, generator=generator).to(scale.device)

    mask = torch.ones(shape, device=scale.device)
    batches = [Batch(tokens=draw(), labels=draw(), loss_mask=mask) for _ in range(layout.num_microbatches(workload))]

    # A router that learns undoes its skew.
    lr = 0.0 if run.skewed else 1e-4

    def step() -> Any:
        return train_step(
            model, batches, CrossEntropyObjective(), sync, optimizer, lr=lr, groups=groups, pipeline=pipeline.build(1)
        )  # fmt: skip

    if not scale.small:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(warmup):
        report = step()
    begin = scale.finish()
    for _ in range(steps):
        report = step()
    seconds = (scale.finish() - begin) / steps
    counts = list(report.layers.counts.values())
    waits = {} if scale.small else communication(step, *_EXCHANGE_KERNELS)
    return {
        **waits,
        "s": seconds, "peak": 0 if scale.small else torch.cuda.max_memory_allocated(), "loss": report.loss,
        "busiest": max(busiest(loads, sizes.num_experts) for loads in counts),
        "busiest_rank": max(busiest(loads, run.plan.ep) for loads in counts),
        "foretold_s": step_cost(workload, layout, Cluster(memory_bandwidth=scale.memory_bandwidth)).total, "tokens": workload.tokens,
        "foretold_peak": estimate(workload, layout, stage=groups.pp.rank, kernels=not scale.small).allocated,
    }  # fmt: skip


def experts(scale: Scale, runs: Sequence[ExpertsRun], steps: int) -> Iterator[dict[str, Any]]:
    """A row a layout."""
    for run in runs:
        ranks = launch(train, scale.gpus, device=scale.kind, run=run, scale=scale, warmup=2, steps=steps, timeout_s=240.0)
        slowest, fullest = max(rank["s"] for rank in ranks), max(ranks, key=lambda rank: rank["peak"])
        yield {
            "part": "experts", "run": run.name, "micro_batch": run.micro_batch, "ms": round(slowest * 1e3, 2),
            "tokens_per_s_per_gpu": round(ranks[0]["tokens"] / slowest / scale.gpus),
            "foretold_ms": round(ranks[0]["foretold_s"] * 1e3, 2), "peak_gib": round(fullest["peak"] / 2**30, 2),
            "foretold_gib": round(fullest["foretold_peak"] / 2**30, 2), "busiest_expert": round(ranks[0]["busiest"], 2),
            "busiest_rank": round(ranks[0]["busiest_rank"], 2), "loss": ranks[0]["loss"],
            **{name: round(max(rank[name] for rank in ranks), 2) for name in ranks[0] if name.endswith("_ms")},
        }  # fmt: skip


def exchange_times(scale: Scale, tokens: int, width: int, num_experts: int, topk: int, repeats: int) -> dict[str, float]:
    """Seconds of dispatch and combine, and of two all-to-alls and on GPUs two copies to the next one of as many bytes; of direct stores and
    copies also in a graph, where the host's launches cost nothing, as they do behind other work of the device.
    """
    groups = ProcessGroups.build(ParallelPlan(dp=scale.gpus, ep=scale.gpus))
    dispatcher = MoEAlltoAllTokenDispatcher(num_experts, groups.ep)
    generator = torch.Generator().manual_seed(groups.world.rank)
    experts_TK = torch.rand(tokens, num_experts, generator=generator).topk(topk).indices.to(scale.device)
    routing = Routing(experts_TK, torch.full(experts_TK.shape, 1.0 / topk, device=scale.device))
    x_TD = torch.randn(tokens, width, generator=generator).to(scale.device, scale.dtype)
    rows = tokens * topk // scale.gpus * scale.gpus
    sent = torch.randn(rows, width, device=scale.device, dtype=scale.dtype)
    received = torch.empty_like(sent)

    def ours(dispatcher: Any = dispatcher) -> None:
        there = dispatcher.dispatch(x_TD, routing)
        dispatcher.combine(there.rows_RD, there, routing)

    def plain() -> None:
        dist.all_to_all_single(received, sent, group=groups.ep.pg)
        dist.all_to_all_single(sent, received, group=groups.ep.pg)

    works: dict[str, Callable[[], None]] = {"ours": ours, "plain": plain}
    if not scale.small and scale.gpus > 1:
        mixture = MoEConfig(num_moe_experts=num_experts, moe_router_topk=topk, **_DIRECT)
        direct = choose_exchange(mixture, groups, width=width, dtype=scale.dtype, device=scale.device)
        assert direct is not None
        works["direct"] = functools.partial(ours, MoEFlexTokenDispatcher(num_experts, groups, direct))
        for name, module in _LIBRARIES.items():
            if importlib.util.find_spec(module) is not None:
                chosen = dataclasses.replace(mixture, moe_flex_dispatcher_backend=name)
                library = choose_exchange(chosen, groups, width=width, dtype=scale.dtype, device=scale.device)
                assert library is not None
                works[name] = functools.partial(ours, MoEFlexTokenDispatcher(num_experts, groups, library))
        leaving = sent[: rows // scale.gpus * (scale.gpus - 1)]
        buffer = SymmetricBuffer(groups.ep, leaving.nbytes, scale.device, timeout_s=60.0)
        there = buffer.peers[(groups.ep.rank + 1) % scale.gpus].view(scale.dtype).view_as(leaving)

        def copies() -> None:
            for _ in range(2):
                there.copy_(leaving)
                buffer.barrier()

        works["copies"] = copies

    def lap(work: Callable[[], object]) -> float:
        laps = []
        for _ in range(3 + repeats):
            dist.barrier()
            begin = scale.finish()
            work()
            laps.append(scale.finish() - begin)
        return statistics.median(laps[3:])

    with torch.no_grad():
        times = {name: lap(work) for name, work in works.items()}
        for name in ("direct", "copies") if "direct" in works else ():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                works[name]()
            times[f"{name}_graph"] = lap(graph.replay)
    return times


def exchange(scale: Scale, repeats: int) -> Iterator[dict[str, Any]]:
    """A row a number of tokens."""
    width, num_experts, topk = (64, 16, 2) if scale.small else (4096, 128, 8)
    for tokens in (64,) if scale.small else (4096, 8192):
        sizes: dict[str, Any] = {"tokens": tokens, "width": width, "num_experts": num_experts, "topk": topk, "repeats": repeats}
        ranks = launch(exchange_times, scale.gpus, device=scale.kind, scale=scale, **sizes, timeout_s=120.0)
        slowest = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        # What leaves a GPU, there and back.
        leaving = 2 * tokens * topk * width * scale.dtype.itemsize * (scale.gpus - 1) / scale.gpus
        yield {
            "part": "exchange", "tokens": tokens, "ms": round(slowest["ours"] * 1e3, 3),
            "gb_per_s": round(leaving / slowest["ours"] / 1e9, 1),
            "all_to_all_ms": round(slowest["plain"] * 1e3, 3), "ratio": round(slowest["plain"] / slowest["ours"], 3),
        }  # fmt: skip
        if "direct" in slowest:
            yield {
                "part": "exchange", "tokens": tokens, "dispatcher": "symmetric", "ms": round(slowest["direct"] * 1e3, 3),
                "gb_per_s": round(leaving / slowest["direct"] / 1e9, 1), "copy_gb_per_s": round(leaving / slowest["copies"] / 1e9, 1),
                "copy_ms": round(slowest["copies"] * 1e3, 3), "ratio": round(slowest["copies"] / slowest["direct"], 3),
                "graph_ms": round(slowest["direct_graph"] * 1e3, 3), "copy_graph_ms": round(slowest["copies_graph"] * 1e3, 3),
                "graph_ratio": round(slowest["copies_graph"] / slowest["direct_graph"], 3),
            }  # fmt: skip
        # They never run in a graph: the host reads how many tokens come.
        for name in filter(slowest.__contains__, _LIBRARIES):
            yield {
                "part": "exchange", "tokens": tokens, "dispatcher": name, "ms": round(slowest[name] * 1e3, 3),
                "gb_per_s": round(leaving / slowest[name] / 1e9, 1), "ratio": round(slowest["copies"] / slowest[name], 3),
            }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServingRun:
    """Engines in one layout."""

    layout: str
    """tp for one engine over all ranks, dp for an engine a rank, ep for those that share experts."""
    use_graphs: bool | None = None

    def share(self, requests: int, scale: Scale, rank: int) -> int:
        """Requests of a rank's engine."""
        if self.layout == "tp":
            return requests
        # Of few requests some ranks that share experts have none.
        return requests // scale.gpus + (self.layout == "ep" and rank < requests % scale.gpus)

    def build(self, scale: Scale) -> DynamicInferenceEngine:
        """This rank's engine."""
        name, groups = _engine(scale, split=self.layout == "tp")
        if self.layout == "ep":
            name, groups = _mixture(scale), ProcessGroups.build(ParallelPlan(dp=scale.gpus, ep=scale.gpus))
        memory_gb, execution = 0.05 if scale.small else _CACHE_GB, ExecutionConfig(use_graphs=self.use_graphs)
        return build_engine(name, scale.kind, memory_gb, groups=groups, execution=execution)[0]


def serve(scale: Scale, serving_run: ServingRun, cases: list[tuple[int, int, int]]) -> list[tuple[float, float]]:
    """Of the second of two runs of each case on this rank: seconds, and the share of its steps that were recorded."""
    engine, results = serving_run.build(scale), []
    for requests, inputs, outputs in cases:
        share = serving_run.share(requests, scale, dist.get_rank())
        run_case(engine, share, inputs, outputs)
        dist.barrier()
        before, begin = engine.stats(), scale.finish()
        run_case(engine, share, inputs, outputs)
        dist.barrier()
        seconds, after = scale.finish() - begin, engine.stats()
        steps, recorded = (after[name] - before[name] for name in ("steps", "graph_steps"))
        results.append((seconds, recorded / max(1, steps)))
    engine.close()
    return results


def serving(scale: Scale) -> Iterator[dict[str, Any]]:
    """Rows of an engine over all ranks, of an engine a rank, and of engines that share experts, with and without graphs."""
    cases = [(4 * scale.gpus, 16, 8), (1, 16, 8)] if scale.small else [(512, 512, 256), (1, 128, 256), (32, 128, 256)]
    runs = [ServingRun(layout="tp"), ServingRun(layout="dp"), ServingRun(layout="ep")]
    for run in runs if scale.small else [*runs, ServingRun(layout="ep", use_graphs=False)]:
        fitting = [case for case in cases if run.layout != "dp" or case[0] >= scale.gpus]
        ranks = launch(serve, scale.gpus, device=scale.kind, scale=scale, serving_run=run, cases=fitting, timeout_s=200.0)
        name = f"{run.layout}{scale.gpus}" + (", no graphs" if run.use_graphs is False else "")
        for (requests, inputs, outputs), results in zip(fitting, zip(*ranks, strict=True), strict=True):
            seconds = max(seconds for seconds, _ in results)
            made = requests if run.layout == "tp" else sum(run.share(requests, scale, rank) for rank in range(scale.gpus))
            yield {
                "part": "serving", "run": name, "model": _mixture(scale) if run.layout == "ep" else _engine_model(scale),
                "requests": requests, "inputs": inputs, "outputs": outputs, "ms_per_token": round(seconds / outputs * 1e3, 3),
                "out_tok_s": round(made * outputs / seconds), "graph_share": round(max(share for _, share in results), 3),
            }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RefitRun:
    """Weights of a trained model into engines on the same ranks."""

    name: str
    model: str
    trainer: ParallelPlan
    sharded: bool
    """The trainer's weights are divided among its replicas."""
    engine: ParallelPlan | None
    """None for an engine on each rank."""


def refit_runs(gpus: int, *, small: bool = False) -> list[RefitRun]:
    """A dense model from a fully sharded trainer, and a mixture whose experts the trainer's ranks share, into two kinds of engines each."""
    dense, mixture = ("tiny", "tiny-mixture") if small else ("qwen3-8b", "qwen3-30b-a3b-l12")
    split, shared = ParallelPlan(tp=gpus, sequence_parallel=False), ParallelPlan(dp=gpus, ep=gpus)
    sharded: dict[str, Any] = {"model": dense, "trainer": ParallelPlan(dp=gpus), "sharded": True}
    experts: dict[str, Any] = {"model": mixture, "trainer": shared, "sharded": False}
    return [
        RefitRun(name=f"fsdp{gpus} to tp{gpus}", engine=split, **sharded),
        RefitRun(name=f"fsdp{gpus} to dp{gpus}", engine=None, **sharded),
        RefitRun(name=f"ep{gpus} to ep{gpus}", engine=shared, **experts),
        # Each expert is cut, as its layer's attention is.
        RefitRun(name=f"ep{gpus} to tp{gpus}", engine=dataclasses.replace(split, etp=gpus), **experts),
    ]


def refit_times(scale: Scale, run: RefitRun) -> list[float]:
    """Seconds of four refits on this rank, the first with its plan; the engine has the trainer's weights to the last bit afterwards."""
    groups = ProcessGroups.build(run.trainer)
    engine_groups = ProcessGroups.single() if run.engine is None else ProcessGroups.build(run.engine)
    engine, _ = build_engine(run.model, scale.kind, 0.05 if scale.small else 4.0, groups=engine_groups)
    feed_forward = moe_feed_forward(EXPERTS[run.model]) if run.model in EXPERTS else dense_feed_forward
    policy = GPTModel(SERVED[run.model], groups, feed_forward=feed_forward, dtype=scale.dtype, device=scale.device, seed=None)
    torch.manual_seed(1 + groups.world.rank)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.02)
    if not run.sharded:
        # Replicas have equal weights; experts of the ranks differ.
        DistributedDataParallel(DistributedDataParallelConfig(), policy, groups).broadcast_params()
    trained = FullyShardedModel(policy, groups) if run.sharded else policy
    transfer, times = WeightTransfer(), []
    for _ in range(4):
        dist.barrier()
        begin = scale.finish()
        refit(trained, groups, engine, transfer)
        times.append(scale.finish() - begin)
    pairs = zip(gather_weights(trained, groups), gather_weights(engine.model, engine_groups), strict=True)
    # A sharded model's names begin with those of its wrappers.
    different = [served for (name, ours), (served, theirs) in pairs if not name.endswith(served) or not torch.equal(ours, theirs)]
    assert not different, f"{run.name}: the engine has other weights in {different}"
    return times


def refits(scale: Scale) -> Iterator[dict[str, Any]]:
    """A row a layout of trainer and engines."""
    for run in refit_runs(scale.gpus, small=scale.small):
        ranks = launch(refit_times, scale.gpus, device=scale.kind, scale=scale, run=run, timeout_s=200.0)
        first, *later = (max(times) for times in zip(*ranks, strict=True))
        yield {
            "part": "refit", "run": run.name, "model": run.model, "first_ms": round(first * 1e3, 2), "later_ms": round(min(later) * 1e3, 2)
        }  # fmt: skip


def _engine(scale: Scale, split: bool) -> tuple[str, ProcessGroups]:
    """The served model, and the layout of the engine of this rank."""
    groups = ProcessGroups.build(ParallelPlan(tp=scale.gpus, sequence_parallel=False)) if split else ProcessGroups.single()
    return _engine_model(scale), groups


def _engine_model(scale: Scale) -> str:
    return "tiny" if scale.small else "qwen3-8b"


def _mixture(scale: Scale) -> str:
    """The served model with experts."""
    return "tiny-mixture" if scale.small else "qwen3-30b-a3b-l12"


def _work(sizes: Mapping[str, Work], arguments: argparse.Namespace) -> Work:
    """Of an iteration, with what the command changes."""
    work = sizes["tiny" if arguments.small else "full"]
    chosen = {name: value for name in ("groups", "group_size", "outputs", "bin_size") if (value := getattr(arguments, name)) is not None}
    changed = dataclasses.replace(work, **chosen)
    return dataclasses.replace(changed, bin_size=max(changed.bin_size, changed.inputs + changed.outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="ranks, one a GPU")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--runs", nargs="+", metavar="NAME", help="layouts of experts, of which a row has the name; all when left out")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences of a micro-batch, of experts")
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--steps", type=int, default=6, help="timed steps and repeats")
    of_work = (
        ("groups", "prompts"),
        ("group-size", "answers a prompt"),
        ("outputs", "tokens of an answer"),
        ("bin-size", "tokens of a bin"),
    )
    for name, of in of_work:
        parser.add_argument(f"--{name}", type=int, help=f"{of}, of rl and turns")
    parser.add_argument(
        "--resident-gb", type=float, default=0.0, help="GiB of the optimizer's state that stay on a GPU, of turns; -1: what has room"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of a peer")
    parser.add_argument("--memory-tb-s", type=float, default=4.0, help="of a GPU's memory, for the planner; an H100 has 3.0")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.gpus < 2:
        parser.error(f"--gpus {arguments.gpus}: needs at least 2")
    if not arguments.small and torch.cuda.device_count() < arguments.gpus:
        parser.error(f"--gpus {arguments.gpus}: {torch.cuda.device_count()} are visible; lower it, or add --small")
    runs = experts_runs(arguments.gpus, small=arguments.small)
    layouts = {run.name: dataclasses.replace(run, micro_batch=arguments.micro_batch) for run in runs}
    if unknown := sorted(set(arguments.runs or ()) - set(layouts)):
        parser.error(f"--runs {unknown[0]!r}: must be of {', '.join(map(repr, layouts))}")
    scale = Scale(gpus=arguments.gpus, small=arguments.small, memory_bandwidth=arguments.memory_tb_s * 1e12)
    rows: list[dict[str, Any]] = []
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "experts": lambda: experts(scale, [layouts[name] for name in arguments.runs or layouts], arguments.steps),
        "exchange": lambda: exchange(scale, arguments.steps),
        "serving": lambda: serving(scale),
        "refit": lambda: refits(scale),
        "rl": lambda: grpo_on_halves(scale, _work(SIZES, arguments), max(2, arguments.steps // 2)),
        "turns": lambda: grpo_by_turns(scale, _work(TURNS, arguments), max(1, arguments.steps // 3), resident_gb=arguments.resident_gb),
        "killed": lambda: killed_engine(scale),
    }
    failed = []

    def keep(row: dict[str, Any]) -> None:
        """Print a row, and write what there is: a machine may be taken away."""
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.output is not None:
            record(arguments.output, {"work": "experts, serving and RL over many GPUs", "small": scale.small, "rows": rows})

    for row in peers(arguments.peer, arguments.timeout_s):
        keep(row)
    for name in arguments.parts:
        try:
            for row in parts[name]():
                keep(row)
        except Exception as error:
            # The minutes of the other parts are not lost with this one.
            failed.append(name)
            keep({"part": name, "error": str(error)[-1500:]})
    if failed:
        parser.exit(1, f"failed: {', '.join(failed)}\n")


if __name__ == "__main__":
    main()
