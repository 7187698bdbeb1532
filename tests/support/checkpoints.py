# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A checkpoint that is small enough to be served in a test."""

from pathlib import Path

from mcore_ckpt import CheckpointManager
from mcore_parallel import ProcessGroups
from mcore_parallel.data import train_bpe
from mcore_parallel.training import model_state
from mcore_tools.assembly import build_model
from mcore_tools.recipes import override, recipe
from mcore_tools.training import run_assets


def tiny_checkpoint(folder: Path, text: str, name: str = "gpt_tiny", *changes: str) -> Path:
    """Two layers with random weights, and a tokenizer that has learnt from the text; of a recipe with changes."""
    train_bpe([text * 20], 290, folder / "words")
    sizes = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.seq_len=48")
    config = override(recipe(name), [*sizes, "train.dtype=float32", f"data.tokenizer={folder / 'words'}", *changes])
    manager = CheckpointManager(folder / "checkpoints", assets=run_assets(config))
    manager.save(1, model_state(build_model(config, ProcessGroups.single(), "cpu"), ProcessGroups.single()))
    return folder / "checkpoints"
