# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A stack of layers over pipeline stages against the same stack on one rank."""

import contextlib
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group
from mcore_parallel.comm import TensorSpec
from mcore_parallel.pipeline import forward_only, one_f_one_b, partition_layers, run_schedule

WIDTH, LAYERS = 4, 6


def weight(layer: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(layer), dtype=torch.float64) / 2


def tokens(microbatch: int) -> int:
    return 2 + microbatch % 3  # shapes differ between micro-batches


def inputs(microbatch: int) -> Tensor:
    return torch.randn(tokens(microbatch), WIDTH, generator=torch.Generator().manual_seed(100 + microbatch), dtype=torch.float64)


class Stack(nn.Module):
    """Some layers; every second one also gives an auxiliary loss."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ParameterDict({str(layer): nn.Parameter(weight(layer)) for layer in layers})

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        aux = None
        for name, parameter in self.layers.items():
            hidden = torch.tanh(hidden @ parameter)
            if int(name) % 2:
                aux = hidden.square().sum() if aux is None else aux + hidden.square().sum()
        return hidden, aux


def serial(microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    stack, losses = Stack(range(LAYERS)), []
    for number in range(microbatches):
        hidden, aux = stack(inputs(number))
        loss = hidden.sin().sum()
        (loss + 0.1 * aux).backward()
        losses.append(loss.item())
    return losses, {name: parameter.grad for name, parameter in stack.layers.items()}


def run_stage(group: Group, microbatches: int) -> None:
    layers = partition_layers(LAYERS, group.size, group.rank)
    stack, losses = Stack(layers), []
    synced: list[bool] = []
    kept: list[weakref.ref[Tensor]] = []
    peak = 0

    def forward(microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        nonlocal peak
        assert (hidden is None) == group.is_first
        output, aux = stack(inputs(microbatch) if hidden is None else hidden)
        # tanh keeps its output for the backward: it lives as long as the micro-batch does.
        saved = output.grad_fn._saved_result if torch.is_grad_enabled() else output
        kept.append(weakref.ref(saved.untyped_storage()))
        peak = max(peak, sum(storage() is not None for storage in kept))
        if group.is_last:
            output = output.sin().sum()
            losses.append(output.item())
        return output, None if aux is None else 0.1 * aux

    in_no_sync = False

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        nonlocal in_no_sync
        in_no_sync = True
        yield
        in_no_sync = False

    for parameter in stack.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: synced.append(not in_no_sync))
    spec = lambda microbatch: TensorSpec(shape=(tokens(microbatch), WIDTH), dtype=torch.float64)  # noqa: E731
    run_schedule(one_f_one_b(group.size, group.rank, microbatches), forward, group, hidden=spec, no_sync=no_sync)

    expected_losses, expected_grads = serial(microbatches)
    if group.is_last:
        assert losses == expected_losses
    for name, parameter in stack.layers.items():
        torch.testing.assert_close(parameter.grad, expected_grads[name], rtol=1e-12, atol=1e-14)
    assert synced == [False] * len(layers) * (microbatches - 1) + [True] * len(layers)
    assert peak <= group.size - group.rank

    losses.clear()
    run_schedule(forward_only(group.size, group.rank, microbatches), forward, group, hidden=spec)
    assert not group.is_last or losses == expected_losses


def check_numerics() -> None:
    group = Group.of(dist.group.WORLD)
    p = group.size
    for microbatches in sorted({1, p - 1, p, 2 * p + 1}):
        run_stage(group, microbatches)


@pytest.mark.world(2)
def test_two_stages_equal_serial(world) -> None:
    world(check_numerics)


@pytest.mark.world(4)
def test_four_stages_equal_serial(world) -> None:
    world(check_numerics)


def test_one_stage_equals_serial() -> None:
    for microbatches in (1, 3):
        run_stage(Group.single(), microbatches)


def check_errors() -> None:
    group = Group.of(dist.group.WORLD)
    actions = one_f_one_b(2, group.rank, 1)
    with pytest.raises(ValueError, match="hidden must say what travels between the 2 pipeline stages"):
        run_schedule(actions, lambda microbatch, hidden: (torch.zeros(()), None), group)
    if group.is_first:
        with pytest.raises(ValueError, match=r"stage 0 returned \(3, 4\) torch.float32, but hidden announces \(2, 4\) torch.float32"):
            run_schedule(actions, lambda microbatch, hidden: (torch.zeros(3, 4), None), group, hidden=TensorSpec(shape=(2, 4)))


@pytest.mark.world(2)
def test_a_stage_that_returns_something_else_is_named(world) -> None:
    world(check_errors)


def test_a_loss_must_be_a_scalar() -> None:
    with pytest.raises(ValueError, match=r"scalar loss, found shape \(2,\)"):
        run_schedule(one_f_one_b(1, 0, 1), lambda microbatch, hidden: (torch.zeros(2), None), Group.single())


def check_frozen_stage() -> None:
    """A stage that ignores what it received and one without trained parameters still exchange their messages."""
    group = Group.of(dist.group.WORLD)
    bias = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if group.is_first:
            return bias * (microbatch + 1), None
        assert hidden is not None
        return ((0 if microbatch else 3) * hidden).sum() if microbatch == 0 else bias.sum(), None

    run_schedule(one_f_one_b(2, group.rank, 2), forward, group, hidden=TensorSpec(shape=(2,), dtype=torch.float64))
    assert bias.grad is not None
    assert bias.grad.tolist() == ([3.0, 3.0] if group.is_first else [1.0, 1.0])


@pytest.mark.world(2)
def test_an_unused_activation_gets_a_zero_gradient(world) -> None:
    world(check_frozen_stage)
