# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The training program: the world of a run, its folder, where it begins, its loop, and the loops that learn from another model."""

from mcore_tools.training._adapters import check_lora
from mcore_tools.training._begun_adapter import with_adapter
from mcore_tools.training._check import check_output, check_run, check_trained
from mcore_tools.training._conversion import stored_dtypes
from mcore_tools.training._export import describe_model, export_adapter, export_run
from mcore_tools.training._folder import check_log, open_folder, run_assets, run_checkpoints
from mcore_tools.training._instruments import Instruments, graph_remark
from mcore_tools.training._local import may_be_local
from mcore_tools.training._optimizer_description import describe_optimizer
from mcore_tools.training._origin import Origin, find_origin, trained_run, with_tokenizer
from mcore_tools.training._pretrained import HuggingFaceFolder, is_huggingface
from mcore_tools.training._start import RunCheckpoints, find_base, find_source, first_folder
from mcore_tools.training._stored import (
    RUN_FILE,
    absolute_place,
    check_stored,
    fill_model,
    open_weights,
    read_run,
    stored_model,
    weights_identity,
)
from mcore_tools.training._successor import build_trainer, check_taken, command, place, tell, trained_weights
from mcore_tools.training._train import Trained, train_rank, validate_rank
from mcore_tools.training._upcycling import check_origin
from mcore_tools.training._world import connect, device_of, join, meet, take_device

__all__ = [
    "RUN_FILE",
    "HuggingFaceFolder",
    "Instruments",
    "Origin",
    "RunCheckpoints",
    "Trained",
    "absolute_place",
    "build_trainer",
    "check_log",
    "check_lora",
    "check_origin",
    "check_output",
    "check_run",
    "check_stored",
    "check_taken",
    "check_trained",
    "command",
    "connect",
    "describe_model",
    "describe_optimizer",
    "device_of",
    "export_adapter",
    "export_run",
    "fill_model",
    "find_base",
    "find_origin",
    "find_source",
    "first_folder",
    "graph_remark",
    "is_huggingface",
    "join",
    "may_be_local",
    "meet",
    "open_folder",
    "open_weights",
    "place",
    "read_run",
    "run_assets",
    "run_checkpoints",
    "stored_dtypes",
    "stored_model",
    "take_device",
    "tell",
    "train_rank",
    "trained_run",
    "trained_weights",
    "validate_rank",
    "weights_identity",
    "with_adapter",
    "with_tokenizer",
]
