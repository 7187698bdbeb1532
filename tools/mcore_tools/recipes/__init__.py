# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Named runs: functions that return a typed configuration, and the one way to change a field of it."""

from mcore_tools.recipes._config import FSDPConfig, QKClipConfig, RunConfig
from mcore_tools.recipes._data import DataConfig, FIMConfig
from mcore_tools.recipes._fields import add_fields_option, config_of, list_fields
from mcore_tools.recipes._file import config_text, read_config, write_config
from mcore_tools.recipes._load import LoadConfig
from mcore_tools.recipes._log import LogConfig
from mcore_tools.recipes._override import RecipeError, override
from mcore_tools.recipes._published import LAYOUTS, TUNING, Job
from mcore_tools.recipes._registry import RECIPES, layout, recipe
from mcore_tools.recipes._rl import CharacterShareConfig, CriticConfig, RLConfig, ServedConfig
from mcore_tools.recipes._sft import SFTConfig
from mcore_tools.recipes._train import TrainConfig

__all__ = [
    "LAYOUTS",
    "RECIPES",
    "TUNING",
    "CharacterShareConfig",
    "CriticConfig",
    "DataConfig",
    "FIMConfig",
    "FSDPConfig",
    "Job",
    "LoadConfig",
    "LogConfig",
    "QKClipConfig",
    "RLConfig",
    "RecipeError",
    "RunConfig",
    "SFTConfig",
    "ServedConfig",
    "TrainConfig",
    "add_fields_option",
    "config_of",
    "config_text",
    "layout",
    "list_fields",
    "override",
    "read_config",
    "recipe",
    "write_config",
]
