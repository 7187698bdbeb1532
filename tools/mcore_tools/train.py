# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Train a recipe on one machine or many; a run whose output folder holds checkpoints goes on from the newest.

torchrun --nproc-per-node 8 -m mcore_tools.train --recipe moe_tiny --set data.prefix=corpus --set data.tokenizer=tokenizer
mcore train --recipe gpt_tiny --set data.prefix=corpus --set data.tokenizer=tokenizer        # one process
mcore train --set load.path=Qwen3-0.6B --set data.prefix=corpus --set optimizer.lr=1e-5      # without a recipe: the model of these weights

Exit status: 0 the run came to its end; 1 it failed, 2 it was refused, and says why; 16 a result that these machines cannot judge, start it
again on others; 17 a result that others found to be the same, and that is no number; 75 a rank was stuck; 143 it was asked to stop
(SIGTERM, SIGINT, time limit) and saved, start it again to go on.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from mcore_ckpt import CheckpointingException
from mcore_parallel.guard import (
    Attempt,
    RankFailedError,
    RanksLostError,
    StallReport,
    Watchdog,
    exit_process,
    run_with_restarts,
)
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.training import (
    STOPPED_EXIT_CODE,
    InvalidResultError,
    NonFiniteLossError,
    StartupStamps,
    StopSignals,
    SuspectResultError,
)
from mcore_tools import STARTED_AT
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser, file
from mcore_tools.assembly import check_data
from mcore_tools.exit_code import FAILED, exit_code
from mcore_tools.launch import leave_world
from mcore_tools.recipes import (
    RECIPES,
    DataConfig,
    LoadConfig,
    RecipeError,
    RunConfig,
    TrainConfig,
    add_fields_option,
    config_text,
    override,
    read_config,
    recipe,
    write_config,
)
from mcore_tools.torchrun import report_error, tell_launcher
from mcore_tools.training import Trained, check_run, connect, find_origin, join, meet, take_device, train_rank, with_adapter

_LONGEST = 2048
"""Tokens of a sample, where neither a recipe nor the model says less."""

# What another attempt in the same processes would meet again.
FINAL = (ValueError, NonFiniteLossError, SuspectResultError, InvalidResultError)


def pretrain(config: RunConfig, main_entry: float | None = None) -> Trained:
    """Train on this rank of the world that torchrun, Slurm or nobody started; SIGTERM and SIGINT end it after a step, saved.

    Args:
        config: the run.
        main_entry: when the imports were done, in seconds since the epoch; None for now.
    """
    now = time.time()
    stamps = StartupStamps(program_start=STARTED_AT, main_entry=main_entry or now, pretrain_entry=now)
    check_data(config)
    check_run(config)
    kind = take_device()
    with StopSignals() as stop:
        if "WORLD_SIZE" in os.environ:
            trained = _in_world(config, kind, stop, stamps)
        else:
            trained = train_rank(config, kind, None, stop, stamps)
        if int(os.environ.get("RANK", "0")) == 0:
            stopped = f"stopped and saved after step {trained.stopped_at}; start it again to go on"
            result = f"validation loss {trained.validation_loss:.6f}" if trained.stopped_at is None else stopped
            for remark in trained.remarks:
                print(remark)
            print(f"{result} after {trained.seconds:.0f} s; checkpoints under {config.output}")
        return trained


def _in_world(config: RunConfig, kind: str, stop: StopSignals, stamps: StartupStamps) -> Trained:
    """Compare this process with the others, and train, again if a rank fails and ``restart`` says so."""
    if not config.restart.max_restarts:
        with join(config, kind) as watchdog:
            return train_rank(config, kind, watchdog, stop, stamps)
    store, rank, world_size = meet(config, kind)

    def work(attempt: Attempt) -> Trained:
        def stalled(report: StallReport) -> None:
            if report.is_author:
                try:
                    attempt.fail(report.text)
                except RuntimeError:
                    # The others are out of reach, so that this rank ends alone.
                    exit_process(report)

        watchdog = Watchdog(attempt.store, rank=rank, world_size=world_size, config=config.guard, on_stall=stalled)
        with watchdog:
            connect(config, kind, attempt.store, rank, world_size)
            trained = train_rank(config, kind, watchdog, stop, None if attempt.number else stamps)
            # After a failure the groups are aborted instead: what is under way in them would never end.
            leave_world()
            return trained

    return run_with_restarts(work, store, rank=rank, world_size=world_size, config=config.restart, final=FINAL)


@quiet_pipe
def main(
    arguments: Sequence[str] | None = None,
    *,
    prog: str = "mcore train",
    default_recipe: str | None = None,
    check: Callable[[RunConfig], RunConfig] = lambda config: config,
) -> int:
    """The command; ``check`` may refuse a run."""
    entry = time.time()
    parser = Parser(prog, __doc__)
    parser.add_argument("--recipe", help=f"one of: {', '.join(RECIPES)}" + (f" (default: {default_recipe})" if default_recipe else ""))
    parser.add_argument(
        "--config", metavar="FILE", type=file, help="YAML with fields of the run, and `recipe: NAME` or --recipe for the others"
    )
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, for instance plan.tp=2")
    add_fields_option(parser, RunConfig)
    parser.add_argument("--write-config", metavar="FILE", help="write the whole run as YAML (- for the terminal) and end")
    options = parser.parse_args(arguments)
    try:
        base = with_adapter(_chosen(options, default_recipe) or continued(options.set), options.set)
        config = check(override(base, options.set))
        if options.write_config == "-":
            print(config_text(config), end="")
        elif options.write_config:
            write_config(config, options.write_config)
        else:
            return run_to_end(config, entry)
    except (ValueError, OSError, CheckpointingException) as error:
        return refused(error)
    return 0


def run_to_end(config: RunConfig, main_entry: float | None = None) -> int:
    """Train, and say in one line why that was refused or failed; the exit code."""
    try:
        trained = pretrain(config, main_entry)
        if trained.stopped_at is None:
            return 0
        tell_launcher(f"no failure: stopped and saved after step {trained.stopped_at}; start it again to go on")
        return STOPPED_EXIT_CODE
    except (*FINAL, OSError, CheckpointingException, RankFailedError, RanksLostError) as error:
        return refused(error)
    except RuntimeError as error:
        # The watchdog notes which ranks a collective that broke was waiting for.
        gone = [note for note in getattr(error, "__notes__", ()) if note.startswith("rank ")]
        if not gone:
            raise
        report_error(f"{'; '.join(gone)}; start the run again to go on from its newest checkpoint", waits=False)
        return FAILED


def refused(error: Exception) -> int:
    """Print the error as one line; the exit code."""
    report_error(str(error), waits=not isinstance(error, RankFailedError | RanksLostError))
    return exit_code(error)


def continued(assignments: Sequence[str]) -> RunConfig:
    """The run that goes on pre-training the model of ``load.path``, whose other fields ``assignments`` may change.

    Raises:
        RecipeError: no folder on this machine is ``load.path`` among them.
        ValueError: the weights there do not say what model they are of.
        CheckpointingException: there are none.
    """
    values = {name.strip(): value.strip() for name, _, value in (assignment.partition("=") for assignment in assignments)}
    path = values.get("load.path", "")
    if not path or "://" in path:
        raise RecipeError(f"there is neither --recipe nor --config; recipes: {', '.join(RECIPES)}. Or --set load.path=FOLDER of weights")
    origin = find_origin(path)
    steps = values.get("train.steps", "")
    train = TrainConfig(
        seq_len=min(origin.longest or _LONGEST, _LONGEST),
        micro_batch_size=1,
        warmup_steps=(int(steps) if steps.isdigit() else TrainConfig().steps) // 20,
        dtype=origin.dtype,
    )
    data, load = DataConfig(tokenizer=origin.tokenizer_folder), LoadConfig(path=origin.path)
    optimizer = OptimizerConfig(lr=1e-5, min_lr=1e-6, clip_grad=1.0)
    return RunConfig(model=origin.model, moe=origin.moe, train=train, optimizer=optimizer, data=data, load=load)


def _chosen(options: argparse.Namespace, default_recipe: str | None) -> RunConfig | None:
    """The run of a file, of a recipe, or of a file that changes a recipe; None where none is named."""
    base = None if options.recipe is None else recipe(options.recipe)
    if options.config is not None:
        return read_config(options.config, base)
    return recipe(default_recipe) if base is None and default_recipe is not None else base


if __name__ == "__main__":
    sys.exit(main())
