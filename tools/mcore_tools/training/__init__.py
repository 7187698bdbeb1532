# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The training program: the world of a run, its data, where it begins, its loop, and the loops that learn from another model."""

from mcore_tools.training._data import check_data, open_tokenizer, validation_batches
from mcore_tools.training._start import RunCheckpoints, find_source, first_folder
from mcore_tools.training._stored import check_stored
from mcore_tools.training._successor import build_trainer, command, place, tell
from mcore_tools.training._train import Trained, run_assets, run_checkpoints, train_rank, validate_rank
from mcore_tools.training._world import connect, device_of, join, meet, take_device

__all__ = [
    "RunCheckpoints",
    "Trained",
    "build_trainer",
    "check_data",
    "check_stored",
    "command",
    "connect",
    "device_of",
    "find_source",
    "first_folder",
    "join",
    "meet",
    "open_tokenizer",
    "place",
    "run_assets",
    "run_checkpoints",
    "take_device",
    "tell",
    "train_rank",
    "validate_rank",
    "validation_batches",
]
