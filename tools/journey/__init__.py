# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The stages of the journey from text to a reinforced model."""

from tools.journey._live import History, LiveReport
from tools.journey._plot import Plot
from tools.journey._reinforce import reinforce_rank
from tools.journey._report import Section, write_report
from tools.journey._serve import Served, build_engine, serve_exported
from tools.journey._text import Corpus, check_text, default_text, prepare
from tools.journey._train import Trained, train_rank, validate_rank

__all__ = [
    "Corpus",
    "History",
    "LiveReport",
    "Plot",
    "Section",
    "Served",
    "Trained",
    "build_engine",
    "check_text",
    "default_text",
    "prepare",
    "reinforce_rank",
    "serve_exported",
    "train_rank",
    "validate_rank",
    "write_report",
]
