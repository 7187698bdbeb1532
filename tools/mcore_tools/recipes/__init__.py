# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Named runs: functions that return a typed configuration, and the one way to change a field of it."""

from mcore_tools.recipes._config import FSDPConfig, QKClipConfig, RunConfig
from mcore_tools.recipes._data import DataConfig, FIMConfig
from mcore_tools.recipes._fields import add_fields_option, config_of, list_fields
from mcore_tools.recipes._file import config_text, read_config, read_model_config, write_config
from mcore_tools.recipes._fit import KINDS, Kind, layouts_of, leanest, missing_layout, sized_run, usable_gib
from mcore_tools.recipes._load import LoadConfig
from mcore_tools.recipes._log import LogConfig
from mcore_tools.recipes._memory import RunMemory, run_memory
from mcore_tools.recipes._override import RecipeError, override
from mcore_tools.recipes._published import LAYOUTS, TUNING, Job
from mcore_tools.recipes._registry import RECIPES, layout, recipe
from mcore_tools.recipes._rl import CharacterShareConfig, CriticConfig, RLConfig, ServedConfig
from mcore_tools.recipes._sft import SFTConfig
from mcore_tools.recipes._train import TrainConfig
from mcore_tools.recipes._unread import check_assignments

__all__ = [
    "KINDS",
    "LAYOUTS",
    "RECIPES",
    "TUNING",
    "CharacterShareConfig",
    "CriticConfig",
    "DataConfig",
    "FIMConfig",
    "FSDPConfig",
    "Job",
    "Kind",
    "LoadConfig",
    "LogConfig",
    "QKClipConfig",
    "RLConfig",
    "RecipeError",
    "RunConfig",
    "RunMemory",
    "SFTConfig",
    "ServedConfig",
    "TrainConfig",
    "add_fields_option",
    "check_assignments",
    "config_of",
    "config_text",
    "layout",
    "layouts_of",
    "leanest",
    "list_fields",
    "missing_layout",
    "override",
    "read_config",
    "read_model_config",
    "recipe",
    "run_memory",
    "sized_run",
    "usable_gib",
    "write_config",
]
