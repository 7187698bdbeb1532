# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The weights from which a run measures its divergence, and their checkpoints."""

import dataclasses
from pathlib import Path

import torch.distributed as dist

from mcore_ckpt import CheckpointManager
from mcore_ckpt.storage import Folder
from mcore_parallel import Group
from mcore_parallel.data import Tokenizer
from mcore_parallel.training import model_state
from mcore_rl import FrozenWeights
from mcore_tools.assembly import Parts
from mcore_tools.recipes import RunConfig
from mcore_tools.rl._left_over import forget_after
from mcore_tools.rl._teacher import check_tokenizer
from mcore_tools.training import HuggingFaceFolder, absolute_place, check_stored, fill_model, open_weights, stored_model

REFERENCE = "reference"
"""Folder of a run with these weights, where ``rl.kl_beta``, ``rl.kl_in_reward`` or ``rl.dpo`` asks for them."""


def reference_weights(config: RunConfig) -> Folder | HuggingFaceFolder:
    """Where the weights that ``rl.reference`` names are; fields of the model in ``load.override`` may differ from the policy's.

    Raises:
        ValueError: they are of another model than the policy; names each field that differs with both values.
        CheckpointingException: there are none, or they cannot be read.
    """
    assert config.rl is not None
    path = config.rl.reference
    weights = open_weights(path)
    try:
        stored = stored_model(weights, config)
        if stored is not None and stored[1] is None and config.moe is not None:
            raise ValueError("it is a dense model and the policy has experts (moe); name weights of the policy's own model")
        # Of a policy that goes on from another run's optimizer, the reference is weights alone.
        check_stored(dataclasses.replace(config, load=dataclasses.replace(config.load, take="weights")), weights)
    except ValueError as error:
        raise ValueError(f"rl.reference={path!r}: {error}") from None
    return weights


class RunReference:
    """The first weights of a run, or those of ``rl.reference``; with ``rl.ref_model_sync_steps`` they follow the policy.

    A step of the folder is that of the policy with which they were saved; they stay the same until the next one.

    Args:
        config: the run.
        parts: of the policy.
        group: ranks that save them; None for all.
    """

    def __init__(self, config: RunConfig, parts: Parts, group: dist.ProcessGroup | None = None) -> None:
        assert config.rl is not None
        self._config, self._parts, self._rl, self._group = config, parts, config.rl, group
        # One that is newer than the policy's checkpoint, and the one before.
        self._checkpoints = CheckpointManager(Path(config.output) / REFERENCE, keep=2, group=group)
        self._has_changed = True
        self.frozen: FrozenWeights | None = None

    def begin(self, tokenizer: Tokenizer) -> None:
        """With the weights of the policy, which are there and stay, or with those of ``rl.reference``.

        Args:
            tokenizer: of the policy.

        Raises:
            ValueError, CheckpointingException: as of ``reference_weights``; another tokenizer, weights that are missing.
        """
        named = self._rl.reference
        weights = reference_weights(self._config) if named else None
        if named:
            check_tokenizer("rl.reference", named, tokenizer)
        forget_after(self._checkpoints, -1, self._parts.groups)
        self.frozen = FrozenWeights(self._parts.model)
        if weights is not None:
            with self.frozen.swapped() as model:
                first = _of_first_rank(weights, self._parts.groups.world)
                # Heads for further tokens score nothing.
                fill_model(model_state(model, self._parts.groups), first, untrained=("mtp.",), group=self._group)
                self.frozen.refresh()
        self.save(0)

    def load(self, step: int) -> None:
        """Those of a step of the policy, whose own weights are not loaded yet.

        Raises:
            ValueError: nothing was saved up to then, or the run began with another ``rl.reference``.
        """
        if not any(saved <= step for saved in self._checkpoints.steps()):
            raise ValueError(
                f"{self._checkpoints.directory} has no weights of step {step} or before: the run began without a reference; begin another "
                "one with load.path, or set rl.kl_beta=0, rl.kl_in_reward=0 and rl.dpo=none"
            )
        forget_after(self._checkpoints, step, self._parts.groups)
        _, extra = self._checkpoints.load(model_state(self._parts.model, self._parts.groups))
        if absolute_place(named := extra.get("rl.reference", "")) != absolute_place(self._rl.reference):
            raise ValueError(
                f"rl.reference={self._rl.reference!r}, and the run began with {named!r}, with which it goes on; set that, or begin another "
                "one with load.path"
            )
        self.frozen, self._has_changed = FrozenWeights(self._parts.model), False

    def follow(self, step: int) -> None:
        """After an iteration: the policy, where that is its turn."""
        every = self._rl.ref_model_sync_steps
        if every and step % every == 0:
            assert self.frozen is not None
            self.frozen.refresh(self._rl.ref_model_mixup_alpha)
            self._has_changed = True

    def save(self, step: int) -> None:
        """Before the policy's step, where they are others than those that were saved."""
        if self._has_changed and self.frozen is not None:
            with self.frozen.swapped():
                named = {"rl.reference": absolute_place(self._rl.reference)}
                self._checkpoints.save(step, model_state(self._parts.model, self._parts.groups), named)
            self._has_changed = False


def _of_first_rank(weights: Folder | HuggingFaceFolder, world: Group) -> Folder | HuggingFaceFolder:
    """Those that the first rank found, for all: the run that they are of may have saved another step since."""
    if world.size == 1:
        return weights
    places = [""] * world.size
    dist.all_gather_object(places, str(weights), group=world.pg)
    return weights if places[0] == str(weights) else open_weights(places[0])
