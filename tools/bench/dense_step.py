# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokens a second of dense models, layout by layout, as training steps on random tokens.

python -m tools.bench.dense_step --runs dense-1b:dp1,mbs4,gbs16 dense-8b:tp2,dp2,mbs2,gbs8 --output docs/benchmarks/dense_step.json

A run names a model and, by commas: tpN, ppN, vppN, dpN (their product is the number of GPUs), mbsN sequences a micro-batch, gbsN a step,
and optionally zb (the zero-bubble schedule), norm (recompute the norms), core (recompute attention), plain (weight gradients go through
autograd instead of into the buffer by the GEMM), torch or te (who computes GEMMs: torch or Transformer Engine; else ``--backend``),
fp8=RECIPE (fp8 GEMMs: tensorwise, rowwise, or with te delayed, blockwise ..., or none; else ``--fp8``), e4m3 (gradients
in that format), wide (weight gradients from factors in the model's dtype), ends (first and last layer in the model's dtype),
head (the loss of the output layer in fp8, too).
"""

import argparse
import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import RECIPES, Backend, Fp8Config, choose_backend
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, flops_per_token
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineConfig, Schedule
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from mcore_tools.launch import launch
from tools.bench._record import record
from tools.bench._words import parse_run

_LLAMA = {"num_attention_heads": 32, "num_query_groups": 8, "vocab_size": 128256, "rotary_base": 500000.0}
MODELS: Mapping[str, tuple[TransformerConfig, int]] = MappingProxyType(
    {
        "tiny": (TransformerConfig(num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=512), 32),
        "dense-1b": (TransformerConfig(num_layers=16, hidden_size=2048, ffn_hidden_size=8192, **_LLAMA), 4096),
        "dense-8b-l8": (TransformerConfig(num_layers=8, hidden_size=4096, ffn_hidden_size=14336, **_LLAMA), 4096),
        "dense-8b": (TransformerConfig(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, **_LLAMA), 4096),
    }
)
"""Architecture and sequence length."""
_NUMBERS = ("tp", "pp", "vpp", "dp", "mbs", "gbs")
_FLAGS = ("zb", "norm", "core", "plain", "torch", "te", "e4m3", "wide", "ends", "head", "fp8=")


@dataclass(frozen=True, kw_only=True)
class DenseRun:
    """One line of the result."""

    model: str
    numbers: Mapping[str, int] = field(default_factory=dict)
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "DenseRun":
        model, numbers, flags = parse_run(text, models=MODELS, numbers=_NUMBERS, flags=_FLAGS)
        return cls(model=model, numbers={**dict.fromkeys(_NUMBERS, 1), **numbers}, flags=flags)

    def completed(self, backend: str, recipe: str) -> "DenseRun":
        """With the backend and the recipe of runs that name none."""
        flags = self.flags
        if not {"torch", "te"} & set(flags):
            flags += (backend,)
        if not any(flag.startswith("fp8=") for flag in flags):
            flags += (f"fp8={recipe}",)
        return replace(self, flags=flags)

    @property
    def plan(self) -> ParallelPlan:
        numbers = self.numbers
        return ParallelPlan(tp=numbers["tp"], pp=numbers["pp"], vpp=numbers["vpp"], dp=numbers["dp"])

    @property
    def fp8(self) -> Fp8Config | None:
        recipe = next((flag.removeprefix("fp8=") for flag in self.flags if flag.startswith("fp8=")), None)
        if recipe in (None, "none"):
            return None
        ends = int("ends" in self.flags)
        choices: dict[str, Any] = {
            "recipe": recipe, "gradient_format": "e4m3" if "e4m3" in self.flags else None, "output_layer": "head" in self.flags
        }  # fmt: skip
        return Fp8Config(
            **choices, weight_gradients="wide" not in self.flags, num_layers_at_start_in_bf16=ends, num_layers_at_end_in_bf16=ends
        )

    def check(self) -> None:
        """Leave the program where the recipe does not exist."""
        try:
            _ = self.fp8
        except ValueError as error:
            raise SystemExit(str(error)) from None

    def backend(self) -> Backend:
        """On the device where it runs."""
        return choose_backend("te" if "te" in self.flags else "torch", fp8=self.fp8)

    @property
    def ranks(self) -> int:
        return self.numbers["tp"] * self.numbers["pp"] * self.numbers["dp"]


def build(run: DenseRun, device: torch.device) -> tuple[Any, DistributedDataParallel, MegatronOptimizer, Schedule]:
    """The rank's part of the model, its gradient sum, its optimizer and its schedule."""
    config, _ = MODELS[run.model]
    groups = ProcessGroups.build(run.plan)
    pp, vpp = run.numbers["pp"], run.numbers["vpp"]
    modules = tuple(name for flag, name in (("norm", "norm"), ("core", "core_attention")) if flag in run.flags)
    recompute = RecomputeConfig(granularity="selective", modules=modules) if modules else None

    pipeline = PipelineConfig(
        schedule="zero_bubble" if "zb" in run.flags else "auto", layout=balanced(config, pp * vpp) if pp > 1 else None
    )
    layout = pipeline.place(config.num_layers, num_stages=pp, num_chunks=vpp)
    backend = run.backend()
    chunks = [
        GPTModel(config, groups, layers=part, recompute=recompute, backend=backend, dtype=torch.bfloat16, device=device, seed=None)
        for part in layout.of_rank(groups.pp.rank)
    ]
    model = chunks[0] if vpp == 1 else ModelChunks(chunks)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 or "norm" in name else parameter.normal_(std=0.02)
    sliced = run.numbers["dp"] > 1
    sync = DistributedDataParallel(
        DistributedDataParallelConfig(
            gradient_accumulation_fusion="plain" not in run.flags, use_distributed_optimizer=sliced, overlap_param_gather=sliced
        ),
        model,
        groups,
    )
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-4, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=sliced), sync, groups)
    return model, sync, optimizer, pipeline.build(vpp)


def balanced(config: TransformerConfig, stages: int) -> str:
    """A layout string in which the output counts as the layers it costs."""
    layer = flops_per_token(config, 1) - 6 * config.vocab_size * config.hidden_size
    head = 6 * config.vocab_size * config.hidden_size / (layer / config.num_layers)
    share = (config.num_layers + head) / stages
    last = max(0, round(share - head))
    counts = [(config.num_layers - last + index) // (stages - 1) for index in range(stages - 1)]
    return "|".join(["E" + "t" * counts[0], *("t" * count for count in counts[1:]), "t" * last + "L"])


def measure(run: DenseRun, kind: str, warmup: int, steps: int, profile: bool) -> dict[str, Any]:
    """Mean milliseconds of a step on this rank, and its peak memory."""
    config, seq_len = MODELS[run.model]
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    model, sync, optimizer, schedule = build(run, device)
    groups = sync.groups
    generator = torch.Generator().manual_seed(groups.dp.rank)
    shape = (run.numbers["mbs"], seq_len + 1)
    count = run.numbers["gbs"] // (run.numbers["mbs"] * groups.dp.size)
    tokens = [torch.randint(config.vocab_size, shape, generator=generator).to(device) for _ in range(4)]
    mask = torch.ones(shape[0], seq_len, device=device)
    data = [Batch(tokens=x[:, :-1].contiguous(), labels=x[:, 1:].contiguous(), loss_mask=mask) for x in tokens]
    batches = [data[index % 4] for index in range(count)]

    def step() -> float:
        return train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=1e-4, groups=groups, pipeline=schedule).loss

    def finish() -> float:
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    losses = [step()]
    first_step_at = time.time()
    losses += [step() for _ in range(warmup - 1)]
    # One clock around all steps, as in training: the parameters of a step are gathered beside the next forward.
    begin = finish()
    losses += [step() for _ in range(steps)]
    seconds = (finish() - begin) / steps
    if profile and groups.dp.rank == 0 and groups.pp.rank == 0 and groups.tp.rank == 0:
        table(step)
    elif profile:
        step()
    memory = torch.cuda.max_memory_allocated() / 2**30 if kind == "cuda" else 0.0
    return {"ms": seconds * 1e3, "peak_gib": memory, "first_step_at": first_step_at, "first_loss": losses[0], "last_loss": losses[-1]}


def table(step: Any) -> None:
    """Where a step's time goes, on standard output."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=70), flush=True)
    streams: dict[int, list[Any]] = {}
    for event in profiler.events() or ():
        if event.device_type == torch.profiler.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            streams.setdefault(event.device_resource_id, []).append(event)
    events = sorted(max(streams.values(), key=len), key=lambda event: event.time_range.start)
    gaps, end = [], events[0].time_range.start
    for before, event in itertools.pairwise(events):
        end = max(end, before.time_range.end)
        gaps.append((event.time_range.start - end, event.time_range.start - events[0].time_range.start, before.name[:50], event.name[:50]))
    idle = sum(max(0.0, gap[0]) for gap in gaps)
    print(
        f"the busiest stream spans {(end - events[0].time_range.start) / 1e3:.1f} ms, idle {idle / 1e3:.1f} ms of it; longest waits in us:"
    )
    for length, at, before, after in sorted(gaps, reverse=True)[:25]:
        print(f"{length:9.0f} at {at:9.0f} between {before:<50s} and {after}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=[DenseRun.parse("tiny:gbs4")], type=DenseRun.parse)
    parser.add_argument("--backend", choices=("torch", "te"), default="torch", help="of runs that name none")
    parser.add_argument("--fp8", choices=("none", *RECIPES), default="none", help="recipe of runs that name none")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="print the costliest kernels of one more step of each run")
    parser.add_argument("--peers", type=Path, help="JSON lines of peers measured in the same call, to keep beside")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    runs = [run.completed(arguments.backend, arguments.fp8) for run in arguments.runs]
    for run in runs:
        run.check()
    for run in runs:
        options = {"warmup": arguments.warmup, "steps": arguments.steps, "profile": arguments.profile}
        try:
            values = launch(measure, run.ranks, device=kind, run=run, kind=kind, timeout_s=240.0, **options)
        except Exception as error:
            rows.append({**asdict(run), "error": str(error)[-600:]})
            print(json.dumps(rows[-1]), flush=True)
            continue
        config, seq_len = MODELS[run.model]
        slowest = max(value["ms"] for value in values)
        per_gpu = run.numbers["gbs"] * seq_len / slowest * 1e3 / run.ranks
        row = {
            "model": run.model, **run.numbers, "flags": list(run.flags), "gpus": run.ranks, "ms": round(slowest, 2),
            "tokens_per_s_per_gpu": round(per_gpu), "tflops_per_gpu": round(per_gpu * flops_per_token(config, seq_len) / 1e12, 1),
            "peak_gib": [round(value["peak_gib"], 1) for value in values],
            "first_step_at": max(value["first_step_at"] for value in values),
            "first_loss": values[-1]["first_loss"], "last_loss": values[-1]["last_loss"],
        }  # fmt: skip
        rows.append(row)
        print(json.dumps(row), flush=True)
    if arguments.output:
        peers = [json.loads(line) for line in arguments.peers.read_text().splitlines()] if arguments.peers else []
        record(arguments.output, {"work": "training steps on random tokens", "rows": rows, "peers": peers})


if __name__ == "__main__":
    main()
