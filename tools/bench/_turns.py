# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""GRPO where every rank trains its share and serves, by turns: fully sharded trainer, an engine a rank. Random weights."""

import asyncio
import gc
import math
import random
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import DynamicInferenceEngine, SamplingParams
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    Learner,
    MegatronLocal,
    MemorySwitch,
    PackingConfig,
    grpo_iteration,
    refit,
)
from mcore_tools.assembly import FullyShardedModel
from mcore_tools.launch import launch
from tools.bench._scale import Scale
from tools.bench.rl import SPANS, Clock, EvenShare, Work, build_engine
from tools.bench.serve import MODELS

__all__ = ["TURNS", "grpo_by_turns"]

TURNS = {
    "full": Work(groups=16, group_size=8, inputs=128, outputs=512, bin_size=2560, cache_gb=16.0, cycles=10),
    "tiny": Work(groups=4, group_size=2, inputs=8, outputs=16, bin_size=96, cache_gb=0.01, cycles=3),
}


class _Invented(InferenceInterface):
    """Answers of random tokens at once: what is left of an iteration is its training."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def encode(self, text: str) -> Sequence[int]:
        return [int(word) for word in text.split()]

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        await asyncio.sleep(0)
        length = request.generation_args.max_tokens
        assert length is not None
        rows = []
        for prompt in request.prompts:
            answer = [random.randrange(self._vocab_size) for _ in range(length)]
            response = InferenceResponse(
                response=" ".join(map(str, answer)), token_ids=[*prompt, *answer], prompt_length=len(prompt),
                logprobs=[-math.log(self._vocab_size)] * length,
            )  # fmt: skip
            rows.append([response])
        return rows


class _NoEngine:
    """Weights go nowhere."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _ in weights:
            pass


def _learner(model: str, scale: Scale, groups: ProcessGroups) -> Learner:
    # Inputs of layers only are kept: what is asked is the memory of weights and state.
    recompute = RecomputeConfig(granularity="full")
    policy = GPTModel(MODELS[model], groups, device=scale.device, dtype=scale.dtype, seed=None, recompute=recompute)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 or "norm" in name else parameter.normal_(std=0.02)
    sharded = FullyShardedModel(policy, groups)
    rule = OptimizerConfig(lr=1e-6, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=True)
    optimizer = MegatronOptimizer(rule, sharded, groups)
    return Learner(model=sharded, groups=groups, objective=GRPOObjective(), sync=sharded, optimizer=optimizer)


def _has_room(scale: Scale, model: str, state_bytes: int) -> bool:
    """Whether state has room beside both models and gradients in 32 bits, with a fifth of the device for activations."""
    if scale.small:
        return True
    shape = GPTModel(MODELS[model], ProcessGroups.single(), device="meta", seed=None)
    parameters = sum(parameter.numel() for parameter in shape.parameters())
    weights = parameters * scale.dtype.itemsize
    needed = weights + (weights + 4 * parameters) / scale.gpus + state_bytes
    return needed < 0.8 * torch.cuda.get_device_properties(scale.device).total_memory


def _memory(has_room: bool, resident_gb: float = 0.0) -> MemorySwitch:
    return MemorySwitch(
        offload_optimizer=has_room, stream_optimizer=not has_room, resident_gb=resident_gb, release_gradients=True, suspend_engine=True
    )  # fmt: skip


def _room_gb(
    scale: Scale, clock: Clock, engine: DynamicInferenceEngine, memory: MemorySwitch, parts: dict[str, Any], training: int
) -> float:
    """GiB that neither generation nor training uses, less a tenth of the device for what torch cannot use again; the least of all ranks.

    Args:
        scale: ranks.
        clock: of the device.
        engine: whose cache may be outside of torch's memory.
        memory: what is given up by turns.
        parts: of it.
        training: most bytes of torch's in an iteration.
    """
    if scale.small:
        return 1e-4
    outside = clock.used() - torch.cuda.memory_reserved()
    with memory.generating(**parts):
        clock.peak()
        engine.generate([[1, 2, 3]] * 8, SamplingParams(num_tokens_to_generate=4, ignore_eos=True))
        generating = clock.used() - torch.cuda.memory_reserved() + clock.peak()
    total = torch.cuda.get_device_properties(scale.device).total_memory
    room = torch.tensor((0.9 * total - max(generating, outside + training)) / 2**30, device=scale.device)
    dist.all_reduce(room, op=dist.ReduceOp.MIN)
    return max(0.0, float(room))


def _iterate(scale: Scale, sizes: Work, model: str, streams: bool | None, resident_gb: float, iterations: int) -> dict[str, Any]:
    """Times and peaks of this rank; the best is kept of iterations, and of as many that only train, the first ones have new shapes."""
    groups, clock = ProcessGroups.build(ParallelPlan(dp=scale.gpus)), Clock(scale.device)
    random.seed(groups.world.rank)
    learner, vocab = _learner(model, scale, groups), MODELS[model].vocab_size
    optimizer, sync = learner.optimizer, learner.sync
    assert isinstance(optimizer, MegatronOptimizer)
    memory = _memory(_has_room(scale, model, optimizer.state_bytes["device"]) if streams is None else not streams)
    config = GRPOConfig(
        num_groups=sizes.groups, group_size=sizes.group_size, seq_len=sizes.inputs + sizes.outputs,
        generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=sizes.outputs), packing=PackingConfig(bin_size=sizes.bin_size),
    )  # fmt: skip
    agent = EvenShare(vocab, sizes.inputs)
    agent.start_at(0, rank=groups.world.rank, num_ranks=groups.world.size)

    def iterate(interface: InferenceInterface, engine: Any, memory: MemorySwitch) -> Any:
        dist.barrier()
        clock.finish()
        whole = GRPOConfig(**{**vars(config), "memory": memory})
        reports: list[Any] = []
        seconds = clock(
            lambda: reports.append(grpo_iteration(whole, agent=agent, interface=interface, engine=engine, learner=learner, lr=1e-6))
        )
        return seconds, reports[0]

    # Before there is an engine: state, gradients and activations fit in any case.
    training = min([iterate(_Invented(vocab), _NoEngine(), MemorySwitch())[1].train_s for _ in range(1 + iterations)][1:])
    peak_alone = clock.peak()
    optimizer.offload_to_cpu()
    engine = build_engine(model, sizes, scale.device)
    refit(learner.model, groups, engine, learner.transfer)
    memory.training(engine)
    switching: dict[str, Any] = {"optimizer": optimizer, "sync": sync, "engine": engine}
    generation = _generation(engine, agent, sizes, scale, memory, switching)
    interface = MegatronLocal(engine)
    if resident_gb:
        # An iteration without says what has room.
        clock.peak()
        iterate(interface, engine, memory)
        room = resident_gb if resident_gb > 0 else _room_gb(scale, clock, engine, memory, switching, clock.peak())
        memory = _memory(memory.offload_optimizer, room)
    clock.peak()
    timed = [iterate(interface, engine, memory) for _ in range(1 + iterations)][1:]
    seconds, report = min(timed, key=lambda one: one[0])
    return {
        "s": seconds, "generation_s": generation, "training_s": training,
        "timeline": {span: getattr(report, f"{span}_s") for span in SPANS},
        "resident_gb": memory.resident_gb,
        "made": report.mean_length * report.num_rollouts, "dropped": report.num_dropped, "streams": memory.stream_optimizer,
        "mismatch": report.train.metrics["logprob_mismatch"], "peak_alone": peak_alone, "peak": clock.peak(),
        **_switches(memory, switching, clock, sizes.cycles),
    }  # fmt: skip


def _generation(
    engine: DynamicInferenceEngine, agent: EvenShare, work: Work, scale: Scale, memory: MemorySwitch, switching: dict[str, Any]
) -> float:
    """Seconds of the second of two generations of this rank's share, the engine's alone."""
    params = SamplingParams(
        temperature=1.0, num_tokens_to_generate=work.outputs, ignore_eos=True, return_log_probs=True, processed_log_probs=True
    )
    prompts = [[int(word) for word in agent.problem(10**6 + number).prompt.split()] for number in range(work.groups // scale.gpus)]
    with memory.generating(**switching):
        for _ in range(2):
            dist.barrier()
            begin = scale.finish()
            engine.generate([prompt for prompt in prompts for _ in range(work.group_size)], params)
            seconds = scale.finish() - begin
            engine.reset_prefix_cache()
    return seconds


def _switches(memory: MemorySwitch, switching: dict[str, Any], clock: Clock, cycles: int) -> dict[str, Any]:
    """Seconds of handing the device over and back, all copies waited for, and the most bytes of a device that each cycle held."""
    there, back, peaks = [], [], []
    for _ in range(cycles):
        gc.collect()
        clock.peak()
        dist.barrier()
        block = memory.generating(**switching)
        there.append(clock(block.__enter__))
        peaks.append(clock.used())
        back.append(clock(lambda block=block: block.__exit__(None, None, None)))
        peaks[-1] = max(peaks[-1], clock.used())
    return {"there_s": statistics.median(there), "back_s": statistics.median(back), "peaks": peaks}


def grpo_by_turns(
    scale: Scale, work: Work, iterations: int, *, streams: bool | None = None, resident_gb: float = 0.0
) -> Iterator[dict[str, Any]]:
    """One row: an iteration with its parts, generation and training alone, the hand-over of memory, and peaks.

    Args:
        scale: ranks.
        work: of an iteration.
        iterations: that are timed.
        streams: whether the optimizer's state stays in host memory and streams through the device; None for where it has no room there.
        resident_gb: GiB of it that stay on the device; negative for what has room there.
    """
    model = "tiny" if scale.small else "qwen3-8b"
    inputs: dict[str, Any] = {"sizes": work, "model": model, "streams": streams, "resident_gb": resident_gb, "iterations": iterations}
    ranks = launch(_iterate, scale.gpus, device=scale.kind, scale=scale, **inputs, timeout_s=400.0)
    slowest = {name: max(rank[name] for rank in ranks) for name in ranks[0] if name.endswith("_s") or name == "s"}
    peaks = [max(cycle) for cycle in zip(*(rank["peaks"] for rank in ranks), strict=True)]
    alone = slowest["generation_s"] + slowest["training_s"]
    yield {
        "part": "turns", "run": f"fsdp{scale.gpus} and {scale.gpus} engines, one GPU each", "model": model, "groups": work.groups,
        "group_size": work.group_size, "inputs": work.inputs, "outputs": work.outputs, "bin_size": work.bin_size,
        "optimizer": "streamed" if ranks[0]["streams"] else "offloaded",
        "iteration_s": round(slowest["s"], 3), "generation_alone_s": round(slowest["generation_s"], 3),
        "training_alone_s": round(slowest["training_s"], 3), "over_parts": round(slowest["s"] / alone - 1, 4),
        # Where ranks wait for each other a span is that of the one that waited longest.
        "timeline_s": {span: round(max(rank["timeline"][span] for rank in ranks), 3) for span in SPANS},
        "switch_s": {"to_generation": round(slowest["there_s"], 3), "to_training": round(slowest["back_s"], 3)},
        "tokens_per_s_per_gpu": round(ranks[0]["made"] / slowest["s"] / scale.gpus, 1),
        "resident_gib": round(ranks[0]["resident_gb"], 4),
        "peak_gib": [round(rank["peak"] / 2**30, 2) for rank in ranks],
        "peak_training_alone_gib": [round(rank["peak_alone"] / 2**30, 2) for rank in ranks],
        "peak_growth": round(max(peaks[1:]) / min(peaks[1:]) - 1, 5) if min(peaks[1:]) else None, "cycles": len(peaks),
        "logprob_mismatch": ranks[0]["mismatch"], "num_dropped": ranks[0]["dropped"],
    }  # fmt: skip
