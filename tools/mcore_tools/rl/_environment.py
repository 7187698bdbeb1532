# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The environment of a run."""

import functools
import importlib

from mcore_rl import JudgeProcessError, NumberedProblems, ProcessJudge, WeightedMultiTask
from mcore_rl.envs import CharacterShare
from mcore_tools.recipes import RLConfig


def build_environment(config: RLConfig) -> NumberedProblems:
    """The environment that a run names, or the mixture of several.

    Raises:
        ValueError: there is no such module or name, or it is no environment.
    """
    environments = [_build(config, name) for name in config.environments]
    return WeightedMultiTask(environments, config.mixture_weights or [1.0] * len(environments)) if config.mixture else environments[0]


def _build(config: RLConfig, environment: str) -> NumberedProblems:
    if environment == "character_share":
        return CharacterShare(config.character_share.prompts, config.character_share.wanted)
    if environment in ("countdown", "arithmetic", "maths", "code"):
        return getattr(config, environment).build()
    module, _, name = environment.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"rl.environment={environment!r} cannot be made: {error}; is its folder in PYTHONPATH?") from None
    if not isinstance(made, NumberedProblems):
        raise ValueError(f"rl.environment={environment!r} is a {type(made).__name__}; make it a mcore_rl.NumberedProblems")
    return made


def open_environment(config: RLConfig) -> NumberedProblems:
    """The environment of a rank that judges: in processes of its own, where the run says so; ``close_environment`` ends them.

    Raises:
        ValueError: as of ``build_environment``; no process started.
    """
    if config.judges is None:
        return build_environment(config)
    try:
        return ProcessJudge(functools.partial(build_environment, config), config.judges)
    except JudgeProcessError as error:
        raise ValueError(f"rl.judges: {error}; correct it, or set rl.judges=none") from None


def close_environment(environment: NumberedProblems | None) -> None:
    """End the processes that judge, if there are some."""
    if isinstance(environment, ProcessJudge):
        environment.close()
