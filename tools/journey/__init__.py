# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The stages of the journey from text to a reinforced model."""

from tools.journey._history import History
from tools.journey._live import LiveReport
from tools.journey._plot import Plot
from tools.journey._reinforce import reinforce_rank
from tools.journey._report import Section, write_report
from tools.journey._serve import Served, build_engine, serve_exported
from tools.journey._start import first_folder
from tools.journey._stored import check_stored
from tools.journey._text import Corpus, check_text, default_text, prepare
from tools.journey._train import (
    Trained,
    device_of,
    open_tokenizer,
    run_assets,
    run_checkpoints,
    train_rank,
    validate_rank,
    validation_batches,
)

__all__ = [
    "Corpus",
    "History",
    "LiveReport",
    "Plot",
    "Section",
    "Served",
    "Trained",
    "build_engine",
    "check_stored",
    "check_text",
    "default_text",
    "device_of",
    "first_folder",
    "open_tokenizer",
    "prepare",
    "reinforce_rank",
    "run_assets",
    "run_checkpoints",
    "serve_exported",
    "train_rank",
    "validate_rank",
    "validation_batches",
    "write_report",
]
