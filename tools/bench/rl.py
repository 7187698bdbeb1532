# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trainer and engine on one device: refit, taking turns with the memory, and a GRPO step beside its parts. Random weights.

python -m tools.bench.rl --model llama-1b --turns qwen3-8b --output docs/benchmarks/rl.json
python -m tools.bench.rl --model llama-1b --shared-prompts --output docs/benchmarks/rl_shared_prompts.json
python -m tools.bench.rl --model llama-1b --two-processes --output docs/benchmarks/rl_two_processes.json
python -m tools.bench.rl --model tiny --size tiny --device cpu --cycles 100 --output docs/benchmarks/rl_turns_cpu.json
python -m tools.bench.rl --model llama-1b --agreement --output docs/benchmarks/rl_agreement.json
python -m tools.bench.rl --model llama-1b --peer "TRL=python -m tools.bench.rl_trl" --output docs/benchmarks/rl_peer.json

A peer is a command that prints JSON lines, which are kept; beside it the second of two GRPO steps is measured and nothing else.
"""

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention, SamplingParams
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import train_step
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
    NumberedProblems,
    PackingConfig,
    PackingContext,
    Problem,
    TokenRollout,
    WeightTransfer,
    grpo_iteration,
    refit,
)
from tools.bench._peers import peers
from tools.bench._record import record
from tools.bench.serve import MODELS

SPANS = ("rollout", "to_generation", "generate", "to_training", "exchange", "train", "pack", "score", "refit")
"""Of an `IterationReport`, in seconds: to_generation, generate, to_training and exchange are parts of rollout, pack and score of train."""
SWITCH = MemorySwitch(offload_optimizer=True, release_gradients=True, suspend_engine=True)


@dataclass(frozen=True, kw_only=True)
class Work:
    """Of a GRPO step, and of the cache of its engine."""

    groups: int
    group_size: int
    inputs: int
    outputs: int
    bin_size: int
    cache_gb: float
    cycles: int


SIZES: Mapping[str, Work] = MappingProxyType(
    {
        "full": Work(groups=64, group_size=8, inputs=128, outputs=1024, bin_size=9216, cache_gb=30.0, cycles=20),
        "tiny": Work(groups=2, group_size=4, inputs=8, outputs=16, bin_size=96, cache_gb=0.01, cycles=3),
    }
)


SHARED: Mapping[str, Work] = MappingProxyType(
    {
        # Two trajectories fill a bin, or a prompt with its answers.
        "full": Work(groups=8, group_size=8, inputs=4096, outputs=512, bin_size=9216, cache_gb=0.0, cycles=3),
        "tiny": Work(groups=2, group_size=4, inputs=16, outputs=4, bin_size=40, cache_gb=0.0, cycles=1),
    }
)
"""Prompts that are long beside their answers, for ``--shared-prompts``."""


ARITHMETICS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"plain": {}, "batch-invariant": {"batch_invariant": True}, "float32": {"dtype": torch.float32}}
)


class Numbers:
    """A tokenizer whose texts are ids between blanks; nothing ends a text."""

    eod = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class EvenShare(NumberedProblems):
    """Prompts of random ids; the reward is the share of even ids in the answer."""

    def __init__(self, vocab_size: int, length: int) -> None:
        super().__init__("even_share")
        self._vocab_size, self._length = vocab_size, length

    def problem(self, number: int) -> Problem:
        rng = random.Random(number)
        return Problem(problem_id=str(number), prompt=" ".join(str(rng.randrange(self._vocab_size)) for _ in range(self._length)))

    async def get_reward(self, response: str, problem: Problem) -> float:
        return even_share(response)


def even_share(text: str) -> float:
    """Of the ids of a text."""
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


class Recorded(InferenceInterface):
    """Hands out answers that were generated before: what is left of a step is its training."""

    def __init__(self, inner: MegatronLocal) -> None:
        self._inner = inner
        self.answers: list[InferenceResponse] = []
        self.replays = False

    def encode(self, text: str) -> Sequence[int]:
        return self._inner.encode(text)

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        if self.replays:
            await asyncio.sleep(0)
            return [[self.answers.pop()]]
        answers = await self._inner.agenerate(request)
        self.answers += [answer for row in answers for answer in row]
        return answers


class Clock:
    """Seconds of device work, on the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, work: Callable[[], Any]) -> float:
        self.finish()
        begin = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - begin

    def finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def used(self) -> int:
        """Bytes of the device that are not free, whoever holds them; on a CPU the resident memory of this process."""
        if self._device.type != "cuda":
            return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def peak(self) -> int:
        """Most bytes of torch's since the last call."""
        if self._device.type != "cuda":
            return 0
        most = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return most


def build(model: str, work: Work, device: torch.device, *, narrow: bool) -> tuple[Learner, DynamicInferenceEngine]:
    """A policy and an engine of one shape.

    Args:
        model: the shape.
        work: sizes of the engine.
        device: of both.
        narrow: 6 instead of 12 bytes of optimizer state a parameter, and gradients in the parameters' dtype.
    """
    return build_learner(model, device, narrow=narrow), build_engine(model, work, device)


def build_learner(
    model: str, device: torch.device, *, narrow: bool, dtype: torch.dtype | None = None, batch_invariant: bool = False
) -> Learner:
    """A policy of one shape; arguments as of ``build``, and ``dtype`` in place of the device's usual one."""
    groups, backend = ProcessGroups.single(), choose_backend(batch_invariant=batch_invariant)
    policy = GPTModel(MODELS[model], groups, backend=backend, device=device, dtype=dtype or _dtype(device), seed=None)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 or "norm" in name else parameter.normal_(std=0.02)
    sync = DistributedDataParallel(DistributedDataParallelConfig(grad_reduce_in_fp32=not narrow), policy, groups)
    states: dict[str, Any] = {}
    if narrow and device.type == "cuda":
        states = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16}
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-6, weight_decay=0.0, clip_grad=1.0, **states), sync, groups)
    return Learner(model=policy, groups=groups, objective=GRPOObjective(), sync=sync, optimizer=optimizer)


def build_engine(
    model: str, work: Work, device: torch.device, *, dtype: torch.dtype | None = None, batch_invariant: bool = False
) -> DynamicInferenceEngine:
    """An engine of one shape, for weights of a policy.

    Args:
        model: the shape.
        work: sizes of the engine.
        device: of the engine.
        dtype: in place of the device's usual one.
        batch_invariant: the bits of a token in any company.
    """
    config, backend = MODELS[model], choose_backend(batch_invariant=batch_invariant)
    served = GPTModel(
        config, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend, device=device, dtype=dtype or _dtype(device),
        seed=None,
    )  # fmt: skip
    limits = InferenceConfig(
        max_sequence_length=work.inputs + work.outputs, max_requests=work.groups * work.group_size,
        max_tokens=max(8192, work.groups * work.group_size), block_size_tokens=64 if device.type == "cuda" else 16,
        buffer_size_gb=work.cache_gb,
    )  # fmt: skip
    context = DynamicInferenceContext.for_model(served, limits)
    return DynamicInferenceEngine(served.eval(), context, Numbers(config.vocab_size), vocab_size=config.vocab_size)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def refits(learner: Learner, engine: DynamicInferenceEngine, clock: Clock) -> dict[str, Any]:
    """The first, and the median of five later ones, with the memory beyond what is there anyway."""
    transfer = WeightTransfer()

    def carry() -> None:
        refit(learner.model, learner.groups, engine, transfer)

    first, before = clock(carry), clock.peak() and torch.cuda.memory_allocated()
    clock.peak()
    later = [clock(carry) for _ in range(5)]
    same = all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), engine.model.parameters(), strict=True))
    assert same, "the engine has other weights"
    return {
        "first_ms": round(first * 1e3, 2), "later_ms": round(statistics.median(later) * 1e3, 2),
        "extra_mib": round(max(0, clock.peak() - before) / 2**20, 1), "bucket_mib": transfer.bucket_bytes / 2**20,
    }  # fmt: skip


def turns(learner: Learner, engine: DynamicInferenceEngine, clock: Clock, cycles: int) -> dict[str, Any]:
    """Times to hand the device over, both ways, over some cycles with a short generation each; what it holds meanwhile,
    and the bytes of tensors behind each."""
    parts: dict[str, Any] = {"optimizer": learner.optimizer, "sync": learner.sync, "engine": engine}
    cache = engine.context.cache.num_bytes
    used = [clock.used()]
    suspended = [clock(engine.suspend)]
    used.append(clock.used())
    resumed = [clock(engine.resume)]
    suspended.append(clock(engine.suspend))
    there, back, first_tokens, peaks, tensors = [], [], [], [], []
    for _ in range(cycles + 1):
        gc.collect()
        block = SWITCH.generating(**parts)
        there.append(clock(block.__enter__))
        first_tokens.append(clock(lambda: engine.generate([[1, 2, 3]] * 8, SamplingParams(num_tokens_to_generate=4, ignore_eos=True))))
        peaks.append(clock.used())
        # The state is on its way back beside other work; here it is waited for.
        back.append(clock(lambda block=block: block.__exit__(None, None, None)))
        tensors.append(_tensor_bytes())
    clock(engine.resume)
    return {
        "suspend_s": round(max(suspended), 4), "resume_s": round(max(resumed), 4),
        "cache_gib": round(cache / 2**30, 2), "freed_gib": round((used[0] - used[1]) / 2**30, 2),
        "to_generation_first_s": round(there[0], 3), "to_generation_s": round(statistics.median(there[1:]), 3),
        "to_generation_max_s": round(max(there[1:]), 3),
        "to_training_s": round(statistics.median(back[1:]), 3), "to_training_max_s": round(max(back[1:]), 3),
        "first_tokens_s": round(statistics.median(first_tokens[1:]), 3), "cycles": cycles,
        "peak_gib": [round(min(peaks[1:]) / 2**30, 4), round(max(peaks[1:]) / 2**30, 4)],
        "peak_growth": round(max(peaks[1:]) / min(peaks[1:]) - 1, 5), "tensor_bytes": [min(tensors[1:]), max(tensors[1:])],
    }  # fmt: skip


def _tensor_bytes() -> int:
    """Of all dense tensors that Python holds, memory that several share once."""
    tensors = [found for found in gc.get_objects() if type(found) in (Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.device.type != "meta"}.values())


def step(learner: Learner, engine: DynamicInferenceEngine, work: Work, clock: Clock) -> dict[str, Any]:
    """The third of three GRPO iterations, beside generation alone and training alone."""
    vocab, count = engine.vocab_size, work.groups * work.group_size
    agent, interface = EvenShare(vocab, work.inputs), Recorded(MegatronLocal(engine))
    config = _step_config(work)
    params = SamplingParams(
        temperature=1.0, num_tokens_to_generate=work.outputs, ignore_eos=True, return_log_probs=True, processed_log_probs=True
    )
    prompts = [interface.encode(agent.problem(10**6 + number).prompt) for number in range(work.groups)]

    def generate() -> None:
        engine.generate([prompt for prompt in prompts for _ in range(work.group_size)], params)
        engine.reset_prefix_cache()

    generate()
    alone_s = clock(generate)

    def iterate(memory: MemorySwitch) -> Any:
        one = dataclasses.replace(config, memory=memory)
        return grpo_iteration(one, agent=agent, interface=interface, engine=engine, learner=learner, lr=1e-6)

    iterate(MemorySwitch())
    # The same answers again: everything but generation.
    interface.replays = True
    gc.collect()
    train_s = iterate(MemorySwitch()).train_s
    interface.replays = False
    interface.answers.clear()
    iterate(SWITCH)
    reports: list[Any] = []
    whole_s = clock(lambda: reports.append(iterate(SWITCH)))
    report = reports[0]
    tokens = count * work.outputs
    return {
        "groups": work.groups, "group_size": work.group_size, "inputs": work.inputs, "outputs": work.outputs,
        "generation_alone_s": round(alone_s, 3), "training_alone_s": round(train_s, 3), "whole_s": round(whole_s, 3),
        "over_parts": round(whole_s / (alone_s + train_s) - 1, 4),
        "timeline_s": {name: round(getattr(report, f"{name}_s"), 4) for name in SPANS},
        "tokens_per_s": round(tokens / whole_s), "generated": round(report.mean_length * report.num_rollouts),
        "num_dropped": report.num_dropped, "mean_reward": round(report.mean_reward, 4),
        "logprob_mismatch": report.train.metrics["logprob_mismatch"],
    }  # fmt: skip


def _step_config(work: Work) -> GRPOConfig:
    return GRPOConfig(
        num_groups=work.groups, group_size=work.group_size, seq_len=work.inputs + work.outputs, memory=SWITCH,
        generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=work.outputs), packing=PackingConfig(bin_size=work.bin_size),
    )  # fmt: skip


def step_beside_peers(learner: Learner, engine: DynamicInferenceEngine, work: Work, clock: Clock, *, repeats: int = 1) -> dict[str, Any]:
    """The last of GRPO iterations behind a first one; engines record sizes and compile kernels in the iterations that first meet them."""
    refit(learner.model, learner.groups, engine, WeightTransfer())
    agent, interface = EvenShare(engine.vocab_size, work.inputs), MegatronLocal(engine)
    reports: list[Any] = []

    def iterate() -> None:
        config = _step_config(work)
        reports.append(grpo_iteration(config, agent=agent, interface=interface, engine=engine, learner=learner, lr=1e-6))

    first_s = clock(iterate)
    clock.peak()
    later_s = [clock(iterate) for _ in range(repeats)]
    whole_s, report = later_s[-1], reports[-1]
    generated = round(report.mean_length * report.num_rollouts)
    return {
        "groups": work.groups, "group_size": work.group_size, "inputs": work.inputs, "outputs": work.outputs,
        "first_s": round(first_s, 3), "later_s": [round(seconds, 3) for seconds in later_s], "whole_s": round(whole_s, 3),
        "tokens_per_s": round(generated / whole_s), "generated": generated,
        "timeline_s": {name: round(getattr(report, f"{name}_s"), 4) for name in SPANS}, "peak_gib": round(clock.peak() / 2**30, 2),
        "device_gib": round(clock.used() / 2**30, 2), "reward": round(report.mean_reward, 4), "num_dropped": report.num_dropped,
        "logprob_mismatch": report.train.metrics["logprob_mismatch"],
    }  # fmt: skip


def agreement(model: str, names: Sequence[str], work: Work, device: torch.device, clock: Clock) -> Iterator[dict[str, Any]]:
    """The last of four GRPO iterations in each arithmetic, over an eighth of the tokens, with the mean distance of log-probabilities of
    engine and trainer; the cost is a step's time beside that of the plain one. One without room says so."""
    work = dataclasses.replace(work, groups=max(1, work.groups // 4), outputs=work.outputs // 2, cache_gb=work.cache_gb / 2)
    plain_s = None
    for name in names:
        arithmetic, learner, engine = ARITHMETICS[name], None, None
        try:
            learner = build_learner(model, device, narrow=False, **arithmetic)
            engine = build_engine(model, work, device, **arithmetic)
            row = step_beside_peers(learner, engine, work, clock, repeats=3)
        except torch.OutOfMemoryError as error:
            row = {"error": f"{type(error).__name__}: {error}"[:600]}
        else:
            plain_s = row["whole_s"] if name == "plain" else plain_s
            row["cost"] = None if plain_s is None else round(row["whole_s"] / plain_s, 3)
        yield {"arithmetic": name, **row}
        learner = engine = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def shared_prompts(learner: Learner, work: Work, clock: Clock) -> dict[str, Any]:
    """Training alone on answers to long prompts, from packing to the update: a prompt is computed once, and with each answer."""
    model: Any = learner.model
    rng, vocab = random.Random(0), model.config.vocab_size
    rollouts = []
    for group in range(work.groups):
        prompt = [rng.randrange(vocab) for _ in range(work.inputs)]
        for _ in range(work.group_size):
            rollouts.append(
                TokenRollout(
                    trajectory=prompt + [rng.randrange(vocab) for _ in range(work.outputs)],
                    reward=rng.random(),
                    generation_mask=[False] * work.inputs + [True] * work.outputs,
                    logprobs=[0.0] * work.outputs,
                    env_id="random",
                    problem_id=str(group),
                )
            )
    device = next(learner.model.parameters()).device
    rows: dict[bool, dict[str, Any]] = {}
    for share in (False, True):
        packing = PackingConfig(bin_size=work.bin_size, share_prompts=share)
        reports: list[Any] = []

        def train(packing: PackingConfig = packing, reports: list[Any] = reports) -> None:
            packed = PackingContext.pack(rollouts, packing)
            batches = packed.with_advantages([rollouts[i].reward for i in packed.rollouts]).on(device).batches
            # Weights stay, so that both ways compute the same.
            report = train_step(learner.model, batches, learner.objective, learner.sync, learner.optimizer, lr=0.0)
            reports.append((report, len(batches), packed.efficiency))

        learner.model.train()
        clock(train)
        clock.peak()
        seconds = statistics.median(clock(train) for _ in range(work.cycles))
        report, bins, efficiency = reports[-1]
        rows[share] = {
            "train_s": round(seconds, 4), "bins": bins, "places": bins * work.bin_size, "efficiency": round(efficiency, 4),
            "peak_gib": round(clock.peak() / 2**30, 2), "trained_tokens": report.num_tokens, "grad_norm": report.grad_norm,
            "mean_logprob": -report.metrics["logprob_mismatch"],
        }  # fmt: skip
    return {
        "groups": work.groups, "group_size": work.group_size, "inputs": work.inputs, "outputs": work.outputs, "bin_size": work.bin_size,
        "with_each_answer": rows[False], "shared": rows[True],
        "times_as_fast": round(rows[False]["train_s"] / rows[True]["train_s"], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b", choices=sorted(MODELS))
    parser.add_argument("--turns", nargs="*", default=[], choices=sorted(MODELS), help="further shapes whose turns are measured")
    parser.add_argument(
        "--shared-prompts", action="store_true", help="training alone, a long prompt once and with each answer; nothing else"
    )
    parser.add_argument(
        "--two-processes", action="store_true", help="refit where trainer and engine are processes of one device; nothing else"
    )
    parser.add_argument(
        "--agreement", nargs="*", choices=list(ARITHMETICS), help="a step in each arithmetic, or in these, with the mismatch; nothing else"
    )
    parser.add_argument("--cycles", type=int, help="turns of trainer and engine of the first shape; nothing else is measured")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND", help="a step beside this command's; nothing else")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of a peer")
    parser.add_argument("--size", default="full", choices=sorted(SIZES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    work, device = SIZES[arguments.size], torch.device(arguments.device)
    clock, rows = Clock(device), []

    def keep(what: str, model: str, run: Callable[[], dict[str, Any]]) -> None:
        try:
            row = {"what": what, "model": model, **run()}
        except Exception as error:
            row = {"what": what, "model": model, "error": f"{type(error).__name__}: {error}"[:600]}
        rows.append(row)
        print(json.dumps(row), flush=True)

    # Before this process takes memory of the device.
    for row in peers(arguments.peer, arguments.timeout_s):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.peer:
        keep("step", arguments.model, lambda: step_beside_peers(*build(arguments.model, work, device, narrow=False), work, clock))
    if arguments.shared_prompts:
        alone = build_learner(arguments.model, device, narrow=False)
        keep("shared prompts", arguments.model, lambda: shared_prompts(alone, SHARED[arguments.size], clock))
    if arguments.two_processes:
        # It imports this file.
        from tools.bench._two_processes import refits_between

        keep("refit between processes", arguments.model, lambda: refits_between(arguments.model, work, device))
    if arguments.agreement is not None:
        for row in agreement(arguments.model, arguments.agreement or list(ARITHMETICS), work, device, clock):
            keep("agreement", arguments.model, lambda row=row: row)
    alone_only = arguments.shared_prompts or arguments.two_processes or arguments.agreement is not None or arguments.peer
    for number, model in enumerate(() if alone_only else (arguments.model, *arguments.turns)):
        learner, engine = build(model, work, device, narrow=number > 0)
        if arguments.cycles is not None:
            refit(learner.model, learner.groups, engine, WeightTransfer())
        else:
            keep("refit", model, lambda learner=learner, engine=engine: refits(learner, engine, clock))
        cycles = arguments.cycles or (5 if number else work.cycles)
        keep("turns", model, lambda learner=learner, engine=engine, cycles=cycles: turns(learner, engine, clock, cycles))
        if not number and arguments.cycles is None:
            keep("step", model, lambda learner=learner, engine=engine: step(learner, engine, work, clock))
        learner = engine = None
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if arguments.output is not None:
        record(arguments.output, {"work": "reinforcement learning on one device, random weights", "rows": rows})


if __name__ == "__main__":
    main()
