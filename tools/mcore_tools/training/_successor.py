# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the commands have in common that train a model by another one, which is trained already."""

import argparse
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from torch import nn

from mcore_ckpt import CheckpointingException, CheckpointManager
from mcore_ckpt.storage import Folder
from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.guard import Watchdog
from mcore_parallel.optim import MegatronOptimizer
from mcore_parallel.pipeline import Schedule
from mcore_parallel.training import (
    Batch,
    NonFiniteLossError,
    Objective,
    Trainer,
    TrainerConfig,
    Writer,
)
from mcore_tools.assembly import check_data, schedule
from mcore_tools.exit_code import exit_code
from mcore_tools.recipes import LoadConfig, RunConfig, add_fields_option, override
from mcore_tools.reports import History
from mcore_tools.torchrun import report_error
from mcore_tools.training._check import check_run
from mcore_tools.training._folder import run_checkpoints, run_writers
from mcore_tools.training._noise import seeded
from mcore_tools.training._pretrained import HuggingFaceFolder
from mcore_tools.training._start import find_base, first_folder
from mcore_tools.training._stored import check_stored, open_weights
from mcore_tools.training._world import join, reproducible, take_device

C = TypeVar("C")


def build_trainer(
    run: RunConfig,
    model: nn.Module,
    groups: ProcessGroups,
    objective: Objective,
    data: Callable[[int], Iterator[Sequence[Batch]]],
    validation: Callable[[], Sequence[Batch]],
    *,
    history: History | None = None,
    pipeline: Schedule | None = None,
    watchdog: Watchdog | None = None,
    stop: Callable[[], bool] | None = None,
) -> Trainer:
    """The loop around a model with ddp, with the lengths and folders of its run; ``history`` gets the numbers of the first rank."""
    if named := [*(["lora"] if run.lora is not None else []), *(["ddp"] if run.ddp is not None else []), *run.fields_of_train]:
        raise ValueError(f"{named[0]} is for `mcore train` and `mcore sft`; leave it at its default")
    stop = run.train.stop_of(stop)
    checkpoints = run_checkpoints(run)
    check_stored(run, first_folder(run.load, checkpoints), is_own=True)
    slices = run.optimizer.use_distributed_optimizer
    sync = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=slices), model, groups)
    train = run.train
    outputs: list[Writer] = []
    if groups.world.is_first:
        history = history or History()
        history.extend(Path(run.output) / "train.jsonl", checkpoints.latest() or 0)
        outputs = run_writers(run, history)

    def watched(consumed: int) -> Iterator[Sequence[Batch]]:
        stream = seeded(run, data(consumed), trainer.state.step)
        yield from stream if watchdog is None else watchdog.watch(stream, start=trainer.state.step + 1)

    trainer = Trainer(
        TrainerConfig(
            steps=train.steps,
            eval_every=train.eval_interval,
            save_every=train.checkpoint_interval or train.steps,
            max_skipped_steps=train.max_skipped_steps,
        ),
        model,
        sync,
        MegatronOptimizer(run.optimizer, sync, groups),
        objective,
        watched,
        schedule(run),
        outputs,
        checkpoints,
        evaluation=validation,
        groups=groups,
        pipeline=pipeline,
        stop=stop,
    )
    return trainer


@contextlib.contextmanager
def place(run: RunConfig, field: str) -> Iterator[tuple[str, Watchdog | None]]:
    """This rank's kind of device, and the watchdog of the world that torchrun or Slurm started; None without one.

    Args:
        run: has the corpus, and says whether torch's algorithms are deterministic meanwhile.
        field: that holds it in the command's config.
    """
    check_data(run, f"{field}.")
    check_run(run, f"{field}.")
    if dataclasses.replace(run.load, override=()) != LoadConfig():
        raise ValueError(f"{field}.load.path={run.load.path!r} is for `mcore train` only; leave {field}.load at its defaults")
    kind = take_device()
    with join(run, kind) if "WORLD_SIZE" in os.environ else contextlib.nullcontext() as watchdog, reproducible(run, kind):
        yield kind, watchdog


def check_taken(name: str, run: RunConfig) -> None:
    """Refuse fields that say how a run goes on, where only its weights are taken; ``name`` holds it.

    Raises:
        ValueError: names the field.
    """
    if run.lora is not None:
        raise ValueError(
            f"{name}.lora is set, and a {name} has no adapters; name an export into which they are merged, and set {name}.lora=none"
        )
    for field in ("take", "upcycle", "adapter", "required"):
        value, default = getattr(run.load, field), getattr(LoadConfig(), field)
        if value != default:
            shown, plain = (str(entry).lower() if isinstance(entry, bool) else entry for entry in (value, default))
            raise ValueError(
                f"{name}.load.{field}={shown} is for a run that trains these weights, and a {name} only computes with them; "
                f"set {name}.load.{field}={plain}"
            )


def trained_weights(name: str, run: RunConfig) -> Folder | HuggingFaceFolder:
    """The weights of a run whose model another one takes, a teacher's or a target's: what ``load`` names, else its newest step.

    Raises:
        ValueError: ``load.step`` is not there, or they are of another model than the run says; names each field, of ``name``, with both
            values.
        CheckpointingException: there are none.
    """
    try:
        if run.load.step is None:
            taken = open_weights(run.load.path or Path(run.output) / "checkpoints")
        else:
            source = find_base(run.load)
            assert isinstance(source, CheckpointManager), "only a folder of steps has the step"
            taken = source.folder(run.load.step)
        check_stored(run, taken)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return taken


def tell(message: str) -> None:
    """On the first rank."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(message)


def command(
    parser: argparse.ArgumentParser,
    field: str,
    kind: type[C],
    config: Callable[[argparse.Namespace], C],
    work: Callable[[argparse.Namespace, C], int],
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse, change the config by ``--set`` and work; the exit code.

    Args:
        parser: further arguments.
        field: shown as an example of what may be set.
        kind: of the config.
        config: before it is changed.
        work: gives the exit code.
        arguments: None for the process's own.
    """
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help=f"change a field, for instance {field}.plan.tp=2")
    add_fields_option(parser, kind)
    options = parser.parse_args(arguments)
    try:
        return work(options, override(config(options), options.set))
    except (ValueError, OSError, ImportError, CheckpointingException, NonFiniteLossError) as error:
        report_error(str(error))
        return exit_code(error)
