# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Train a recipe on one machine or many.

torchrun --nproc-per-node 8 -m tools.pretrain --recipe moe_tiny --set data.prefix=corpus --set data.tokenizer=tokenizer
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

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
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(minutes=10))
    try:
        trained = train_rank(config, kind)
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"validation loss {trained.validation_loss:.6f} after {trained.seconds:.0f} s; checkpoints under {config.output}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(prog="pretrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", required=True, help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="change a field, for instance plan.tp=2")
    arguments = parser.parse_args()
    try:
        pretrain(override(recipe(arguments.recipe), arguments.set))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
