# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl`` on the recipe ``countdown_tiny``, smaller still: its settings, command line and numbers."""

import json
from pathlib import Path
from typing import Any

from mcore_ckpt import CheckpointManager
from mcore_ckpt.manifest import read_manifest

SIZES = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_attention_heads=2",
    "model.num_query_groups=2",
    "model.ffn_hidden_size=64",
)
PACE = (
    "rl.num_groups=2",
    "rl.group_size=4",
    "rl.num_epochs=1",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
    "train.eval_batches=1",
)
QUIET = ("log.tensorboard=false", "log.html=false")


def countdown_words(*changes: str) -> list[str]:
    """The recipe with changed fields, as arguments."""
    return ["--recipe", "countdown_tiny", *(word for change in changes for word in ("--set", change))]


def num_taken(output: Path, step: int) -> list[int]:
    """Problems, or pairs, that each rank had taken by a checkpoint, from the first on."""
    problems = read_manifest(CheckpointManager(output / "checkpoints").folder(step)).extra["rl"]["problems"]
    assert problems["first"] == 0 and not problems["left"]
    return problems["num_taken"]


def rows(output: Path) -> list[dict[str, Any]]:
    """What a run wrote of its iterations."""
    return [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
