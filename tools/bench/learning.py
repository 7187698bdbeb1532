# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Learning on real text: validation loss and time of our trainer, and of transformers' Llama in a plain loop on the same tokens.

python -m tools.bench.learning --tokens 20e6 --output docs/benchmarks/learning.json
python -m tools.bench.learning --memory-slope --output docs/benchmarks/memory_slope.json

The text is the interpreter's standard library, in a byte-level BPE that is learnt first. Both begin with the same weights and see the same
sequences in the same order, in micro-batches of the same size, with one schedule; both are validated on the same sequences at the same
steps, outside the time. The plain loop keeps float32 weights under bfloat16 autocast and steps by torch's fused AdamW. Without a GPU a
tiny model in float32 goes through the same code. ``--memory-slope`` trains a small model and tells how its memory grows with the steps.
"""

import argparse
import dataclasses
import json
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_ckpt import CheckpointManager
from mcore_ckpt.hf import export_checkpoint_hf
from mcore_parallel import ProcessGroups
from mcore_parallel.models import TransformerConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.tensor_parallel import pad_vocab_size
from mcore_parallel.training import Batch, JsonLinesWriter, Trainer, TrainerConfig, model_state
from mcore_tools.assembly import assemble, build_model, datasets, schedule, step_batches
from mcore_tools.corpus import Corpus, default_text, prepare
from mcore_tools.recipes import DataConfig, LogConfig, RunConfig, TrainConfig
from mcore_tools.training import train_rank
from tools.bench._record import record

PEERS = ("eager", "compiled")
TINY_TEXT = "email"
"""Package of the standard library that is enough for a try without a GPU."""


def run_config(corpus: Corpus, folder: Path, tokens: float, *, tiny: bool) -> RunConfig:
    """The run of both: 100 million parameters on a GPU, a tiny model without."""
    layers, hidden, heads, ffn = (2, 64, 4, 128) if tiny else (12, 768, 12, 2048)
    seq_len, micro, batch = (64, 4, 8) if tiny else (1024, 16, 64)
    steps = max(2, round(tokens / (batch * seq_len)))
    return RunConfig(
        model=TransformerConfig(
            num_layers=layers,
            hidden_size=hidden,
            num_attention_heads=heads,
            num_query_groups=heads // 2,
            ffn_hidden_size=ffn,
            vocab_size=pad_vocab_size(corpus.tokenizer.vocab_size, 1),
        ),
        train=TrainConfig(
            steps=steps,
            seq_len=seq_len,
            micro_batch_size=micro,
            global_batch_size=batch,
            warmup_steps=steps // 10,
            eval_interval=max(1, steps // 5),
            eval_batches=2,
            dtype="float32" if tiny else "bfloat16",
        ),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.95),
        data=DataConfig(prefix=corpus.prefix, tokenizer=str(folder / "tokenizer"), split="95,5,0"),
        log=LogConfig(tensorboard=False, html=False),
        cuda_graphs=() if tiny else ("layers.*",),
        output=str(folder / "run"),
    )


def ours(config: RunConfig, kind: str) -> dict[str, Any]:
    """By ``train_rank``, as ``mcore_tools.train`` runs it."""
    trained = train_rank(config, kind)
    with (Path(config.output) / "train.jsonl").open(encoding="ascii") as lines:
        rows = [json.loads(line) for line in lines]
    validation = {row["step"]: row["eval/loss"] for row in rows if "eval/loss" in row}
    print("\n".join(trained.remarks), flush=True)
    return _row("mcore", config, [row["step_s"] for row in rows], [row["loss"] for row in rows], validation) | {
        "validation_loss": trained.validation_loss
    }


def peer(config: RunConfig, device: torch.device, weights: Path, corpus: Corpus, *, compiled: bool) -> dict[str, Any]:
    """The same weights in transformers' Llama, the same tokens, a plain loop."""
    from transformers import LlamaForCausalLM

    loaded: Any = LlamaForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="sdpa")
    model: Any = loaded.to(device)
    model.train()
    rule, rates = config.optimizer, schedule(config)
    wide = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    narrow = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": wide, "weight_decay": rule.weight_decay}, {"params": narrow, "weight_decay": 0.0}],
        betas=(rule.adam_beta1, rule.adam_beta2),
        eps=rule.adam_eps,
        fused=device.type == "cuda",
    )
    run: Any = torch.compile(model) if compiled else model
    groups = ProcessGroups.single()
    train_set, valid_set = datasets(config, corpus.tokenizer)
    seconds, losses, validation = [], [], {}
    stream = step_batches(config, train_set, groups, device)
    for step in range(1, config.train.steps + 1):
        begin = time.perf_counter()
        batches = next(stream)
        count = torch.stack([batch.loss_mask.sum() for batch in batches]).sum()
        total = torch.zeros((), device=device)
        for batch in batches:
            loss = _loss(run, batch, config) / count
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), rule.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = rates.lr(step - 1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total.item())
        seconds.append(time.perf_counter() - begin)
        if step % config.train.eval_interval == 0:
            validation[step] = _validate(run, config, valid_set, device)
    row = _row(f"transformers {PEERS[compiled]}", config, seconds, losses, validation)
    return row | {"validation_loss": _validate(run, config, valid_set, device)}


def _loss(model: Any, batch: Batch, config: RunConfig) -> Tensor:
    """Summed over the tokens that count."""
    tokens = batch.tokens
    mixed: AbstractContextManager[object] = torch.autocast(tokens.device.type, torch.bfloat16)
    with mixed if config.train.dtype == "bfloat16" else nullcontext():
        logits = model(input_ids=tokens, use_cache=False).logits
    each = F.cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), reduction="none")
    return (each * batch.loss_mask.flatten()).sum()


@torch.no_grad()
def _validate(model: Any, config: RunConfig, dataset: Any, device: torch.device) -> float:
    model.eval()
    stream = step_batches(config, dataset, ProcessGroups.single(), device)
    batches = [batch for _, step in zip(range(config.train.eval_batches), stream, strict=False) for batch in step]
    total = sum(_loss(model, batch, config).item() for batch in batches)
    model.train()
    return total / sum(batch.loss_mask.sum().item() for batch in batches)


def _row(
    name: str, config: RunConfig, seconds: Sequence[float], losses: Sequence[float], validation: Mapping[int, float]
) -> dict[str, Any]:
    tokens = config.train.global_batch_size * config.train.seq_len
    median = statistics.median(seconds)
    return {
        "name": name,
        "tokens": tokens * len(seconds),
        "seconds": round(sum(seconds), 3),
        "first_step_s": round(seconds[0], 3),
        "median_step_ms": round(median * 1e3, 3),
        "tokens_per_s": round(tokens / median),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "validation_by_tokens": {step * tokens: loss for step, loss in validation.items()},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else 0.0,
    }


def export_start(config: RunConfig, folder: Path) -> Path:
    """The weights with which the run begins, as transformers reads them."""
    model = build_model(config, ProcessGroups.single(), "cpu")
    checkpoints = CheckpointManager(folder / "start")
    checkpoints.save(0, model_state(model, model.groups))
    export_checkpoint_hf(checkpoints.path(0), folder / "hf", family="llama", config=dataclasses.asdict(config.model))
    return folder / "hf"


def compare(corpus: Corpus, folder: Path, tokens: float, peers: Sequence[str]) -> dict[str, Any]:
    """A row for each way to train, and how they stand to one another."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    config = run_config(corpus, folder, tokens, tiny=not cuda)
    weights = export_start(config, folder)
    rows = []
    for way in ("mcore", *peers):
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if way == "mcore":
            rows.append(ours(config, device.type))
        else:
            rows.append(peer(config, device, weights, corpus, compiled=way == "compiled"))
        base = rows[0]
        rows[-1] |= {
            "loss_less_mcore": rows[-1]["validation_loss"] / base["validation_loss"] - 1.0,
            "seconds_by_mcore": round(rows[-1]["seconds"] / base["seconds"], 3),
        }
        print(json.dumps(rows[-1]), flush=True)
    sizes = {name: getattr(config.model, name) for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")}
    sizes |= {"ffn_hidden_size": config.model.ffn_size, "vocab_size": config.model.vocab_size}
    batch = {"seq_len": config.train.seq_len, "micro_batch": config.train.micro_batch_size, "batch": config.train.global_batch_size}
    text = {"documents": corpus.report.num_documents, "tokens": corpus.report.num_tokens}
    return {"work": "a language model learns the standard library", "model": sizes, "train": batch, "text": text, "rows": rows}


class MemorySamples:
    """Memory of this process and of its device after every n-th step; a writer like the others."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.resident: list[int] = []
        self.device: list[int] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        if step % self.every:
            return
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
        # Without mapped files: of the corpus more and more pages are known, which is no growth.
        self.resident.append((resident - shared) * resource.getpagesize())
        self.device.append(torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)

    def close(self) -> None:
        pass


def slope(samples: Sequence[float], every: int = 1) -> dict[str, float]:
    """Bytes a step by least squares over the last four fifths, their standard error, and the growth from the first to the last of them.

    Args:
        samples: of every n-th step.
        every: n.
    """
    settled = samples[len(samples) // 5 :]
    line = statistics.linear_regression(range(len(settled)), settled)
    rest = [value - line.intercept - line.slope * step for step, value in enumerate(settled)]
    spread = math.sqrt(sum(value * value for value in rest) / max(1, len(settled) - 2))
    error = spread / (statistics.pstdev(range(len(settled))) * math.sqrt(len(settled)))
    return {
        "bytes_a_step": round(line.slope / every, 2),
        "standard_error": round(error / every, 2),
        "growth_bytes": settled[-1] - settled[0],
    }


def memory_slope(corpus: Corpus, folder: Path, steps: int) -> dict[str, Any]:
    """How the memory of a small run grows."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    tiny = run_config(corpus, folder, 0, tiny=True)
    config = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, steps=steps, dtype="bfloat16" if cuda else "float32"))
    parts = assemble(config, device)
    train_set, _ = datasets(config, corpus.tokenizer)
    # Few enough that the samples themselves do not count.
    samples = MemorySamples(max(1, steps // 100))
    trainer = Trainer(
        TrainerConfig(steps=steps),
        parts.model,
        parts.sync,
        parts.optimizer,
        parts.objective,
        lambda consumed: step_batches(config, train_set, parts.groups, device, consumed),
        schedule(config),
        [JsonLinesWriter(folder / "slope.jsonl"), samples],
        groups=parts.groups,
    )
    trainer.run()
    slopes = {"steps": steps, "resident": slope(samples.resident, samples.every), "device": slope(samples.device, samples.every)}
    print(json.dumps(slopes), flush=True)
    return {"work": "memory over the steps of a small run", **slopes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--tokens", type=float, default=20e6 if cuda else 20e3, help="to train on, each way (default: %(default)g)")
    parser.add_argument("--vocab", type=int, default=16384 if cuda else 512)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["eager"], help="ways to run transformers (default: eager)")
    parser.add_argument("--memory-slope", action="store_true")
    parser.add_argument("--steps", type=int, default=1000, help="of --memory-slope (default: %(default)s)")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = default_text() if cuda else [path for path in default_text() if path.name == TINY_TEXT]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = prepare(text, folder, arguments.vocab, Console(file=sys.stderr))
        if arguments.memory_slope:
            results = memory_slope(corpus, folder, arguments.steps)
        else:
            results = compare(corpus, folder, arguments.tokens, arguments.peers)
    if arguments.output:
        record(arguments.output, results)


if __name__ == "__main__":
    main()
