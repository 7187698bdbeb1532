# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The environment of a run."""

import functools
import importlib

from mcore_rl import JudgeProcessError, NumberedAgent, ProcessJudge, WeightedMultiTask
from mcore_rl.envs import Calculator, CharacterShare
from mcore_tools.recipes import RLConfig


def build_environment(config: RLConfig) -> NumberedAgent:
    """The environment that a run names, or the mixture of several.

    Raises:
        ValueError: there is no such module or name, it is no environment, or the run has what it cannot do.
    """
    environments = [_build(config, name) for name in config.environments]
    weights = config.mixture_weights or [1.0] * len(environments)
    environment = WeightedMultiTask(environments, weights) if config.mixture else environments[0]
    if not config.mixture and environment.num_problems() < 1:
        raise ValueError(f"environment {environment.env_id!r} has no problems to train on; lower num_evaluation, or name another file")
    # A row to imitate is a text or a conversation, and a run makes rows of one kind.
    if config.imitation_steps > 0 and environment.holds_conversations and not all(environment.turn_limits.values()):
        raise ValueError(
            f"rl.imitation_steps is for single answers or for conversations, and environment {environment.env_id!r} has both; leave it out"
        )
    return environment


def _build(config: RLConfig, environment: str) -> NumberedAgent:
    if environment == "character_share":
        return CharacterShare(config.character_share.prompts, config.character_share.wanted)
    if environment == "calculator":
        return Calculator(config.arithmetic)
    if environment in ("countdown", "arithmetic", "maths", "code"):
        return getattr(config, environment).build()
    module, _, name = environment.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"rl.environment={environment!r} cannot be made: {error}; is its folder in PYTHONPATH?") from None
    if not isinstance(made, NumberedAgent):
        raise ValueError(
            f"rl.environment={environment!r} is a {type(made).__name__}; make it a mcore_rl.NumberedProblems, or NumberedConversations"
        )
    return made


def open_environment(config: RLConfig) -> NumberedAgent:
    """The environment of a rank that judges and replies: in processes of its own, where the run says so; ``close_environment`` ends them.

    Raises:
        ValueError: as of ``build_environment``; no process started.
    """
    if config.judges is None:
        return build_environment(config)
    try:
        return ProcessJudge(functools.partial(build_environment, config), config.judges)
    except JudgeProcessError as error:
        raise ValueError(f"rl.judges: {error}; correct it, or set rl.judges=none") from None


def close_environment(environment: NumberedAgent | None) -> None:
    """End the processes that judge, if there are some."""
    if isinstance(environment, ProcessJudge):
        environment.close()
