# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The experts' all-to-alls of one micro-batch, hidden behind the work on another."""

import functools
import threading
import unittest.mock
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, MoELayer, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.comm import _rows_under_way
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import ModelChunks, Overlap, PipelineConfig, Schedule, combined_one_f_one_b, one_f_one_b
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step

MODEL = TransformerConfig(num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=12, init_method_std=0.2)
MIXTURE = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01)
MICROBATCHES = 4


class Recorder:
    """Pauses on an ``Overlap`` and notes which part of a pair stops and goes on."""

    def __init__(self) -> None:
        self.overlap, self.events = Overlap(), list[str]()

    def pause(self) -> None:
        part = "B" if threading.current_thread().name == "pipeline-backward" else "F"
        self.events.append(part + " sends")
        self.overlap.pause()
        self.events.append(part + " has")


def batches(rank: int) -> list[Batch]:
    tokens = torch.randint(0, 16, (MICROBATCHES, 2, 7), generator=torch.Generator().manual_seed(rank))
    return [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=torch.ones(2, 6)) for x in tokens]


def train(groups: ProcessGroups, schedule: Schedule, chunks: int, recorder: Recorder | None) -> tuple[list[float], dict[str, Tensor]]:
    layout = PipelineConfig().place(MODEL.num_layers, num_stages=groups.pp.size, num_chunks=chunks)
    experts = moe_feed_forward(MIXTURE, pause=None if recorder is None else recorder.pause)
    parts = layout.of_rank(groups.pp.rank)
    model = ModelChunks([GPTModel(MODEL, groups, layers=part, feed_forward=experts, dtype=torch.float64) for part in parts])
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01), sync, groups)
    overlap = None if recorder is None else recorder.overlap
    reports = [
        train_step(model, batches(groups.dp.rank), CrossEntropyObjective(), sync, optimizer, lr=0.01, pipeline=schedule, overlap=overlap)
        for _ in range(2)
    ]
    numbers = [number for report in reports for number in (report.loss, report.aux, report.grad_norm)]
    return numbers, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def check_pairs(plan: ParallelPlan) -> list[str]:
    """Plain 1F1B and pairs have the same bits, with whole and with split backwards and over chunks; returns the order of events."""
    groups, first = ProcessGroups.build(plan), Recorder()
    expected = train(groups, one_f_one_b, 1, None)
    overlapped = [
        train(groups, combined_one_f_one_b, 1, first),
        train(groups, functools.partial(combined_one_f_one_b, delay_weight_grad=True), 1, Recorder()),
    ]
    for numbers, parameters in overlapped:
        assert numbers == expected[0]
        assert all(torch.equal(value, expected[1][name]) for name, value in parameters.items())
    if plan.pp > 1:
        numbers, _ = train(groups, functools.partial(combined_one_f_one_b, num_chunks=2), 2, Recorder())
        assert numbers[:2] == pytest.approx(expected[0][:2], rel=1e-12)
    return first.events


@pytest.mark.journey
@pytest.mark.world(2, shared=True)
def test_each_part_of_a_pair_works_while_the_rows_of_the_other_travel(world) -> None:
    one, other = world(check_pairs, plan=ParallelPlan(dp=2, ep=2))
    assert one == other, "all ranks start their exchanges in one order"
    # There and back in each of four layers; the first forward and the last backward of a step have no partner.
    exchanges = 2 * MODEL.num_layers
    turns = ["F sends", *["B sends", "F has", "F sends", "B has"] * (exchanges - 1), "B sends", "F has", "B has"]
    alone = ["F sends", "F has"] * exchanges
    assert one[: len(alone)] == alone
    pairs = one[len(alone) : len(alone) + (MICROBATCHES - 1) * len(turns)]
    assert pairs == turns * (MICROBATCHES - 1)


@pytest.mark.journey
@pytest.mark.world(4)
def test_pairs_over_two_stages_have_the_bits_of_plain_turns(world) -> None:
    events = world(check_pairs, plan=ParallelPlan(dp=2, ep=2, pp=2))
    assert events[0] == events[1] and events[2] == events[3]
    for order in events:
        assert any(order[i : i + 3] == ["F sends", "B sends", "F has"] for i in range(len(order)))


def check_shared(plan: ParallelPlan, padded: bool) -> None:
    """Shared experts beside the exchange: the bits of the output stay, and the order of work is what it says, in both directions."""
    groups = ProcessGroups.build(plan)
    results, order = [], list[str]()
    for overlap in (False, True):
        mixture = MoEConfig(
            num_moe_experts=4,
            moe_shared_expert_intermediate_size=6,
            moe_shared_expert_gate=True,
            moe_shared_expert_overlap=overlap,
            moe_expert_capacity_factor=1.0 if padded else None,
            moe_pad_expert_input_to_capacity=padded,
        )
        layer = MoELayer(mixture, Site(layer=0, local_layer=0, config=MODEL, groups=groups), dtype=torch.float64)
        generator = torch.Generator().manual_seed(groups.ep.rank)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        x = torch.randn(6, 8, generator=generator, dtype=torch.float64).requires_grad_()
        layer.shared_experts.register_forward_hook(lambda *_: order.append("shared"))
        layer.shared_experts.register_full_backward_hook(lambda *_: order.append("shared back"))
        layer.experts.register_forward_hook(lambda *_: order.append("experts"))
        layer.experts.register_full_backward_hook(lambda *_: order.append("experts back"))
        order.clear()
        with unittest.mock.patch.object(_rows_under_way, "_start", functools.partial(noted, order, _rows_under_way._start)):
            y, _ = layer(x, Step.causal(1, 6))
            grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        results.append((y.detach(), grads))
    (plain, plain_grads), (overlapped, grads) = results
    assert torch.equal(plain, overlapped)
    torch.testing.assert_close(grads, plain_grads, rtol=1e-12, atol=1e-13)
    assert order == ["sent", "shared", "experts", "experts back", "sent", "shared back"]


def noted(order: list[str], start: Any, *arguments: Any) -> Tensor:
    order.append("sent")
    return start(*arguments)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(dp=2, ep=2), ParallelPlan(tp=2, ep=2)], ids=["dp", "tp"])
@pytest.mark.parametrize("padded", [False, True])
def test_shared_experts_work_while_the_tokens_travel(world, plan: ParallelPlan, padded: bool) -> None:
    world(check_shared, plan=plan, padded=padded)


def test_an_overlap_of_nothing_or_of_two_things_is_refused() -> None:
    with pytest.raises(ValueError, match="moe_shared_expert_overlap=True has nothing to overlap; set moe_shared_expert_intermediate_size"):
        MoEConfig(num_moe_experts=4, moe_shared_expert_overlap=True)
    shared: dict[str, Any] = {"num_moe_experts": 4, "moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 8}
    with pytest.raises(ValueError, match="moe_shared_expert_overlap=True needs moe_token_dispatcher_type='alltoall', found 'allgather'"):
        MoEConfig(**shared, moe_token_dispatcher_type="allgather")
    with pytest.raises(ValueError, match="pause and moe_shared_expert_overlap=True both work while tokens travel; leave one out"):
        moe_feed_forward(MoEConfig(**shared), pause=lambda: None)
