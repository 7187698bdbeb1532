# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that leave the common order of collectives after the first step."""

import datetime
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, _order, fully_shard_model


class Tower(nn.Module):
    """Layers of equal shapes, so that one's collective would pass for another's; ``order`` says which of them run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.order: list[int] = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + torch.tanh(self.layers[index](x))
        return x


def tower(**options: Any) -> MegatronFSDP:
    torch.manual_seed(0)
    return fully_shard_model(Tower(), fsdp_unit_modules=[nn.Linear], **options)


def step(model: MegatronFSDP, micro_batches: int = 1) -> None:
    for index in range(micro_batches):
        model.set_model_auto_sync(index == micro_batches - 1)
        model(torch.ones(2, 6) * (1 + dist.get_rank())).square().sum().backward()
    model.install_optimized_model_weights()
    model.zero_grad()


def num_rendezvous(model: MegatronFSDP) -> int:
    return model.runtime._context.calls.num_rendezvous


def check_meetings(strategies: list[str]) -> None:
    for strategy in strategies:
        for micro_batches in (1, 3):
            model = tower(zero_dp_strategy=strategy)
            for _ in range(3):
                step(model, micro_batches)
                with torch.no_grad():
                    model(torch.ones(2, 6))
            before = num_rendezvous(model)
            assert before
            for _ in range(3):
                step(model, micro_batches)
                with torch.no_grad():
                    model(torch.ones(2, 6))
            assert num_rendezvous(model) == before, (strategy, micro_batches)


@pytest.mark.journey
@pytest.mark.world(2)
def test_ranks_that_keep_to_the_order_ask_nobody(world):
    world(check_meetings, strategies=["no_shard", "optim", "optim_grads", "optim_grads_params"])


def check_deserter(order: list[int]) -> str:
    """The last rank changes its order after three steps, and says so; the others wait for it in a collective until then."""
    _order.RENDEZVOUS_TIMEOUT_S = 0.5
    model = tower()
    for _ in range(3):
        step(model)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() < dist.get_world_size() - 1:
        threading.Thread(target=step, args=(model,), daemon=True).start()
        store.wait(["said"], datetime.timedelta(seconds=50))
        return ""
    model.module.order = order
    with pytest.raises(RuntimeError) as error:
        step(model)
    store.set("said", "")
    return str(error.value)


@pytest.mark.world(2)
@pytest.mark.parametrize("order", [[3, 0], [0, 1], [0, 1, 2, 3, 1]])
def test_a_rank_that_leaves_the_order_in_a_later_step_says_so(world, order):
    message = world(check_deserter, order=order)[1]
    assert "rank 1 is" in message and "where the ranks' common order has" in message, message
    assert "1 of 2 ranks did not follow within 0.5 s; every rank must call the same units" in message, message


def check_common_changes() -> None:
    model = tower()
    torch.manual_seed(0)
    expected = Tower()
    for order in ([0, 1, 2, 3], [0, 1, 2, 3], [0, 2], [3, 1, 0], [0, 2], [0, 1, 2, 3]):
        model.module.order = expected.order = order
        step(model)
        x = torch.ones(2, 6)
        torch.testing.assert_close(model(x), expected(x))


@pytest.mark.world(2)
def test_ranks_may_change_their_order_together(world):
    world(check_common_changes)


def check_lists() -> list[list[str]]:
    """Gathers of a forward and of a backward by layers' numbers; gradients do not depend on them."""
    actual, gradients = [], []
    for lists in ({}, {"forward": {"": ["layers.2"], "layers.0": ["layers.3", "layers.1"]}, "backward": {"layers.3": ["layers.0"]}}):
        model = tower()
        for _ in range(2):
            model.set_prefetch(**lists)
            model.zero_grad()
            model(torch.ones(2, 6) * (1 + dist.get_rank())).square().sum().backward()
        plans = model.runtime._context.calls._plans
        for kind in ("forward", "backward"):
            (calls,) = [calls for phase, calls in plans.items() if phase[0] == kind and phase[1]]
            actual.append([call.split(".")[1] for call in calls if call.startswith("gather")])
        gradients.append({name: gradient.full_tensor() for name, gradient in model.gradients().items()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())
    with pytest.raises(ValueError, match=r"forward=\{'layers\.0': \['layers\.9'\]\} names 'layers\.9', which is no unit; units are '',"):
        model.set_prefetch({"layers.0": ["layers.9"]})
    for wrong in ("layers.0", ""):
        with pytest.raises(ValueError, match="neither the unit itself nor the root"):
            model.set_prefetch(backward={"layers.0": [wrong]})
    return actual


@pytest.mark.world(2)
def test_units_are_gathered_ahead_as_lists_say(world):
    plain_forward, plain_backward, forward, backward = world(check_lists)[0]
    assert (plain_forward, plain_backward) == (["0", "1", "2", "3"], ["2", "1", "0"])
    assert (forward, backward) == (["2", "0", "3", "1"], ["0", "2", "1"])
