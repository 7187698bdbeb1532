# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""GRPO on disjoint halves: a fully sharded trainer on one half of the ranks, an engine on each of the others. Random weights."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    DisjointLoop,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    Learner,
    MegatronLocal,
    PackingConfig,
    Placement,
    RolloutServer,
)
from mcore_tools.assembly import FullyShardedModel
from mcore_tools.launch import launch
from tools.bench._scale import Scale
from tools.bench.rl import SPANS, EvenShare, Work, build_engine
from tools.bench.serve import MODELS

__all__ = ["grpo_on_halves"]


def _learner(model: str, scale: Scale, groups: ProcessGroups) -> Learner:
    policy = GPTModel(MODELS[model], groups, device=scale.device, dtype=scale.dtype, seed=None)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 or "norm" in name else parameter.normal_(std=0.02)
    sharded = FullyShardedModel(policy, groups)
    states: dict[str, Any] = {}
    if not scale.small:
        states = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16}
    rule = OptimizerConfig(lr=1e-6, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=True, **states)
    return Learner(
        model=sharded, groups=groups, objective=GRPOObjective(), sync=sharded, optimizer=MegatronOptimizer(rule, sharded, groups)
    )


def _server(model: str, work: Work, scale: Scale, placement: Placement) -> RolloutServer:
    engine = build_engine(model, work, scale.device)
    agent = EvenShare(engine.vocab_size, work.inputs)
    agent.start_at(0, rank=placement.engine_rank, num_ranks=placement.num_engines)
    return RolloutServer(agent=agent, interface=MegatronLocal(engine), engine=engine)


def _iterate(scale: Scale, sizes: Work, model: str, num_trainers: int, max_lag: int, iterations: int) -> dict[str, Any]:
    """Times of this rank; the first two iterations, with the plan of the weights and new shapes, are left out."""
    placement = Placement.split(ParallelPlan(dp=num_trainers))
    config = GRPOConfig(
        num_groups=sizes.groups, group_size=sizes.group_size, seq_len=sizes.inputs + sizes.outputs,
        generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=sizes.outputs), packing=PackingConfig(bin_size=sizes.bin_size),
    )  # fmt: skip
    if placement.groups is not None:
        loop = DisjointLoop(config, placement, learner=_learner(model, scale, placement.groups), max_lag=max_lag)
    else:
        loop = DisjointLoop(config, placement, server=_server(model, sizes, scale, placement), max_lag=max_lag)
    with loop:
        for _ in range(2):
            loop.iterate(1e-6)
        dist.barrier()
        begin = scale.finish()
        reports = [loop.iterate(1e-6) for _ in range(iterations)]
        seconds = (scale.finish() - begin) / iterations
    spans = {span: sum(getattr(report, f"{span}_s") for report in reports) / iterations for span in SPANS}
    last = reports[-1]
    mismatch = last.train.metrics["logprob_mismatch"] if last.updates else None
    return {
        "s": seconds, "spans": spans, "lag": last.lag, "mismatch": mismatch, "dropped": sum(report.num_dropped for report in reports),
        "made": sum(report.mean_length * report.num_rollouts for report in reports) / iterations,
    }  # fmt: skip


def grpo_on_halves(scale: Scale, work: Work, iterations: int) -> Iterator[dict[str, Any]]:
    """A row by turns, and one of one step off."""
    model = "tiny" if scale.small else "qwen3-8b" if scale.gpus >= 4 else "llama-1b"
    trainers = scale.gpus // 2
    engines = scale.gpus - trainers
    # A rank has as many groups whatever their number is.
    work = dataclasses.replace(work, groups=max(engines, trainers, work.groups))
    by_turns = None
    for max_lag in (0, 1):
        inputs: dict[str, Any] = {"sizes": work, "model": model, "num_trainers": trainers, "max_lag": max_lag, "iterations": iterations}
        ranks = launch(_iterate, scale.gpus, device=scale.kind, scale=scale, **inputs, timeout_s=400.0)
        trainer, seconds = ranks[0], max(rank["s"] for rank in ranks)
        by_turns = seconds if by_turns is None else by_turns
        yield {
            "part": "rl", "run": f"fsdp{trainers} and {engines} engines, {'one step off' if max_lag else 'by turns'}", "model": model,
            "groups": work.groups, "group_size": work.group_size, "inputs": work.inputs, "outputs": work.outputs,
            "iteration_s": round(seconds, 3), "rollout_s": round(trainer["spans"]["rollout"], 3),
            # One step off a trainer that is done waits for the engines in its share.
            "train_s": round(trainer["spans"]["train"], 3), "refit_ms": round(1e3 * max(rank["spans"]["refit"] for rank in ranks), 2),
            # Of the trainer. One step off the engines generate beside its training, and rollout is what it waited for them.
            "timeline_s": {span: round(trainer["spans"][span], 3) for span in SPANS},
            "tokens_per_s_per_gpu": round(trainer["made"] / seconds / scale.gpus, 1), "lag": trainer["lag"],
            "over_by_turns": round(by_turns / seconds, 3), "logprob_mismatch": trainer["mismatch"], "num_dropped": trainer["dropped"],
        }  # fmt: skip
