# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A stack of layers over pipeline stages against the same stack on one rank."""

import contextlib
import functools
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Group
from mcore_parallel.comm import P2PCommunicator, TensorSpec
from mcore_parallel.pipeline import (
    Overlap,
    PipelineLayout,
    Schedule,
    combined_one_f_one_b,
    forward_only,
    interleaved_one_f_one_b,
    one_f_one_b,
    plan_pipeline,
    run_schedule,
    simulate,
    zero_bubble,
)

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


def run_stage(group: Group, microbatches: int, schedule: Schedule, chunks: int = 1, overlap: Overlap | None = None) -> None:
    layout = PipelineLayout.even(LAYERS, num_stages=group.size, num_chunks=chunks)
    stacks = [Stack(part.layers) for part in layout.of_rank(group.rank)]
    losses: list[float] = []
    synced: list[bool] = []
    kept: list[weakref.ref[Tensor]] = []
    peak = 0

    def forward(chunk: int, microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        nonlocal peak
        assert (hidden is None) == (group.is_first and chunk == 0)
        output, aux = stacks[chunk](inputs(microbatch) if hidden is None else hidden)
        # tanh keeps its output for the backward: it lives as long as the micro-batch does.
        saved = output.grad_fn._saved_result if torch.is_grad_enabled() else output
        kept.append(weakref.ref(saved.untyped_storage()))
        peak = max(peak, sum(storage() is not None for storage in kept))
        if group.is_last and chunk == chunks - 1:
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

    for stack in stacks:
        for parameter in stack.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: synced.append(not in_no_sync))
    spec = lambda microbatch: TensorSpec(shape=(tokens(microbatch), WIDTH), dtype=torch.float64)  # noqa: E731
    forwards = [functools.partial(forward, chunk) for chunk in range(chunks)]
    plan = plan_pipeline(schedule, group.size, microbatches)
    link = P2PCommunicator(group)
    run_schedule(plan, forwards, group, hidden=spec, no_sync=no_sync, overlap=overlap, communicator=link)
    assert not link._pending  # no buffer of a send is kept

    expected_losses, expected_grads = serial(microbatches)
    if group.is_last:
        assert losses == expected_losses
    layers = [(name, parameter) for stack in stacks for name, parameter in stack.layers.items()]
    assert [int(name) for name, _ in layers] == [layer for part in layout.of_rank(group.rank) for layer in part.layers]
    for name, parameter in layers:
        torch.testing.assert_close(parameter.grad, expected_grads[name], rtol=1e-12, atol=1e-14)
    # Each weight is reached once a micro-batch, and the last time of each is synced.
    assert len(synced) == len(layers) * microbatches and sum(synced) == len(layers) and synced[-1]
    assert peak <= simulate(plan.tables).peak_live[group.rank]

    losses.clear()
    run_schedule(plan_pipeline(functools.partial(forward_only, num_chunks=chunks), group.size, microbatches), forwards, group, hidden=spec)
    assert not group.is_last or losses == expected_losses


def check_numerics() -> None:
    group = Group.of(dist.group.WORLD)
    p = group.size
    for microbatches in sorted({1, p - 1, p, 2 * p + 1}):
        run_stage(group, microbatches, one_f_one_b)
        run_stage(group, microbatches, zero_bubble)
        run_stage(group, microbatches, combined_one_f_one_b)
    run_stage(group, p + 3, functools.partial(combined_one_f_one_b, delay_weight_grad=True), overlap=Overlap())


def check_chunks() -> None:
    group = Group.of(dist.group.WORLD)
    p = group.size
    for microbatches, chunks, size in ((p, 2, None), (2 * p + 1, 2, p + 1), (2 * p, 3, None)):
        if p * chunks > LAYERS:
            continue
        run_stage(group, microbatches, functools.partial(interleaved_one_f_one_b, num_chunks=chunks, group_size=size), chunks)
        run_stage(group, microbatches, functools.partial(combined_one_f_one_b, num_chunks=chunks, group_size=size), chunks)


@pytest.mark.world(2)
def test_two_stages_equal_serial(world) -> None:
    world(check_numerics)


@pytest.mark.world(4)
def test_four_stages_equal_serial(world) -> None:
    world(check_numerics)


@pytest.mark.world(2)
def test_virtual_stages_of_two_ranks_equal_serial(world) -> None:
    world(check_chunks)


@pytest.mark.world(3)
def test_virtual_stages_of_three_ranks_equal_serial(world) -> None:
    world(check_chunks)


def test_one_stage_equals_serial() -> None:
    alone = Group.single()
    for microbatches in (1, 3):
        run_stage(alone, microbatches, one_f_one_b)
        run_stage(alone, microbatches, zero_bubble)
        run_stage(alone, microbatches, functools.partial(interleaved_one_f_one_b, num_chunks=3), 3)
        run_stage(alone, microbatches, combined_one_f_one_b, overlap=Overlap())


def check_errors() -> None:
    group = Group.of(dist.group.WORLD)
    plan = plan_pipeline(one_f_one_b, 2, 1)
    with pytest.raises(ValueError, match="hidden must say what travels between the 2 pipeline stages"):
        run_schedule(plan, lambda microbatch, hidden: (torch.zeros(()), None), group)
    if group.is_first:
        with pytest.raises(ValueError, match=r"stage 0 returned \(3, 4\) torch.float32, but hidden announces \(2, 4\) torch.float32"):
            run_schedule(plan, lambda microbatch, hidden: (torch.zeros(3, 4), None), group, hidden=TensorSpec(shape=(2, 4)))


@pytest.mark.world(2)
def test_a_stage_that_returns_something_else_is_named(world) -> None:
    world(check_errors)


def test_a_plan_for_other_stages_or_chunks_is_named() -> None:
    forward = lambda microbatch, hidden: (torch.zeros(()), None)  # noqa: E731
    with pytest.raises(ValueError, match="the plan is for 2 stages, but the pipeline group has 1 ranks; plan for 1"):
        run_schedule(plan_pipeline(one_f_one_b, 2, 1), forward, Group.single())
    with pytest.raises(ValueError, match="the plan is for 1 chunks a stage, but forward has 2; give one forward a chunk"):
        run_schedule(plan_pipeline(one_f_one_b, 1, 1), [forward, forward], Group.single())


def test_a_loss_must_be_a_scalar() -> None:
    with pytest.raises(ValueError, match=r"scalar loss, found shape \(2,\)"):
        run_schedule(plan_pipeline(one_f_one_b, 1, 1), lambda microbatch, hidden: (torch.zeros(2), None), Group.single())


def check_frozen_stage(schedule: Schedule) -> None:
    """A stage that ignores what it received and one without trained parameters still exchange their messages."""
    group = Group.of(dist.group.WORLD)
    bias = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if group.is_first:
            return bias * (microbatch + 1), None
        assert hidden is not None
        return ((0 if microbatch else 3) * hidden).sum() if microbatch == 0 else bias.sum(), None

    run_schedule(plan_pipeline(schedule, 2, 2), forward, group, hidden=TensorSpec(shape=(2,), dtype=torch.float64))
    assert bias.grad is not None
    assert bias.grad.tolist() == ([3.0, 3.0] if group.is_first else [1.0, 1.0])


@pytest.mark.world(2)
@pytest.mark.parametrize("schedule", [one_f_one_b, zero_bubble])
def test_an_unused_activation_gets_a_zero_gradient(world, schedule: Schedule) -> None:
    world(check_frozen_stage, schedule=schedule)
