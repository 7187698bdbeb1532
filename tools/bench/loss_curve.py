# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Loss curves of fp8 recipes beside the model's dtype, over real text.

python -m tools.bench.loss_curve --steps 500 --output docs/benchmarks/loss_curve.json

The text is the interpreter's standard library or ``--text``, cut by a byte-level tokenizer that learns it first. 95 % of the documents
train, the rest judges at the end. Every run begins with the same weights and reads the same batches in the same order; the first has no
recipe. Recipes are named as in ``tools.bench.dense_step``, words joined by commas: fp8=tensorwise,head. The difference is that of losses
averaged over ``--window`` steps, in parts of the first run's: at the end, and the largest one of the second half.

``--seeds N`` does all of that from N draws of the weights. Differences are then means over the draws, each to the first run from the same
weights, beside those of every draw. For the first run itself they are those of the other draws to the first one: what is smaller than that
is not the recipe's doing. A text that is read more than once shows how well a run remembers, too: "passes" says how often it was.

Each run is printed when it ends, and ``--output`` has all that there are by then: "rows" compares them, "runs" has their losses. A call
with the same ``--output`` goes on from there, with what of ``--runs`` and ``--seeds`` it lacks, so a long comparison fits in short calls:

python -m tools.bench.loss_curve --steps 500 --runs fp8=rowwise --output docs/benchmarks/loss_curve.json
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ProcessGroups
from mcore_parallel.data import HuggingFaceTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import pad_vocab_size
from mcore_parallel.training import CrossEntropyObjective, evaluate, train_step
from mcore_tools.assembly import DTYPES, datasets, schedule, step_batches
from mcore_tools.corpus import default_text, prepare
from mcore_tools.launch import launch
from mcore_tools.recipes import DataConfig, RunConfig, TrainConfig
from tools.bench._record import record
from tools.bench.dense_step import DenseRun

_MODELS = {
    "cuda": TransformerConfig(
        num_layers=12, hidden_size=1024, num_attention_heads=16, num_query_groups=4, ffn_hidden_size=4096, vocab_size=16384
    ),
    "cpu": TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=2, ffn_hidden_size=128, vocab_size=512),
}
"""About 0.2e9 parameters, and a model to try the script with."""


def configure(kind: str, steps: int, lr: float, folder: Path) -> RunConfig:
    """What all runs have in common."""
    sizes: dict[str, Any] = (
        {"seq_len": 1024, "micro_batch_size": 16, "dtype": "bfloat16"} if kind == "cuda" else {"seq_len": 64, "micro_batch_size": 4}
    )
    batch = sizes["micro_batch_size"]
    train = TrainConfig(**sizes, global_batch_size=batch, steps=steps, warmup_steps=max(1, steps // 20), eval_interval=0, eval_batches=8)
    optimizer = OptimizerConfig(lr=lr, min_lr=lr / 10, weight_decay=0.1, clip_grad=1.0, adam_beta2=0.95)
    return RunConfig(model=_MODELS[kind], train=train, optimizer=optimizer, output=str(folder))


_MIXTURES = {
    "cuda": MoEConfig(num_moe_experts=32, moe_router_topk=4, moe_ffn_hidden_size=512, moe_aux_loss_coeff=0.01),
    "cpu": MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_aux_loss_coeff=0.01),
}
"""Instead of the dense feed-forward with ``--experts``."""


def curve(config: RunConfig, kind: str, words: str, draw: int, experts: bool) -> dict[str, Any]:
    """One run on this rank, from that draw of the weights."""
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    groups, train = ProcessGroups.single(), config.train
    backend = DenseRun.parse(f"tiny:{words}").completed("torch", "none").backend()
    options: dict[str, Any] = {"feed_forward": moe_feed_forward(_MIXTURES[kind])} if experts else {}
    options |= {"dtype": DTYPES[train.dtype], "device": device, "seed": train.seed + draw}
    model = GPTModel(config.model, groups, backend=backend, **options)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(config.optimizer, sync, groups)
    learn, judge = datasets(config, HuggingFaceTokenizer(config.data.tokenizer))
    batches, rates, objective = step_batches(config, learn, groups, device), schedule(config), CrossEntropyObjective()
    losses, begin = [], time.perf_counter()
    for step in range(train.steps):
        losses.append(train_step(model, next(batches), objective, sync, optimizer, lr=rates.lr(step)).loss)
    seconds = time.perf_counter() - begin
    held = [
        batch for _, some in zip(range(train.eval_batches), step_batches(config, judge, groups, device), strict=False) for batch in some
    ]
    report = evaluate(model, held, objective)
    sync.close()
    validation = (report.sum / report.count).item()
    name, rounded = words or train.dtype, [round(loss, 5) for loss in losses]
    return {"run": name, "draw": draw, "seconds": round(seconds, 1), "validation_loss": validation, "losses": rounded}


def compared(runs: Sequence[Mapping[str, Any]], window: int) -> list[dict[str, Any]]:
    """Each run, without its losses, and its differences to the first, in parts of that one's loss."""
    smooth = [[statistics.fmean(run["losses"][at : at + window]) for at in range(len(run["losses"]) - window + 1)] for run in runs]
    plain, out = smooth[0], []
    for run, means in zip(runs, smooth, strict=True):
        apart = [(mine - theirs) / theirs for mine, theirs in zip(means, plain, strict=True)]
        validation = run["validation_loss"] / runs[0]["validation_loss"] - 1
        second_half = max(apart[len(apart) // 2 :], key=abs)
        differences = {"difference_at_end": apart[-1], "largest_difference": second_half, "validation_difference": validation}
        shown = {name: value for name, value in run.items() if name not in ("losses", "draw")}
        out.append({**shown, "loss_at_end": means[-1], **differences})
    return out


_DIFFERENCES = ("difference_at_end", "largest_difference", "validation_difference")


def over_draws(draws: Sequence[Sequence[Mapping[str, Any]]], window: int) -> list[dict[str, Any]]:
    """The rows of ``compared`` with the means of their differences over draws of the weights, and the differences of each draw.

    Args:
        draws: the runs of each.
        window: as there.
    """
    each = [compared(runs, window) for runs in draws]
    plain = compared([runs[0] for runs in draws], window)
    rows = []
    for index, row in enumerate(each[0]):
        others = plain[1:] if index == 0 else [mine[index] for mine in each]
        differences = {name: [other[name] for other in others] for name in _DIFFERENCES}
        means = {name: statistics.fmean(values) if index else 0.0 for name, values in differences.items()}
        rows.append({**row, **means, "draws": differences} if len(draws) > 1 else row)
    return rows


def rows_of(runs: Sequence[Mapping[str, Any]], window: int) -> list[dict[str, Any]]:
    """A row for each name among runs, of the draws that have it.

    Args:
        runs: of each draw the one without a recipe first.
        window: as of ``compared``.
    """
    draws: dict[int, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        draws.setdefault(run["draw"], {})[run["run"]] = run
    plain, *others = dict.fromkeys(run["run"] for run in runs)
    pairs = {name: [(draw[plain], draw[name]) for draw in draws.values() if name in draw] for name in others}
    return [over_draws([[draw[plain]] for draw in draws.values()], window)[0], *(over_draws(each, window)[1] for each in pairs.values())]


def finished(path: Path | None, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs that a file has already.

    Raises:
        SystemExit: the file is of other work.
    """
    if path is None or not path.exists():
        return []
    before = json.loads(path.read_text(encoding="ascii"))
    for name, value in facts.items():
        if before.get(name) != value:
            raise SystemExit(f"--output {path} is of {name}={before.get(name)!r}, this call of {value!r}; name another file, or remove it")
    return before["runs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["fp8=tensorwise", "fp8=tensorwise,head"], help="beside the one without a recipe")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--window", type=int, default=25)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--seeds", type=int, default=1, help="draws of the weights")
    parser.add_argument("--experts", action="store_true", help="32 experts, 4 a token, instead of the dense feed-forward")
    parser.add_argument("--text", type=Path, nargs="+", help="files or folders; default: the standard library")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        raise SystemExit(f"--seeds {arguments.seeds} must be at least 1")
    if not 1 <= arguments.window <= arguments.steps:
        raise SystemExit(f"--window {arguments.window} must lie between 1 and --steps {arguments.steps}")
    for words in arguments.runs:
        DenseRun.parse(f"tiny:{words}").check()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    with TemporaryDirectory() as name:
        folder = Path(name)
        config = configure(kind, arguments.steps, arguments.lr, folder)
        corpus = prepare(arguments.text or default_text(), folder / "data", config.model.vocab_size, Console(stderr=True))
        # Sixteens for the units.
        padded = pad_vocab_size(corpus.tokenizer.vocab_size, 1)
        data = DataConfig(prefix=corpus.prefix, tokenizer=str(folder / "data" / "tokenizer"))
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=padded), data=data)
        train = config.train
        text = "the standard library" if arguments.text is None else ", ".join(path.name for path in arguments.text)
        facts: dict[str, Any] = {"work": f"loss curves on {text}", "device": torch.cuda.get_device_name() if kind == "cuda" else kind}
        passes = train.steps * train.global_batch_size * train.seq_len / (0.95 * corpus.report.num_tokens)
        facts |= {"tokens": corpus.report.num_tokens, "passes": round(passes, 2), "sequence": train.seq_len}
        facts |= {"global_batch": train.global_batch_size, "steps": train.steps, "lr": arguments.lr}
        facts |= {"experts": arguments.experts, "window": arguments.window}
        runs = finished(arguments.output, facts)
        done = {(run["draw"], run["run"]) for run in runs}
        for draw in range(arguments.seeds):
            for words in ("", *arguments.runs):
                if (draw, words or train.dtype) in done:
                    continue
                common = {"config": config, "kind": kind, "experts": arguments.experts}
                runs.append(launch(curve, 1, device=kind, words=words, draw=draw, **common)[0])
                rows = rows_of(runs, arguments.window)
                print(json.dumps({"draw": draw, **next(row for row in rows if row["run"] == runs[-1]["run"])}), flush=True)
                if arguments.output:
                    record(arguments.output, {**facts, "rows": rows, "runs": runs})


if __name__ == "__main__":
    main()
