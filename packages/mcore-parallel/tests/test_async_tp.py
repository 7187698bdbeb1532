# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layers that communicate in pieces against layers that do not."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from mcore_parallel.tensor_parallel._product import num_pieces


def build(groups: ProcessGroups, overlap: bool | None) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        ColumnParallelLinear(6, (2, 8), groups, shard_dim=1, bias=True, overlap=overlap, dtype=torch.float64, seed=1),
        RowParallelLinear(16, 5, groups, bias=True, overlap=overlap, dtype=torch.float64, seed=2),
    )


def check_pieces(tp: int) -> None:
    for sequence_parallel, tokens in itertools.product((False, True), (8 * tp, 6 * tp, 3 * tp)):
        groups = ProcessGroups.build(ParallelPlan.for_world(tp, tp=tp, sequence_parallel=sequence_parallel))
        rank_tokens = tokens // tp if sequence_parallel else tokens
        draw = torch.Generator().manual_seed(groups.tp.rank if sequence_parallel else 0)
        x = torch.randn(rank_tokens, 6, generator=draw, dtype=torch.float64)
        results: list[list[Tensor]] = []
        for overlap in (False, True):
            model = build(groups, overlap)
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y))
            results.append([y.detach(), leaf.grad, *(parameter.grad for parameter in model.parameters())])
        for plain, cut in zip(*results, strict=True):
            # The sums of a product may be ordered by its number of rows.
            torch.testing.assert_close(cut, plain, rtol=1e-13, atol=1e-13)


@pytest.mark.world(2)
def test_pieces_give_the_same_as_the_whole_on_two_ranks(world) -> None:
    world(check_pieces, tp=2)


@pytest.mark.world(4)
def test_pieces_give_the_same_as_the_whole_on_four_ranks(world) -> None:
    world(check_pieces, tp=4)


def check_order(tp: int) -> None:
    """Transfers of later pieces are under way when the first product begins."""
    events: list[str] = []

    class Events(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.__name__.split(".")[0]
            if name in ("all_gather_into_tensor_out", "reduce_scatter_tensor", "wait_tensor", "bmm"):
                events.append(name)
            return func(*args, **(kwargs or {}))

    groups = ProcessGroups.build(ParallelPlan(tp=tp, sequence_parallel=True))
    model = build(groups, True)
    x = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    with Events():
        model[0](x)
    assert events == ["all_gather_into_tensor_out"] * 2 + ["wait_tensor", "bmm"] * 2
    events.clear()
    with Events():
        model[1](torch.ones(8, 8, dtype=torch.float64, requires_grad=True))
    assert events == ["bmm", "reduce_scatter_tensor"] * 2 + ["wait_tensor"] * 2


@pytest.mark.world(2)
def test_a_piece_travels_while_another_is_multiplied(world) -> None:
    world(check_order, tp=2)


def test_pieces_are_even_and_left_alone_where_they_cannot_be() -> None:
    x = torch.ones(8, 2)
    alone = ProcessGroups.single()
    assert [num_pieces(x, tokens, alone, True) for tokens in (8, 6, 5, 0)] == [2, 2, 1, 1]
    assert num_pieces(x, 8, alone) == num_pieces(x, 8, alone, False) == num_pieces(x.unsqueeze(0), 8, alone, True) == 1


def test_the_plan_chooses_for_layers_that_do_not() -> None:
    x = torch.ones(8, 2)
    on, off = (replace(ProcessGroups.single(), plan=ParallelPlan(tp_comm_overlap=choice)) for choice in (True, False))
    assert [num_pieces(x, 8, on), num_pieces(x, 8, on, False), num_pieces(x, 8, off), num_pieces(x, 8, off, True)] == [2, 1, 1, 2]
    with pytest.raises(ValueError, match="tp_comm_overlap='no' must be True or False or None"):
        ParallelPlan(tp_comm_overlap="no")  # type: ignore[arg-type]


def check_switch(tp: int) -> None:
    """A model communicates in pieces because its plan says so."""
    from mcore_parallel.models import GPTModel, TransformerConfig
    from mcore_parallel.nn import Step

    sums: list[str] = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "reduce_scatter" in func.__name__:
                sums.append(func.__name__)
            return func(*args, **(kwargs or {}))

    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16)
    outputs: list[Tensor] = []
    for choice in (False, True):
        groups = ProcessGroups.build(ParallelPlan(tp=tp, tp_comm_overlap=choice))
        model = GPTModel(config, groups, dtype=torch.float64)
        sums.clear()
        with Sums():
            output, _ = model(torch.arange(8), Step.causal(2, 4))
        # Of the embedding, which is never cut, and of the row layers of attention and feed-forward.
        assert len(sums) == (5 if choice else 3)
        outputs.append(output.logits())
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.world(2)
def test_a_model_follows_the_switch_of_its_plan(world) -> None:
    world(check_switch, tp=2)
