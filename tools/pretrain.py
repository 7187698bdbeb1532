# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Train a recipe on one machine or many; a run whose output folder holds checkpoints goes on from the newest.

torchrun --nproc-per-node 8 -m tools.pretrain --recipe moe_tiny --set data.prefix=corpus --set data.tokenizer=tokenizer
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from mcore_ckpt import CheckpointingException
from mcore_parallel.guard import Watchdog, preflight
from mcore_parallel.training import NonFiniteLossError
from tools.journey import train_rank
from tools.recipes import RECIPES, RunConfig, override, recipe


def pretrain(config: RunConfig) -> None:
    """Train on this rank of the world that torchrun, Slurm or nobody started."""
    for name in ("prefix", "tokenizer"):
        if not getattr(config.data, name):
            raise ValueError(f"data.{name} is empty; make the corpus with mcore-preprocess and pass --set data.{name}=PATH")
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if kind == "cuda":
        torch.cuda.set_device(local)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(_join(config, kind)) if "WORLD_SIZE" in os.environ else None
        trained = train_rank(config, kind, watchdog)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"validation loss {trained.validation_loss:.6f} after {trained.seconds:.0f} s; checkpoints under {config.output}")


@contextlib.contextmanager
def _join(config: RunConfig, kind: str) -> Iterator[Watchdog]:
    """The world of this process: compared with the others, connected, and watched."""
    patience_s = config.guard.stall_timeout_s
    # Read by torch when the first group is made; what the user set stays.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    store, rank, world_size = next(rendezvous("env://"))
    preflight({"run": config}, store, rank=rank, world_size=world_size, timeout_s=patience_s)
    with config.guard.build(store, rank=rank, world_size=world_size) as watchdog:
        # The watchdog speaks before the backend ends the process.
        limit = timedelta(seconds=2 * patience_s)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        try:
            yield watchdog
        finally:
            dist.destroy_process_group()


def main(default_recipe: str | None = None, check: Callable[[RunConfig], RunConfig] = lambda config: config) -> int:
    """The command; ``check`` may refuse a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=default_recipe is None, default=default_recipe, help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, for instance plan.tp=2")
    arguments = parser.parse_args()
    try:
        pretrain(check(override(recipe(arguments.recipe), arguments.set)))
    except (ValueError, OSError, CheckpointingException, NonFiniteLossError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
