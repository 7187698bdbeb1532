# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The whole journey: text, training on two ranks, a checkpoint, another layout, a served model, RL.

mcore quickstart [--text PATH] [--output FOLDER]
"""

import dataclasses
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mcore_ckpt import CheckpointManager
from mcore_ckpt.hf import export_checkpoint_hf
from mcore_parallel import ParallelPlan
from mcore_parallel.data import TokenizerError, train_bpe
from mcore_parallel.tensor_parallel import pad_vocab_size
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser, integer
from mcore_tools.corpus import check_text, default_text, prepare
from mcore_tools.exit_code import exit_code
from mcore_tools.launch import RankError, launch
from mcore_tools.recipes import RecipeError, RunConfig, add_fields_option, override, recipe
from mcore_tools.reports import Plot, Section, write_report
from mcore_tools.rl import post_train_rank
from mcore_tools.serving import serve_exported
from mcore_tools.torchrun import report_error
from mcore_tools.training import check_log, check_output, train_rank, validate_rank

T = TypeVar("T")

PROMPTS = ("def ", "import ", "class ", "    return ", "for i in ", "if __name__", "# The ", "self.")
WANTED = "aeiou"
# What a run leaves in its folder, and what the next one may therefore remove.
OURS = {
    *("checkpoints", "config.yaml", "data", "dumps", "hf", "index_cache", "profile", "report.html", "tensorboard", "tokenizer"),
    "train.jsonl",
}


class JourneyError(RuntimeError):
    """A stage whose result is not what it must be."""


class Stages:
    """Runs stages one after the other, says so, and keeps their times and facts."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.sections: list[Section] = []

    def run(
        self, title: str, work: Callable[[], T], facts: Callable[[T], list[tuple[str, str]]], text: Callable[[T], str] = lambda _: ""
    ) -> T:
        self.console.rule(f"[bold]{len(self.sections) + 1}. {title}", align="left")
        begin = time.perf_counter()
        result = work()
        section = Section(title=title, facts=[*facts(result), ("time", f"{time.perf_counter() - begin:.1f} s")], text=text(result))
        self.sections.append(section)
        return result


def quickstart(text: list[Path], output: Path, assignments: list[str], iterations: int, console: Console) -> None:
    """Walk the journey; everything it writes lies under ``output``.

    Raises:
        RecipeError, ValueError, OSError: what was asked for cannot be done; nothing was written or removed yet.
        RankError, JourneyError: a stage failed.
    """
    begin = time.perf_counter()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    ranks = min(2, torch.cuda.device_count()) if kind == "cuda" else 2
    if iterations < 3:
        raise ValueError(f"iterations={iterations} must be at least 3: the last third's reward is compared with the first third's")
    base = _configure(output, assignments, ranks)
    check_output(output, "--output")
    check_log(base.log)
    _check_vocabulary(base)
    check_text(text)
    _make_anew(output)
    stages = Stages(console)

    corpus = stages.run(
        "Text becomes tokens",
        lambda: prepare(text, output / "data", base.model.vocab_size, console),
        lambda corpus: [
            ("documents", f"{corpus.report.num_documents:,} ({corpus.report.documents_per_second:,.0f} a second)"),
            ("tokens", f"{corpus.report.num_tokens:,}"),
            ("vocabulary", f"{corpus.tokenizer.vocab_size:,}"),
        ],
    )
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, vocab_size=pad_vocab_size(corpus.tokenizer.vocab_size, ranks)),
        data=dataclasses.replace(base.data, prefix=corpus.prefix, tokenizer=str(output / "data" / "tokenizer")),
    )

    trained = stages.run(
        f"A mixture of experts trains with tp={ranks} x ep={ranks} on {ranks} {kind} ranks",
        lambda: launch(train_rank, ranks, device=kind, beats=True, config=config, kind=kind)[0],
        lambda trained: [
            ("parameters", f"{trained.num_parameters:,}"),
            ("loss, first step to last", f"{trained.history.curve('loss')[1][0]:.3f} to {trained.history.curve('loss')[1][-1]:.3f}"),
            ("validation loss", f"{trained.validation_loss:.6f}"),
            ("tokens/s, median step", f"{statistics.median(trained.history.curve('tokens_per_s')[1]):,.0f}"),
        ],
    )
    other = dataclasses.replace(config, plan=ParallelPlan(pp=ranks))
    reloaded = stages.run(
        f"The checkpoint loads in another layout, pp={ranks}",
        lambda: launch(validate_rank, ranks, device=kind, config=other, kind=kind)[0],
        lambda loss: [("validation loss", f"{loss:.6f}"), ("difference", f"{abs(loss - trained.validation_loss):.1e}")],
    )
    if not math.isclose(reloaded, trained.validation_loss, rel_tol=1e-4):
        raise JourneyError(
            f"validation loss {reloaded} after loading differs from {trained.validation_loss} before saving; leave --set train.dtype out, "
            f"as narrow numbers round by layout, or report this with {output / 'config.yaml'}"
        )

    export = output / "hf"
    checkpoints = CheckpointManager(output / "checkpoints")
    newest = checkpoints.latest()
    assert newest is not None
    stages.run(
        "The checkpoint becomes Hugging Face safetensors",
        lambda: _export(config, checkpoints.path(newest), export),
        lambda files: [("files", ", ".join(files))],
    )
    served = stages.run(
        "An engine serves it",
        lambda: serve_exported(config, export, corpus.tokenizer, PROMPTS, "cuda" if kind == "cuda" else "cpu"),
        lambda served: [("generated tokens/s", f"{served.tokens_per_s:,.0f}"), ("one HTTP completion", f"{served.http_ms:.0f} ms")],
        lambda served: "\n\n".join(prompt + answer for prompt, answer in served.texts[:4]),
    )
    console.print(f"[dim]over HTTP:[/dim] {escape(PROMPTS[0] + served.http_answer)}", highlight=False)

    reports = stages.run(
        f"Reinforcement: write more of {WANTED!r}",
        lambda: launch(
            post_train_rank, ranks, device=kind, config=config, kind=kind, prompts=PROMPTS, wanted=WANTED, iterations=iterations, lr=1e-3
        )[0],
        lambda reports: [
            ("reward, first iteration to last", f"{reports[0].mean_reward:.3f} to {reports[-1].mean_reward:.3f}"),
            ("answers", f"{sum(report.num_rollouts for report in reports):,}"),
            ("engine and trainer disagree by", f"{reports[0].train.metrics['logprob_mismatch']:.1e} in log-probability"),
        ],
    )
    third = max(1, iterations // 3)
    start, end = (sum(report.mean_reward for report in part) / third for part in (reports[:third], reports[-third:]))
    if end <= start:
        raise JourneyError(
            f"the reward did not rise: {start:.3f} over the first third of the iterations, {end:.3f} over the last; raise "
            f"--iterations, which is {iterations}, or leave --set out"
        )

    history = trained.history
    steps = [float(i + 1) for i in range(len(reports))]
    losses = {"training": history.curve("loss"), "validation": history.curve("eval/loss")}
    loads = {name.removeprefix("aux/load/"): history.curve(name) for name in history.names if name.startswith("aux/load/")}
    rewards = {"mean": (steps, [report.mean_reward for report in reports])}
    plots = [
        Plot(title="Loss", x_label="step", y_label="nats a token", curves=losses),
        Plot(title="Throughput", x_label="step", y_label="tokens/s", curves={"training": history.curve("tokens_per_s")}),
        Plot(title="Expert load", x_label="step", y_label="busiest over mean", curves=loads),
        Plot(title="Reward", x_label="iteration", y_label=f"share of {WANTED!r}", curves=rewards),
    ]
    write_report(output / "report.html", "From text to a model trained with RL", stages.sections, plots)
    _summary(stages.sections, output / "report.html", time.perf_counter() - begin, console)


def _configure(output: Path, assignments: list[str], ranks: int) -> RunConfig:
    """The recipe with the changes that the journey leaves to its user."""
    base = dataclasses.replace(recipe("moe_tiny"), output=str(output))
    config = override(base, assignments)
    compared = dataclasses.replace(config, data=dataclasses.replace(config.data, split=base.data.split))
    for name in ("plan", "data", "output"):
        if getattr(compared, name) != getattr(base, name):
            raise RecipeError(f"--set {name}: the journey chooses this itself; use --text and --output here, or `mcore train`")
    if config.moe is None:
        raise RecipeError("--set moe=none: the journey trains a mixture of experts; `mcore train --recipe gpt_tiny` trains a dense model")
    return dataclasses.replace(config, plan=ParallelPlan(tp=ranks, ep=ranks))


def _check_vocabulary(config: RunConfig) -> None:
    """That a tokenizer can have so few tokens."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            train_bpe(["a"], config.model.vocab_size, folder)
    except TokenizerError as error:
        raise RecipeError(f"--set model.{error}") from None


def _make_anew(output: Path) -> None:
    """An empty folder, unless what lies there is not ours to remove."""
    if output.is_dir() and (foreign := sorted({entry.name for entry in output.iterdir()} - OURS)):
        raise ValueError(f"--output {output} holds {', '.join(foreign[:3])}, which no quickstart wrote; name an empty or a new folder")
    if output.exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)


def _export(config: RunConfig, checkpoint: Path, export: Path) -> list[str]:
    assert config.moe is not None
    sizes: dict[str, Any] = dataclasses.asdict(config.model) | {
        "num_moe_experts": config.moe.num_moe_experts,
        "moe_router_topk": config.moe.moe_router_topk,
    }
    export_checkpoint_hf(checkpoint, export, family="mixtral", config=sizes)
    return sorted(file.name for file in export.iterdir())


def _summary(sections: list[Section], report: Path, seconds: float, console: Console) -> None:
    table = Table(title=f"The journey, {seconds:.0f} s", show_header=False, title_justify="left")
    for number, section in enumerate(sections, 1):
        table.add_section()
        table.add_row(f"[bold]{number}. {section.title}", "")
        for name, value in section.facts:
            table.add_row(f"   {name}", value)
    console.print(table)
    console.print(f"plots and texts: {escape(str(report))}", highlight=False, soft_wrap=True)


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("mcore quickstart", __doc__)
    parser.add_argument("--text", type=Path, help="file, folder or JSONL to learn from; default: the interpreter's standard library")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="folder that is made anew (default: %(default)s)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="PATH=VALUE", help="change a field of the recipe, for instance train.steps=50"
    )
    add_fields_option(parser, RunConfig)
    parser.add_argument("--iterations", type=integer(3), default=20, help="of RL (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        quickstart([options.text] if options.text else default_text(), options.output, options.set, options.iterations, console)
    except (ValueError, OSError, RankError, JourneyError) as error:
        report_error(str(getattr(error, "summary", None) or error))
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
