# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines with the models of runs and of their exports."""

from mcore_tools.serving._api_servers import ApiServers, ApiServersError
from mcore_tools.serving._coordinated import CoordinatedEngines, coordinated, uses_coordinator
from mcore_tools.serving._engine import Served, build_engine, frozen_heap, serve_exported, short_turns
from mcore_tools.serving._engine_flags import add_engine_arguments, engine_execution, engine_option_names, engine_sizes
from mcore_tools.serving._files import Outcome, PromptFile, chat_encoder, continue_prompts, params_of
from mcore_tools.serving._hang import given_up_when_hung
from mcore_tools.serving._job import Job
from mcore_tools.serving._layout import EngineLayout
from mcore_tools.serving._loras import (
    LORA_OPTIONS,
    ONE_LORA,
    add_lora_argument,
    add_lora_arguments,
    check_lora_base,
    lora_address,
    lora_slots,
    read_lora,
    read_loras,
    settle_lora_slots,
    slots_for,
)
from mcore_tools.serving._open import (
    check_lora_slots,
    open_engine,
    open_served_tokenizer,
    served_address,
    served_length,
    served_model,
)
from mcore_tools.serving._ranks import PROGRAM, EngineRanks, end_process
from mcore_tools.serving._replicas import work_for
from mcore_tools.serving._sampling import (
    NUM_TOKENS,
    add_sampling_arguments,
    add_score_arguments,
    check_scores,
    sampling_names,
    sampling_params,
    sampling_settings,
)
from mcore_tools.serving._speculation import speculating

__all__ = [
    "LORA_OPTIONS",
    "NUM_TOKENS",
    "ONE_LORA",
    "PROGRAM",
    "ApiServers",
    "ApiServersError",
    "CoordinatedEngines",
    "EngineLayout",
    "EngineRanks",
    "Job",
    "Outcome",
    "PromptFile",
    "Served",
    "add_engine_arguments",
    "add_lora_argument",
    "add_lora_arguments",
    "add_sampling_arguments",
    "add_score_arguments",
    "build_engine",
    "chat_encoder",
    "check_lora_base",
    "check_lora_slots",
    "check_scores",
    "continue_prompts",
    "coordinated",
    "end_process",
    "engine_execution",
    "engine_option_names",
    "engine_sizes",
    "frozen_heap",
    "given_up_when_hung",
    "lora_address",
    "lora_slots",
    "open_engine",
    "open_served_tokenizer",
    "params_of",
    "read_lora",
    "read_loras",
    "sampling_names",
    "sampling_params",
    "sampling_settings",
    "serve_exported",
    "served_address",
    "served_length",
    "served_model",
    "settle_lora_slots",
    "short_turns",
    "slots_for",
    "speculating",
    "uses_coordinator",
    "work_for",
]
