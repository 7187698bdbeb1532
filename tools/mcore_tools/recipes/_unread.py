# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fields of ``rl`` that recipes set for what another run may leave out; a run that sets one which nothing reads is refused."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from mcore_tools.recipes._override import RecipeError
from mcore_tools.recipes._rl import RLConfig

_OF_ENGINES = ("cache_gb", "max_requests")
_OF_IMITATION = ("imitation_tries", "imitation_lr", "imitation_lr_schedule")
_READERS = {"countdown": frozenset({"countdown"}), "arithmetic": frozenset({"arithmetic", "calculator"})}
"""Parts of ``rl`` by the environments that read them."""


def check_assignments(rl: RLConfig, assignments: Sequence[str]) -> None:
    """Whether something reads what a run sets.

    Args:
        rl: with the assignments.
        assignments: ``path=value``, as of `override`.

    Raises:
        RecipeError: nothing reads one of them.
    """
    unread = _unread(rl)
    for assignment in assignments:
        if reason := unread.get(assignment.partition("=")[0].strip()):
            raise RecipeError(f"--set {assignment}: it has no effect {reason}, or leave it out")


def _unread(rl: RLConfig) -> dict[str, str]:
    """Fields off their defaults that nothing reads, by path, and why."""
    found: dict[str, str] = {}
    for name, readers in _READERS.items():
        own = getattr(rl, name)
        if not rl.needs_engine:
            reason = "beside rl.dpo.path, which has no environment; set rl.dpo.beta without a path"
        elif not readers.intersection(rl.environments):
            reason = f"on {', '.join(rl.environments)}; set rl.environment={name}"
        else:
            continue
        unset = type(own)()
        changed = (item.name for item in dataclasses.fields(own) if getattr(own, item.name) != getattr(unset, item.name))
        found |= {f"rl.{name}.{field}": reason for field in changed}
    for reason, names in _beside(rl):
        found |= dict.fromkeys((f"rl.{name}" for name in names if _is_changed(rl, name)), reason)
    if not rl.imitation_steps:
        changed = (name for name in _OF_IMITATION if getattr(rl, name) != getattr(RLConfig, name))
        found |= dict.fromkeys((f"rl.{name}" for name in changed), "without imitation; set rl.imitation_steps")
    return found


def _beside(rl: RLConfig) -> list[tuple[str, Sequence[str]]]:
    """Why nothing reads fields beside others that are set, and those fields."""
    found: list[tuple[str, Sequence[str]]] = []
    if not rl.needs_engine:
        sampling = (f"generation_args.{item.name}" for item in dataclasses.fields(rl.generation_args) if item.name != "max_tokens")
        names = ("environment", "mixture", "mixture_weights", "group_size", *_OF_ENGINES, *sampling)
        found.append(("beside rl.dpo.path, whose pairs nobody draws; set rl.dpo.beta without a path", names))
    if rl.served is not None:
        found.append(("beside rl.served, whose servers have limits of their own; set them there", _OF_ENGINES))
    if rl.mixture:
        found.append(("beside rl.mixture; name it there", ("environment",)))
    if rl.old_logprobs == "inference" and rl.correction is not None:
        names = [f"correction.{item.name}" for item in dataclasses.fields(rl.correction)]
        found.append(("beside rl.old_logprobs=inference, which has nothing to correct; set rl.old_logprobs=trainer", names))
    return found


def _is_changed(rl: RLConfig, path: str) -> bool:
    """Whether a field of ``rl`` is off its default, at a path of one name or two."""
    own: Any = rl
    unset: Any = RLConfig()
    for name in path.split("."):
        own, unset = getattr(own, name), getattr(unset, name)
    return own != unset
