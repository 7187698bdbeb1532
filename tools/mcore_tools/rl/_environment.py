# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The environment of a run."""

import importlib

from mcore_rl import NumberedProblems
from mcore_rl.envs import CharacterShare
from mcore_tools.recipes import RLConfig


def build_environment(config: RLConfig) -> NumberedProblems:
    """The environment that a run names.

    Raises:
        ValueError: there is no such module or name, or it is no environment.
    """
    if config.environment == "character_share":
        return CharacterShare(config.character_share.prompts, config.character_share.wanted)
    if config.environment in ("countdown", "arithmetic", "maths"):
        return getattr(config, config.environment).build()
    module, _, name = config.environment.partition(":")
    try:
        environment = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"rl.environment={config.environment!r} cannot be made: {error}; is its folder in PYTHONPATH?") from None
    if not isinstance(environment, NumberedProblems):
        raise ValueError(f"rl.environment={config.environment!r} is a {type(environment).__name__}; make it a mcore_rl.NumberedProblems")
    return environment
