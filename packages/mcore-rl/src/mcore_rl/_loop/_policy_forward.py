# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the policy that is trained is the one that draws."""

from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class TrainsOtherwise(Protocol):
    """A module that may compute something else in training than in evaluation, which engines and scores are in."""

    @property
    def training_fields(self) -> str:
        """The fields that ask for it, with their values; empty where both are the same."""
        ...


def check_policy_forward(model: nn.Module) -> None:
    """Raises:
    ValueError: a training step computes other probabilities than the engine draws from; names the fields.
    """
    for module in model.modules():
        if isinstance(module, TrainsOtherwise) and (fields := module.training_fields):
            raise ValueError(
                f"{fields}: what is trained is another policy than the one that draws; leave it out for reinforcement learning"
            )
