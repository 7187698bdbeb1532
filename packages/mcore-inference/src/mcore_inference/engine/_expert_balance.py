# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts of a served mixture that move between its ranks by their loads."""

import logging
from dataclasses import dataclass

import torch

from mcore_inference._capability import ExpertSlots, HoldsExperts
from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel, TransformerLayer

# L layers with experts, E experts.

_LOG = logging.getLogger("mcore_inference.engine")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ExpertBalancing:
    """Let the experts of a mixture, and copies of the busiest, lie where the ranks that share them (ep) have equally much to do.

    Example:
        >>> ExpertBalancing(num_redundant_experts=32).interval_steps
        3000

    Raises:
        ValueError: a field out of its range.
    """

    num_redundant_experts: int = 0
    """Copies in each layer over all ranks, a multiple of ep: each takes the memory of an expert. 0: experts only change their places."""
    interval_steps: int = 3000
    """Steps over which loads are counted before experts move."""

    def __post_init__(self) -> None:
        as_integer("num_redundant_experts", self.num_redundant_experts, 0, 2**20)
        as_integer("interval_steps", self.interval_steps, 1, 2**31)


@experimental_api
def add_redundant_experts(model: GPTModel, num_redundant_experts: int) -> list[ExpertSlots]:
    """Take the memory of redundant experts, as an engine with `ExpertBalancing` does: call it before a cache takes what is left.

    With ``weight_dtype`` the weights are rounded before (``quantize_weights``).

    Returns:
        The slots of each layer with experts; those of an earlier call with the same number too.

    Raises:
        ValueError: no layer has experts, one has such as cannot be copied or moved, or they do not fit the device.
    """
    mixtures = _checked_mixtures(model, num_redundant_experts)
    try:
        return [mixture.add_redundant_experts(num_redundant_experts) for mixture in mixtures]
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"num_redundant_experts={num_redundant_experts} does not fit beside the weights of the model: "
            f"{str(error).partition('. ')[0]}; lower it"
        ) from error


def check_experts(model: GPTModel, balancing: ExpertBalancing | None) -> None:
    """Whether the experts of a model can move, or where an engine does not move them, are where it looks for them; nothing changes.

    Raises:
        ValueError: as of `add_redundant_experts`, but for what does not fit the device; or they move by another engine, or did.
    """
    if balancing is not None:
        _checked_mixtures(model, balancing.num_redundant_experts)
    elif any(mixture.expert_slots is not None for mixture in _mixtures(model)):
        raise ValueError("experts of the model move between ranks, by add_redundant_experts or another engine; set expert_balancing, too")


def _checked_mixtures(model: GPTModel, num_redundant_experts: int) -> list[HoldsExperts]:
    """All of a model, none of which refuses so many copies."""
    mixtures = _mixtures(model)
    if not mixtures and model.groups.pp.size == 1:
        raise ValueError(
            f"num_redundant_experts={num_redundant_experts}, and no layer of the model has experts; leave expert_balancing out"
        )
    for mixture in mixtures:
        mixture.check_redundant_experts(num_redundant_experts)
    return mixtures


def _mixtures(model: GPTModel) -> list[HoldsExperts]:
    layers = [layer for layer in model.layers.values() if isinstance(layer, TransformerLayer)]
    return [layer.mlp for layer in layers if isinstance(layer.mlp, HoldsExperts)]


class ExpertBalance:
    """The slots of all layers of a model. Ranks that share the experts make the same calls between the same two steps.

    Args:
        model: of this rank.
        balancing: how many copies, and how often they move.

    Raises:
        ValueError: as of `add_redundant_experts`.
    """

    def __init__(self, model: GPTModel, balancing: ExpertBalancing) -> None:
        self._slots = add_redundant_experts(model, balancing.num_redundant_experts)
        self._group, self._interval = model.groups.tp_ep, balancing.interval_steps
        self._since = 0
        """Steps at the last move."""
        self.is_home = True
        """Whether the weights are new, and only parameters hold them."""
        self._figures: dict[str, float] = {
            "expert_rebalances": 0,
            "moved_experts": 0,
            "expert_imbalance": 1.0,
            "expert_imbalance_after": 1.0,
        }

    def weights_changed(self) -> None:
        """The parameters hold new weights."""
        self.is_home = True
        for slots in self._slots:
            slots.weights_changed()

    def is_due(self, num_steps: int) -> bool:
        """Whether weights are to move before the next step.

        Args:
            num_steps: that all ranks have made, the same number on each.
        """
        return self.is_home or num_steps - self._since >= self._interval

    def settle(self) -> None:
        """Bring new weights to all copies."""
        if self.is_home:
            for slots in self._slots:
                slots.settle()
            self.is_home = False

    def follow(self, num_steps: int) -> None:
        """Do what ``is_due``: bring new weights to all copies, and where the interval is over move experts by the loads since the last."""
        self.settle()
        if not self.is_due(num_steps):
            return
        steps, self._since = num_steps - self._since, num_steps
        if not self._slots:
            # Of a stage without experts.
            return
        loads_LE = all_reduce(torch.stack([slots.loads for slots in self._slots]), self._group).tolist()
        self.forget_loads()
        results = [slots.rebalance(loads_E) for slots, loads_E in zip(self._slots, loads_LE, strict=True)]
        before, after = (sum(result[place] for result in results) / len(results) for place in (0, 1))
        moved = sum(result[2] for result in results)
        self._figures["expert_rebalances"] += 1
        self._figures["moved_experts"] += moved
        self._figures |= {"expert_imbalance": before, "expert_imbalance_after": after}
        if self._group.is_first:
            _LOG.info(
                "after %d steps the busiest rank has %.2f times the mean of tokens, with %d experts moved %.2f times",
                steps,
                before,
                moved,
                after,
            )

    def forget_loads(self) -> None:
        """Count from now on, where the graphs do it."""
        for slots in self._slots:
            slots.loads.zero_()

    def stats(self) -> dict[str, float]:
        """Of this rank's layers, for metrics."""
        return dict(self._figures)
