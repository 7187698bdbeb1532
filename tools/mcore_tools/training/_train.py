# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each rank does to train, and to look at the same weights in another layout."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mcore_ckpt import CheckpointManager
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import quantize_base
from mcore_parallel.guard import Watchdog
from mcore_parallel.training import (
    Batch,
    Rerun,
    StartupStamps,
    SuspectResultError,
    TelemetrySpans,
    Trainer,
    TrainerConfig,
    evaluate,
    model_state,
)
from mcore_tools.assembly import assemble_run, build_model, build_stage, datasets, objective, open_tokenizer, validation_batches
from mcore_tools.exit_code import under_way
from mcore_tools.recipes import RunConfig
from mcore_tools.reports import History
from mcore_tools.training._adapters import AdapterCheckpoints, check_lora, describe_adapters
from mcore_tools.training._export import describe_model
from mcore_tools.training._folder import open_folder, run_checkpoints
from mcore_tools.training._instruments import Instruments, joined
from mcore_tools.training._local import NodeCheckpoints, may_be_local, open_local
from mcore_tools.training._noise import seeded
from mcore_tools.training._optimizer_description import describe_optimizer, describe_rates
from mcore_tools.training._start import RunCheckpoints, find_base, find_source, first_folder
from mcore_tools.training._upcycling import check_origin
from mcore_tools.training._world import device_of, reproducible


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
    with reproducible(config, kind):
        return _train_rank(config, kind, watchdog, stop, stamps)


def _train_rank(
    config: RunConfig, kind: str, watchdog: Watchdog | None, stop: Callable[[], bool] | None, stamps: StartupStamps | None
) -> Trained:
    # Where it begins, and that the weights there are of this model.
    own = run_checkpoints(config)
    check_lora(config, own)
    source = find_source(config.load, own, may_be_local=may_be_local(config)) if config.lora is None else find_base(config.load)
    origin = first_folder(config.load, own, source)
    upcycling = check_origin(config, origin, is_own=source is None)
    opened = open_local(config)
    begin = time.perf_counter()
    stop = config.train.stop_of(stop)

    # What it is made of.
    device = device_of(kind)
    run = assemble_run(config, device)
    parts, world = run.parts, run.parts.groups.world
    described = {**describe_model(config, origin), **describe_adapters(config, origin)}
    in_background = config.train.checkpoint_async_steps > 0
    if config.lora is None or source is None:
        described |= describe_optimizer(config)
        progress = partial(describe_rates, config)
        checkpoints = RunCheckpoints(
            config.load, own, source, parts.optimizer, described, progress=progress, asynchronous=in_background, upcycling=upcycling
        )
    else:
        checkpoints = AdapterCheckpoints(config.load, own, source, parts.optimizer, described, asynchronous=in_background)
    local = None
    if opened is not None:
        assert isinstance(checkpoints, RunCheckpoints), "RunConfig refuses lora with steps on the nodes"
        local = NodeCheckpoints(config, checkpoints, opened)

    # What is seen of it.
    instruments = Instruments.build(config, parts, device)
    history, writers = History(), []
    if world.is_first:
        writers = open_folder(config, history)

    def batches(consumed: int) -> Iterator[list[Batch]]:
        stream = seeded(config, run.batches(consumed), trainer.state.step)
        return stream if watchdog is None else watchdog.watch(stream, start=trainer.state.step + 1)

    trainer = Trainer(
        _trainer_config(config),
        parts.model,
        parts.sync,
        parts.optimizer,
        parts.objective,
        batches,
        run.rates,
        writers,
        local or checkpoints,
        save_local=None if local is None else local.keep,
        evaluation=run.validation,
        probe=joined(instruments.probe, _commits(config, own, lambda: trainer.state.step)),
        groups=parts.groups,
        pipeline=parts.pipeline,
        overlap=parts.overlap,
        stop=stop,
        rerun=Rerun(config.rerun, Path(config.output) / "rerun.json"),
        throughput=run.throughput,
        spans=TelemetrySpans(rank=world.rank) if config.log.telemetry else nullcontext,
        timers=instruments.timers,
        profile=instruments.profile,
        dumps=instruments.dumps,
    )
    try:
        with ExitStack() as unused:
            for writer in writers:
                unused.callback(writer.close)
            begun = trainer.resume().step
            if isinstance(checkpoints, AdapterCheckpoints):
                # The base weights are there, and never change.
                quantize_base(parts.model)
            if world.is_first:
                history.extend(Path(config.output) / "train.jsonl", begun)
            # From here on the trainer closes them.
            unused.pop_all()
        if world.is_first and (loaded := (local or checkpoints).loaded):
            print(f"goes on from {loaded}")
        if instruments.timers is not None and stamps is not None:
            instruments.timers.startup(stamps)
        with under_way():
            try:
                trainer.run()
            except SuspectResultError:
                # The state before the step was saved.
                own.wait()
                raise
            own.wait()
            if local is not None:
                local.clear()
            loss = float("nan")
            if not trainer.stopped:
                loss = evaluate(parts.model, run.validation(), parts.objective, groups=parts.groups).mean.item()
            remarks = instruments.remarks()
    finally:
        parts.close()
    return Trained.of(trainer, config, history, loss=loss, begin=begin, remarks=remarks)


def _commits(config: RunConfig, own: CheckpointManager, step: Callable[[], int]) -> Callable[[], dict[str, float]] | None:
    """Called after each step: commits what was saved so many steps ago, on all ranks at once; None where nothing is saved beside."""
    train = config.train
    every, later = train.checkpoint_interval or train.steps, train.checkpoint_async_steps
    if not later:
        return None

    def commit() -> dict[str, float]:
        if step() > later and (step() - later) % every == 0:
            own.wait()
        return {}

    return commit


def _trainer_config(config: RunConfig) -> TrainerConfig:
    """Lengths of the loop."""
    train = config.train
    return TrainerConfig(
        steps=train.steps,
        eval_every=train.eval_interval,
        save_every=train.checkpoint_interval or train.steps,
        save_local_every=train.local_checkpoint_interval,
        timers_every=config.log.timers_interval,
        per_layer_values=config.log.per_layer_values,
        max_skipped_steps=train.max_skipped_steps,
    )


def validate_rank(config: RunConfig, kind: str) -> float:
    """The validation loss of the newest checkpoint in the layout of ``config.plan``."""
    device = device_of(kind)
    groups = ProcessGroups.build(config.plan)
    model = build_stage(dataclasses.replace(config, train=dataclasses.replace(config.train, seed=0)), groups, device)
    CheckpointManager(Path(config.output) / "checkpoints").load(model_state(model, groups), strict=False)
    _, valid_set = datasets(config, open_tokenizer(config.data.tokenizer, config.model.vocab_size))
    return evaluate(model, validation_batches(config, valid_set, groups, device), objective(config), groups=groups).mean.item()
