# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Post-train a model with RL: an engine draws answers, an environment judges them, the policy learns from groups of them.

mcore rl --recipe countdown_tiny                                    # random weights, two CPU cores
mcore rl path/to/Qwen3-0.6B --set rl.environment=countdown --set train.steps=200
torchrun --nproc-per-node 8 -m mcore_tools.reinforce runs/tuned --set rl.num_groups=64 --set plan.dp=8

MODEL is a Hugging Face folder, a checkpoint, or the folder of a run; without one the weights are random, or those of load.path. A step is
an iteration: train.steps of them, each with rl.num_groups problems and rl.group_size answers to each. The same command goes on where it was
stopped.

Exit status: as of `mcore train`.
"""

import argparse
import dataclasses
import math
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from mcore_ckpt import CheckpointingException, CheckpointManager
from mcore_parallel.data import train_bpe
from mcore_parallel.guard import RankFailedError, RanksLostError
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.training import STOPPED_EXIT_CODE, StopSignals
from mcore_rl import GenericGenerationArgs
from mcore_tools._quiet_pipe import quiet_pipe
from mcore_tools.arguments import Parser, file
from mcore_tools.assembly import removed_if_refused
from mcore_tools.recipes import (
    RECIPES,
    RecipeError,
    RLConfig,
    RunConfig,
    TrainConfig,
    add_fields_option,
    check_assignments,
    config_text,
    layout,
    override,
    read_config,
    recipe,
    write_config,
)
from mcore_tools.rl import (
    Reinforced,
    build_environment,
    check_tokenizer,
    open_policy_tokenizer,
    reference_weights,
    reinforce_rank,
    teacher_run,
    texts,
)
from mcore_tools.sft import keep_tokenizer, wait_for
from mcore_tools.torchrun import tell_launcher
from mcore_tools.train import FINAL, refused
from mcore_tools.training import (
    check_run,
    check_stored,
    find_origin,
    find_source,
    first_folder,
    join,
    take_device,
)

_NUM_TEXTS, _LONGEST = 512, 1024


def base_config(config: RunConfig | None, model: str) -> RunConfig:
    """The run of a recipe, or one with defaults, with the model that it begins with.

    Args:
        config: the recipe, or what a file says; None for defaults.
        model: a Hugging Face folder, a checkpoint, or the folder of a run; empty for the recipe's own.

    Raises:
        ValueError: neither is given, a recipe that learns from texts, or weights that do not say what model they are of.
        CheckpointingException: there are no weights.
    """
    if config is not None and config.rl is None:
        raise RecipeError(f"this recipe learns from texts, not from rewards; train it, and name its folder as MODEL. {_recipes()}")
    if not model:
        if config is None:
            raise RecipeError(f"there is neither MODEL nor --recipe nor --config. {_recipes()}")
        return config
    origin = find_origin(model)
    if config is None:
        longest = min(origin.longest or _LONGEST, _LONGEST)
        config = RunConfig(
            model=origin.model,
            moe=origin.moe,
            rl=RLConfig(generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=longest // 2)),
            train=TrainConfig(
                seq_len=longest,
                global_batch_size=64,
                warmup_steps=0,
                lr_schedule="constant",
                eval_interval=10,
                checkpoint_interval=10,
            ),
            optimizer=OptimizerConfig(lr=1e-6, weight_decay=0.0, clip_grad=1.0),
            output="runs/rl",
        )
    return dataclasses.replace(
        config,
        model=origin.model,
        moe=origin.moe,
        train=dataclasses.replace(config.train, dtype=origin.dtype),
        data=dataclasses.replace(config.data, tokenizer=origin.tokenizer),
        load=dataclasses.replace(config.load, path=origin.path),
    )


def _recipes() -> str:
    return f"Recipes that learn from rewards: {', '.join(name for name, make in RECIPES.items() if make().rl)}"


def prepared(config: RunConfig, rank: int) -> RunConfig:
    """``config`` with a tokenizer: its own, that of the checkpoint it begins with, or one that is learnt from the environment's texts.

    Args:
        config: the run.
        rank: of this process; the first one writes.
    """
    rl = config.rl
    assert rl is not None
    if config.data.tokenizer:
        return config
    folder = Path(config.output) / "base"
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=str(folder)))
    if config.load.path:
        keep_tokenizer(config, rank)
    elif not folder.exists() and rank == 0:
        partial = folder.with_name("base.partial")
        shutil.rmtree(partial, ignore_errors=True)
        train_bpe(texts(build_environment(rl), _NUM_TEXTS), config.model.vocab_size, partial)
        os.replace(partial, folder)
    wait_for(folder)
    return config


def reinforce(config: RunConfig) -> int:
    """Run on this rank of the world that torchrun, Slurm or nobody started; the exit code. SIGTERM and SIGINT end it after an iteration,
    saved."""
    kind, rank = take_device(config), int(os.environ.get("RANK", "0"))
    with StopSignals() as stop:
        if "WORLD_SIZE" in os.environ:
            with join(config, kind) as watchdog:
                done = reinforce_rank(config, kind, watchdog, stop)
        else:
            done = reinforce_rank(config, kind, None, stop)
    if rank == 0 and not done.num_iterations:
        print(f"nothing is left to do: all train.steps={config.train.steps} are made; checkpoints under {config.output}")
    elif rank == 0:
        for remark in done.remarks:
            print(remark)
        print(f"{_result(done)} after {done.seconds:.0f} s; checkpoints under {config.output}")
    if done.stopped_at is None:
        return 0
    tell_launcher(f"no failure: {_result(done)}")
    return STOPPED_EXIT_CODE


def _result(done: Reinforced) -> str:
    numbers = "trained on pairs" if math.isnan(done.reward) else f"reward {done.reward:.4f}"
    return numbers if done.stopped_at is None else f"stopped and saved after step {done.stopped_at}; start it again to go on"


@quiet_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = Parser("mcore rl", __doc__)
    parser.add_argument("model", nargs="?", default="", help="Hugging Face folder, checkpoint, or folder of a run")
    parser.add_argument("--recipe", help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument(
        "--config", metavar="FILE", type=file, help="YAML with fields of the run, and `recipe: NAME` or --recipe for the others"
    )
    parser.add_argument(
        "--layout", metavar="RECIPE@GPUS", help="the layout for so many GPUs of a published size, such as llama3_8b@8; --set changes it"
    )
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, for instance rl.group_size=16")
    add_fields_option(parser, RunConfig)
    parser.add_argument("--write-config", metavar="FILE", help="write the whole run as YAML (- for the terminal) and end")
    options = parser.parse_args(arguments)
    try:
        placed = layout(options.layout, "rl") if options.layout else ()
        config = override(base_config(_chosen(options), options.model), [*placed, *options.set])
        if config.rl is None:
            raise RecipeError("rl=none has nothing to learn from; leave it out, or start the run with `mcore train`")
        check_assignments(config.rl, options.set)
        if options.write_config == "-":
            print(config_text(config), end="")
        elif options.write_config:
            write_config(config, options.write_config)
        else:
            # Before anything is written.
            check_run(config)
            environment = build_environment(config.rl) if config.rl.needs_engine else None
            if environment is None and not (config.data.tokenizer or config.load.path):
                raise RecipeError("rl.dpo.path has pairs for a model that can read; name it as MODEL, or set data.tokenizer")
            if config.rl.teacher:
                teacher_run(config)
            own = CheckpointManager(Path(config.output) / "checkpoints")
            source = find_source(config.load, own)
            check_stored(config, first_folder(config.load, own, source), is_own=source is None)
            rl, begins = config.rl, own.latest() is None
            if rl.reference and begins:
                reference_weights(config)
            with removed_if_refused(config.output):
                config = prepared(config, int(os.environ.get("RANK", "0")))
                tokenizer = open_policy_tokenizer(config, environment)
                if rl.teacher:
                    check_tokenizer("rl.teacher", rl.teacher, tokenizer)
                if rl.reference and begins:
                    check_tokenizer("rl.reference", rl.reference, tokenizer)
            return reinforce(config)
    except (*FINAL, OSError, RuntimeError, CheckpointingException, RankFailedError, RanksLostError) as error:
        return refused(error)
    return 0


def _chosen(options: argparse.Namespace) -> RunConfig | None:
    """The run of a file, of a recipe, or of a file that changes a recipe."""
    base = None if options.recipe is None else recipe(options.recipe)
    return base if options.config is None else read_config(options.config, base)


if __name__ == "__main__":
    sys.exit(main())
