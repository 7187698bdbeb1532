# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each rank does to train, and to look at the same weights in another layout."""

import dataclasses
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_ckpt import CheckpointManager
from mcore_ckpt.hf import tokenizer_files
from mcore_moe import pop_expert_load
from mcore_parallel import ProcessGroups
from mcore_parallel.comm import all_reduce
from mcore_parallel.data_parallel import DistributedDataParallel
from mcore_parallel.guard import Watchdog
from mcore_parallel.training import (
    JsonLinesWriter,
    ProfileWindow,
    Rerun,
    RichProgress,
    StartupStamps,
    StepDumps,
    StragglerProbe,
    TelemetrySpans,
    TensorBoardWriter,
    Timers,
    Trainer,
    TrainerConfig,
    WandbWriter,
    Writer,
    evaluate,
    model_state,
)
from mcore_tools.assembly import Parts, assemble, build_model, build_stage, datasets, objective, schedule, step_batches, throughput
from mcore_tools.recipes import RunConfig, config_text
from mcore_tools.reports import History, LiveReport
from mcore_tools.training._data import open_tokenizer, validation_batches
from mcore_tools.training._start import RunCheckpoints, find_source, first_folder
from mcore_tools.training._stored import RUN_FILE, check_stored
from mcore_tools.training._world import device_of


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What training left behind; the history is on the first rank only."""

    history: History
    validation_loss: float
    seconds: float
    num_parameters: int
    stopped_at: int | None = None
    """The step after which the run ended because it was asked to; None when it came to its end."""
    remarks: tuple[str, ...] = ()
    """What this rank's profiler and graphs have to say."""

    @classmethod
    def of(
        cls, trainer: Trainer, config: RunConfig, history: History, *, loss: float, begin: float, remarks: tuple[str, ...] = ()
    ) -> "Trained":
        """Of a run that ended now and began at ``begin`` of ``time.perf_counter``."""
        counted = sum(parameter.numel() for parameter in build_model(config, ProcessGroups.single(), "meta").parameters())
        return cls(
            history=history,
            validation_loss=loss,
            seconds=time.perf_counter() - begin,
            num_parameters=counted,
            stopped_at=trainer.state.step if trainer.stopped else None,
            remarks=remarks,
        )


def train_rank(
    config: RunConfig,
    kind: str,
    watchdog: Watchdog | None = None,
    stop: Callable[[], bool] | None = None,
    stamps: StartupStamps | None = None,
) -> Trained:
    """Train from the newest checkpoint under ``config.output`` or as ``config.load`` says, validate and save, on this rank of the world.

    A run that ``stop`` ends (asked before each step; one rank is enough) saves and is not validated: its loss is NaN. With ``stamps`` and
    timers the line of the first step also tells how long the start took.

    Raises:
        ValueError: there is nothing to begin with, or it is of another model; nothing was written.
    """
    own = run_checkpoints(config)
    source = find_source(config.load, own)
    check_stored(config, first_folder(config.load, own, source))
    device = device_of(kind)
    begin = time.perf_counter()
    train, output = config.train, Path(config.output)
    parts = assemble(config, device)
    train_set, valid_set = datasets(config, open_tokenizer(config.data.tokenizer, config.model.vocab_size))
    world = parts.groups.world
    timers = Timers(group=world, device=device) if config.log.timers_interval else None
    tracing = dataclasses.replace(config.profile, output=str(output / config.profile.output))
    profile = tracing.build(rank=world.rank, model=parts.model)
    checkpoints = RunCheckpoints(config.load, own, source, parts.optimizer)
    history, writers = History(), []
    if parts.groups.world.is_first:
        history = History.read(output / "train.jsonl", own.latest() or 0)
        writers = _writers(config, history)

    def data(consumed: int):
        stream = step_batches(config, train_set, parts.groups, device, consumed, train.batch_sizes())
        return stream if watchdog is None else watchdog.watch(stream, start=trainer.state.step + 1)

    limit_s = 60 * train.stop_after_minutes

    def stop_requested() -> bool:
        return (stop is not None and stop()) or bool(limit_s and time.perf_counter() - begin > limit_s)

    trainer = Trainer(
        TrainerConfig(
            steps=train.steps,
            eval_every=train.eval_interval,
            save_every=train.checkpoint_interval or train.steps,
            timers_every=config.log.timers_interval,
            max_skipped_steps=train.max_skipped_steps,
        ),
        parts.model,
        parts.sync,
        parts.optimizer,
        parts.objective,
        data,
        schedule(config),
        writers,
        checkpoints,
        evaluation=lambda: validation_batches(config, valid_set, parts.groups, device),
        probe=_probe(config, parts, device),
        groups=parts.groups,
        pipeline=parts.pipeline,
        overlap=parts.overlap,
        stop=stop_requested,
        rerun=Rerun(config.rerun, output / "rerun.json"),
        throughput=throughput(config, device),
        spans=TelemetrySpans(rank=world.rank) if config.log.telemetry else nullcontext,
        timers=timers,
        profile=profile,
        dumps=_dumps(config, parts),
    )
    try:
        with ExitStack() as unused:
            for writer in writers:
                unused.callback(writer.close)
            trainer.resume()
            # From here on the trainer closes them.
            unused.pop_all()
        if world.is_first and checkpoints.loaded:
            print(f"goes on from {checkpoints.loaded}")
        if timers is not None and stamps is not None:
            timers.startup(stamps)
        trainer.run()
        loss = float("nan")
        if not trainer.stopped:
            validation = evaluate(
                parts.model, validation_batches(config, valid_set, parts.groups, device), parts.objective, groups=parts.groups
            )
            loss = validation.mean.item()
        remarks = _remarks(parts, profile)
    finally:
        parts.close()
    return Trained.of(trainer, config, history, loss=loss, begin=begin, remarks=remarks)


def _dumps(config: RunConfig, parts: Parts) -> StepDumps | None:
    """What is written down of some steps; None for nothing."""
    if not config.dumps.every:
        return None
    assert isinstance(parts.sync, DistributedDataParallel), "RunConfig refuses dumps of fsdp"
    placed = dataclasses.replace(config.dumps, output=str(Path(config.output) / config.dumps.output))
    return placed.build(parts.model, parts.groups, parts.sync)


def _remarks(parts: Parts, profile: ProfileWindow) -> tuple[str, ...]:
    remarks = [str(profile.communication)] if profile.communication else []
    remarks += [f"profile: {path}" for path in profile.files]
    if parts.graphs is not None:
        report = parts.graphs.report()
        eager = ", ".join(f"{count} {reason}" for reason, count in report.eager.items()) or "none"
        remarks.append(
            f"cuda graphs: {report.graphs} captured, {report.replays} replays, {report.memory_bytes / 2**20:.0f} MiB; eager calls: {eager}"
        )
    return tuple(remarks)


def _writers(config: RunConfig, history: History) -> list[Writer]:
    """Where the numbers go, and beside them what the run was told; on the first rank."""
    output, log = Path(config.output), config.log
    output.mkdir(parents=True, exist_ok=True)
    text = config_text(config)
    (output / "config.yaml").write_text(text, encoding="utf-8")
    _keep_tokenizer(Path(config.data.tokenizer), output / "tokenizer")
    writers: list[Writer] = [RichProgress(config.train.steps), JsonLinesWriter(output / "train.jsonl")]
    if log.tensorboard:
        writers.append(TensorBoardWriter(output / "tensorboard"))
    if log.wandb_project:
        name = output / "wandb_run"
        if not name.exists():
            name.write_text(secrets.token_hex(4), encoding="ascii")
        shown = dataclasses.asdict(config)
        writers.append(WandbWriter(log.wandb_project, output, run_id=name.read_text(encoding="ascii"), config=shown))
    writers.append(LiveReport(output / "report.html", output.name, config.train.steps, text, history) if log.html else history)
    return writers


def run_checkpoints(config: RunConfig) -> CheckpointManager:
    """Where a run saves: as many steps as it is told to keep, each with its assets."""
    keep, every = config.train.checkpoints_kept or None, config.train.checkpoint_keep_interval or None
    return CheckpointManager(Path(config.output) / "checkpoints", keep=keep, keep_every=every, assets=run_assets(config))


def run_assets(config: RunConfig) -> dict[str, Path | bytes]:
    """What each checkpoint of a run keeps beside its tensors: the tokenizer's files, and the whole run as ``run.yaml``."""
    return {**tokenizer_files(config.data.tokenizer), RUN_FILE: config_text(config).encode()}


def _keep_tokenizer(source: Path, folder: Path) -> None:
    """Put the tokenizer's files beside the checkpoints, so that the run's folder is all that a model needs."""
    files = [path for path in source.iterdir() if path.is_file()] if source.is_dir() else [source]
    folder.mkdir(exist_ok=True)
    for path in files:
        if path.resolve() != (folder / path.name).resolve():
            shutil.copyfile(path, folder / path.name)


def _probe(config: RunConfig, parts: Parts, device: torch.device) -> Callable[[], dict[str, float]]:
    """Further numbers of each step: load of the experts, the slowest rank."""
    every = config.log.straggler_interval
    stragglers = StragglerProbe(parts.model, parts.groups, every=every) if every else None

    def probe() -> dict[str, float]:
        values = {} if stragglers is None else stragglers()
        if config.moe is None:
            return values
        load = sum(pop_expert_load(parts.model).values(), start=torch.zeros(1, dtype=torch.int64, device=device))
        share = all_reduce(load, parts.groups.world).double()
        return {**values, **{f"expert_{number}_share": value for number, value in enumerate((share / share.sum()).tolist())}}

    return probe


def validate_rank(config: RunConfig, kind: str) -> float:
    """The validation loss of the newest checkpoint in the layout of ``config.plan``."""
    device = device_of(kind)
    groups = ProcessGroups.build(config.plan)
    model = build_stage(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=0)), groups, device)
    CheckpointManager(Path(config.output) / "checkpoints").load(model_state(model, groups), strict=False)
    _, valid_set = datasets(config, open_tokenizer(config.data.tokenizer, config.model.vocab_size))
    return evaluate(model, validation_batches(config, valid_set, groups, device), objective(config), groups=groups).mean.item()
