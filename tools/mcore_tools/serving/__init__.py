# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines with the models of runs and of their exports."""

from mcore_tools.serving._engine import Served, build_engine, serve_exported
from mcore_tools.serving._expert_ranks import ExpertRanks, check_experts
from mcore_tools.serving._open import open_engine, open_served_tokenizer, served_experts, served_length
from mcore_tools.serving._ranks import EngineRanks, end_process
from mcore_tools.serving._replicas import Replicas, work_for
from mcore_tools.serving._speculation import speculating

__all__ = [
    "EngineRanks",
    "ExpertRanks",
    "Replicas",
    "Served",
    "build_engine",
    "check_experts",
    "end_process",
    "open_engine",
    "open_served_tokenizer",
    "serve_exported",
    "served_experts",
    "served_length",
    "speculating",
    "work_for",
]
