# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fine-tuning on one device: conversations beside text, and adapters beside those of PEFT.

python -m tools.bench.tune --sft dense-1b:mbs4,gbs16 --lora dense-8b:mbs2,gbs4 dense-8b:mbs4,gbs4,norm \\
    --peft dense-8b:mbs1,gbs4 dense-8b:mbs2,gbs4 dense-8b:mbs4,gbs4,ckpt --output docs/benchmarks/tune.json

A run names a model and, by commas: mbsN sequences a micro-batch and gbsN a step. ``--sft`` trains one model in turn on text (whole rows)
and on packed conversations, both from corpora of random tokens that it writes; all tokens of a row count, and ``filled`` is the share that
is no padding. ``--lora`` and ``--peft`` train adapters of rank 16 on all linear layers, on rows of random tokens, within ``--limit-gib`` of
device memory; a fused projection of ours has one A where PEFT has one for each part. Words of ``--lora``: norm, core, mlp (recompute that
part), full (recompute layers), fp8, fp8_weight_only (frozen weights in eight bits). Words of ``--peft``: ckpt (gradient checkpointing),
compile (decoder layers by torch.compile).
"""

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.backends import quantize_base
from mcore_parallel.data import IndexedDatasetBuilder, token_dtype, train_bpe
from mcore_parallel.data.corpus import HAS_LOSS
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from mcore_tools.assembly import datasets, step_batches
from mcore_tools.launch import launch
from mcore_tools.recipes import DataConfig, RunConfig, SFTConfig, TrainConfig
from tools.bench._peft import peft_step
from tools.bench._record import record
from tools.bench._words import parse_run
from tools.bench.dense_step import MODELS

LORA = LoraConfig(rank=16, alpha=32.0)
LR = 1e-4
_PARTS = {"norm": "norm", "core": "core_attention", "mlp": "mlp"}
_BASE_DTYPES = ("fp8", "fp8_weight_only")
_WORDS: Mapping[str, tuple[str, ...]] = {"sft": (), "lora": (*_PARTS, "full", *_BASE_DTYPES), "peft": ("ckpt", "compile")}


@dataclass(frozen=True, kw_only=True)
class TuneRun:
    """One line of the result."""

    work: str
    """sft, lora or peft."""
    model: str
    micro_batch: int
    batch: int
    flags: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, work: str) -> "TuneRun":
        model, numbers, flags = parse_run(text, models=MODELS, numbers=("mbs", "gbs"), flags=_WORDS[work])
        micro_batch = numbers.get("mbs", 1)
        batch = numbers.get("gbs", micro_batch)
        if batch % micro_batch:
            raise SystemExit(f"mbs{micro_batch} in run {text!r} must divide gbs{batch}")
        return cls(work=work, model=model, micro_batch=micro_batch, batch=batch, flags=flags)

    @property
    def architecture(self) -> TransformerConfig:
        return MODELS[self.model][0]

    @property
    def seq_len(self) -> int:
        return MODELS[self.model][1]

    @property
    def recompute(self) -> RecomputeConfig | None:
        if "full" in self.flags:
            return RecomputeConfig(granularity="full")
        modules = tuple(_PARTS[flag] for flag in self.flags if flag in _PARTS)
        return RecomputeConfig(modules=modules) if modules else None

    @property
    def lora(self) -> LoraConfig:
        return dataclasses.replace(LORA, base_dtype=next((flag for flag in _BASE_DTYPES if flag in self.flags), None))


Step = Callable[[list[Batch]], float]


def build(run: TuneRun, device: torch.device, lora: LoraConfig | None) -> tuple[Step, int]:
    """A training step of the trunk in bf16, on micro-batches, and the number of trained parameters."""
    groups = ProcessGroups.single()
    model = GPTModel(run.architecture, groups, recompute=run.recompute, dtype=torch.bfloat16, device=device, seed=None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 or "norm" in name else parameter.normal_(std=0.02)
    if lora is not None:
        add_lora(model, lora, groups)
        quantize_base(model)
    sync = DistributedDataParallel(DistributedDataParallelConfig(gradient_accumulation_fusion=True), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=LR, weight_decay=0.0, clip_grad=1.0), sync, groups)

    def step(batches: list[Batch]) -> float:
        return train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=LR, groups=groups).loss

    return step, sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def write_corpora(folder: Path, vocab_size: int, seq_len: int, tokens: int) -> None:
    """Random ``tokens`` as documents in ``folder/text`` and, the same, as conversations in ``folder/chat``.

    Lengths are log-normal with a median of an eighth of ``seq_len``; the first third of a conversation has no loss.
    """
    generator = np.random.default_rng(0)
    lengths = np.exp(generator.normal(np.log(seq_len / 8), 0.8, size=16 * tokens // seq_len + 64)).astype(np.int64).clip(8, seq_len)
    dtype = token_dtype(vocab_size)
    with (
        IndexedDatasetBuilder(folder / "text.bin", dtype=dtype) as text,
        IndexedDatasetBuilder(folder / "chat.bin", dtype=dtype, multimodal=True) as chat,
    ):
        for length in lengths.tolist():
            ids = generator.integers(vocab_size, size=length)
            text.add_document(ids, [length])
            chat.add_document(ids, [length // 3, length - length // 3], [0, HAS_LOSS])
        text.finalize()
        chat.finalize()


def streams(run: TuneRun, folder: Path, device: torch.device, steps: int) -> dict[str, Iterator[list[Batch]]]:
    """The micro-batches of text and of conversations, as the application reads them."""
    write_corpora(folder, run.architecture.vocab_size, run.seq_len, 2 * steps * run.batch * run.seq_len)
    tokenizer = train_bpe(["text"], 320, folder)
    train = TrainConfig(
        steps=steps, seq_len=run.seq_len, micro_batch_size=run.micro_batch, global_batch_size=run.batch, eval_batches=1, eval_interval=0
    )
    result = {}
    for name, sft in (("text", None), ("chat", SFTConfig(data=("chat.jsonl",)))):
        data = DataConfig(prefix=str(folder / name), tokenizer=str(folder / "tokenizer.json"))
        config = RunConfig(model=run.architecture, train=train, data=data, sft=sft, output=str(folder / name))
        result[name] = step_batches(config, datasets(config, tokenizer)[0], ProcessGroups.single(), device)
    return result


def measure_sft(run: TuneRun, kind: str, warmup: int, steps: int, rounds: int, limit_gib: float) -> dict[str, Any]:
    """Text and conversations in turn, by one model; the ratio is the median over rounds."""
    del limit_gib
    device = device_of(kind)
    step, trained = build(run, device, None)
    times: dict[str, list[float]] = {"text": [], "chat": []}
    bounds: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        sources = streams(run, Path(folder), device, warmup + steps * rounds)
        losses = {name: [step(next(source)) for _ in range(warmup)] for name, source in sources.items()}
        for _ in range(rounds):
            for name, source in sources.items():
                begin = now(kind)
                for batches in itertools.islice(source, steps):
                    losses[name].append(step(batches))
                    if name == "chat":
                        bounds += [filled_of(batch) for batch in batches]
                times[name].append((now(kind) - begin) / steps)
    tokens = run.batch * run.seq_len
    ratio = [text / chat for text, chat in zip(times["text"], times["chat"], strict=True)]
    return {
        "trained_parameters": trained,
        "text_tokens_per_s": [round(tokens / seconds) for seconds in times["text"]],
        "chat_tokens_per_s": [round(tokens / seconds) for seconds in times["chat"]],
        "ratio": round(statistics.median(ratio), 4),
        "filled": round(sum(bounds) / (steps * rounds * tokens), 4),
        "first_loss": losses["chat"][0],
        "last_loss": losses["chat"][-1],
        **memory(kind),
    }


def filled_of(batch: Batch) -> int:
    """Tokens of a packed micro-batch that are no padding: they or their labels are not the 0 that fills a row."""
    return int(((batch.tokens != 0) | (batch.labels != 0)).sum())


def measure_adapters(run: TuneRun, kind: str, warmup: int, steps: int, rounds: int, limit_gib: float) -> dict[str, Any]:
    """Adapters, ours or PEFT's."""
    device = device_of(kind)
    if kind == "cuda":
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * 2**30 / torch.cuda.get_device_properties(device).total_memory))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(run.architecture.vocab_size, (run.batch, run.seq_len + 1), generator=generator).to(device)
    pieces = rows.split(run.micro_batch)
    if run.work == "peft":
        inputs = [piece[:, :-1].contiguous() for piece in pieces]
        choices = {"checkpoint": "ckpt" in run.flags, "compile_layers": "compile" in run.flags}
        step, trained = peft_step(run.architecture, LORA, inputs, device, lr=LR, **choices)
    else:
        ours, trained = build(run, device, run.lora)
        mask = torch.ones(run.micro_batch, run.seq_len, device=device)
        batches = [Batch(tokens=x[:, :-1].contiguous(), labels=x[:, 1:].contiguous(), loss_mask=mask) for x in pieces]
        step = functools.partial(ours, batches)
    losses = [step() for _ in range(warmup)]
    times = []
    for _ in range(rounds):
        begin = now(kind)
        losses += [step() for _ in range(steps)]
        times.append((now(kind) - begin) / steps)
    rates = [round(run.batch * run.seq_len / seconds) for seconds in times]
    facts = {"trained_parameters": trained, "tokens_per_s": round(statistics.median(rates)), "spread": [min(rates), max(rates)]}
    return {**facts, "first_loss": losses[0], "last_loss": losses[-1], **memory(kind)}


def device_of(kind: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")


def now(kind: str) -> float:
    """Seconds, when the device has done what it was given."""
    if kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def memory(kind: str) -> dict[str, float]:
    """Most that tensors took, and that the allocator held, so far."""
    if kind == "cpu":
        return {}
    taken, held = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_gib": round(taken / 2**30, 1), "peak_reserved_gib": round(held / 2**30, 1)}


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With each row of adapters' rate over the best one of PEFT on the same model."""
    best: dict[str, int] = {}
    for row in rows:
        if row["work"] == "peft" and "error" not in row:
            best[row["model"]] = max(best.get(row["model"], 0), row["tokens_per_s"])
    return [
        {**row, "ratio": round(row["tokens_per_s"] / best[row["model"]], 3)} if row["model"] in best and "tokens_per_s" in row else row
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for work in _WORDS:
        parser.add_argument(f"--{work}", nargs="+", default=[], type=functools.partial(TuneRun.parse, work=work), metavar="RUN")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before the clock starts")
    parser.add_argument("--steps", type=int, default=4, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=2, help="times that each is measured")
    parser.add_argument("--limit-gib", type=float, default=78.0, help="device memory for adapters (default: what an 80 GB device has left)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = {name: getattr(arguments, name) for name in ("warmup", "steps", "rounds", "limit_gib")}
    rows = []
    for run in [run for work in _WORDS for run in getattr(arguments, work)]:
        facts = {"work": run.work, "model": run.model, "micro_batch": run.micro_batch, "batch": run.batch, "flags": list(run.flags)}
        begin = time.time()
        try:
            measure = measure_sft if run.work == "sft" else measure_adapters
            (values,) = launch(measure, 1, device=kind, run=run, kind=kind, timeout_s=240.0, **lengths)
        except Exception as error:
            values = {"error": str(error)[-600:]}
        rows.append({**facts, **values, "wall_s": round(time.time() - begin, 1)})
        print(json.dumps(rows[-1]), flush=True)
    rows = with_ratios(rows)
    for row in rows:
        if "ratio" in row:
            print(f"{row['work']} {row['model']} mbs {row['micro_batch']} {','.join(row['flags'])}: ratio {row['ratio']}", flush=True)
    if arguments.output:
        record(arguments.output, {"work": "fine-tuning steps on random tokens", "rows": rows})


if __name__ == "__main__":
    main()
