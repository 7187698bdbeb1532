# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Dispatch by stores in the memory of other GPUs, against the all-to-all, without a wait of the host."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import GroupedMLP, MoEAlltoAllTokenDispatcher, MoEConfig, MoEFlexTokenDispatcher, MoELayer, Routing, moe_feed_forward
from mcore_moe.dispatch import choose_exchange
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.comm import SymmetricBuffer
from mcore_parallel.graphs import CudaGraphConfig, graph_modules
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import Step
from tests.support.world import run

pytestmark = pytest.mark.gpu

E, K, D, F = 16, 4, 1024, 256
MODEL = TransformerConfig(num_layers=1, hidden_size=D, num_attention_heads=8, vocab_size=64, ffn_hidden_size=F, activation="swiglu")
ALL_TO_ALL = MoEConfig(num_moe_experts=E, moe_router_topk=K, moe_aux_loss_coeff=0.01)
SYMMETRIC = dataclasses.replace(
    ALL_TO_ALL, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="symmetric", moe_flex_timeout_s=20.0
)


@contextmanager
def no_host_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_routing(tokens: int, kind: str) -> Routing:
    keys = torch.rand(tokens, E, device="cuda")
    if kind == "skewed":
        keys[:, : K - 1] += 2
    elif kind == "one rank":
        keys[:, : E // 2] += 2
    experts = keys.argsort(-1)[:, :K]
    kept = torch.rand(tokens, K, device="cuda") < (0.0 if kind == "nowhere" else 0.8)
    return Routing(experts, torch.rand(tokens, K, device="cuda").requires_grad_(), kept_TK=kept)


def results(dispatcher: Any, experts: GroupedMLP, x: Tensor, routing: Routing) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    sent = dispatcher.dispatch(leaf, routing)
    y = dispatcher.combine(experts(sent.rows_RD, sent.ends_N, sent.weights_R), sent, routing)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [leaf, routing.probs_TK, *experts.parameters()])]


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.abs().max()) if other.numel() else 1.0
        torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=3e-2 * scale)


def check_exchange(plan: ParallelPlan, exact_rows: bool) -> None:
    groups = ProcessGroups.build(plan)
    rank = groups.world.rank
    torch.manual_seed(rank)
    mixture = dataclasses.replace(SYMMETRIC, moe_symmetric_max_tokens=1024, moe_symmetric_exact_rows=exact_rows)
    exchange = choose_exchange(mixture, groups, width=D, dtype=torch.bfloat16, device="cuda")
    assert exchange is not None
    experts = GroupedMLP(E, D, F, groups, dtype=torch.bfloat16, device="cuda")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    ours = MoEFlexTokenDispatcher(E, groups, exchange)
    reference = MoEAlltoAllTokenDispatcher(E, groups.ep, groups.expt_tp)
    # The first exchange makes the memory.
    results(ours, experts, torch.randn(8, D, device="cuda", dtype=torch.bfloat16), make_routing(8, "even"))
    for tokens in (1024, 100 * rank, 3):
        for kind in ("even", "skewed", "one rank", "nowhere"):
            x, routing = torch.randn(tokens, D, device="cuda", dtype=torch.bfloat16), make_routing(tokens, kind)
            expected = results(reference, experts, x, routing)
            # The first turn compiles kernels for these sizes.
            once = results(ours, experts, x, routing)
            torch.cuda.synchronize()
            with no_host_waits() if not exact_rows else nullcontext():
                again = results(ours, experts, x, routing)
            assert_close(once, expected)
            assert all(torch.equal(*pair) for pair in zip(once, again, strict=True)), (tokens, kind)


def start(check: Any, num_gpus: int = 2, **inputs: Any) -> None:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    run(check, num_gpus, backend="nccl", timeout_s=200.0, **inputs)


@pytest.mark.parametrize("exact_rows", [False, True])
def test_exchanges_as_the_all_to_all(exact_rows: bool) -> None:
    start(check_exchange, plan=ParallelPlan(dp=2, ep=2), exact_rows=exact_rows)


def test_four_gpus_that_share_experts_exchange_as_the_all_to_all() -> None:
    start(check_exchange, 4, plan=ParallelPlan(dp=4, ep=2, etp=2), exact_rows=False)


def check_layer() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    torch.manual_seed(groups.world.rank)
    site = Site(layer=0, local_layer=0, config=MODEL, groups=groups, dtype=torch.bfloat16, device="cuda")
    ours, reference = (MoELayer(mixture, site, dtype=torch.bfloat16, device="cuda") for mixture in (SYMMETRIC, ALL_TO_ALL))
    assert type(ours.dispatcher) is MoEFlexTokenDispatcher
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    ours.load_state_dict(reference.state_dict())
    x = torch.randn(512, D, device="cuda", dtype=torch.bfloat16)
    step = Step.causal(1, 512, x.device)

    def train(layer: MoELayer) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y, aux = layer(leaf, step)
        assert aux is not None
        return [y.detach(), *torch.autograd.grad(y.float().square().sum() + aux.total(), [leaf, *layer.parameters()])]

    expected, once = train(reference), train(ours)
    torch.cuda.synchronize()
    with no_host_waits():
        again = train(ours)
    assert_close(once, expected)
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))


def test_a_layer_never_waits_for_the_device() -> None:
    start(check_layer)


def check_captured(patterns: tuple[str, ...]) -> None:
    """Steps of a model whose layers replay graphs have the bits of one without; the ranks record theirs at other times."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    config = dataclasses.replace(MODEL, num_layers=2)
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda", "seed": 3}
    plain, graphed = (GPTModel(config, groups, feed_forward=moe_feed_forward(SYMMETRIC), **place) for _ in range(2))
    graphs = graph_modules(graphed, patterns, CudaGraphConfig(warmup_steps=2 + groups.world.rank))
    generator = torch.Generator().manual_seed(groups.world.rank)

    def train(model: GPTModel, tokens: Tensor) -> list[Tensor]:
        output, aux = model(tokens.flatten(), Step.causal(*tokens.shape, device="cuda"))
        assert aux is not None
        loss = output.loss_sum(tokens.flatten().roll(-1), torch.ones(tokens.numel(), device="cuda")) + aux.total()
        loss.backward()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return [loss.detach().clone(), *grads]

    for _ in range(8):
        tokens = torch.randint(64, (2, 64), generator=generator).cuda()
        launched, replayed = train(plain, tokens), train(graphed, tokens)
        assert len(replayed) == len(launched) and all(map(torch.equal, replayed, launched))
    report = graphs.report()
    assert report.graphs and report.replays >= 2 * (8 - 3) and set(report.eager) <= {"warm-up"}, report
    # Where all ranks have more, memory grows, but for graphs.
    longer = torch.randint(64, (4, 64), generator=generator).cuda()
    train(plain, longer)
    with pytest.raises(ValueError, match="this rank has 256 tokens, there is room for 128, and graphs hold that memory"):
        train(graphed, longer)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("patterns", [("layers.*",), ("layers.*.mlp",)], ids=["block", "layer"])
def test_layers_over_two_gpus_are_captured_dropless(patterns: tuple[str, ...]) -> None:
    start(check_captured, patterns=patterns)


def check_buffer() -> None:
    """What a rank stores in another's memory is there behind the barrier, again and again."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    rank, device = groups.world.rank, torch.device("cuda", torch.cuda.current_device())
    buffer = SymmetricBuffer(groups.world, 1 << 20, device, timeout_s=20.0)
    mine, theirs = (buffer.peers[place].view(torch.int32) for place in (rank, 1 - rank))
    assert buffer.addresses.tolist() == [peer.data_ptr() for peer in buffer.peers] and mine.data_ptr() % 16 == 0
    for number in range(20):
        theirs.fill_(100 * number + rank)
        buffer.barrier()
        assert bool((mine == 100 * number + 1 - rank).all())
        buffer.barrier()


def test_a_symmetric_buffer_holds_what_others_store() -> None:
    start(check_buffer)


def check_late() -> str:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    device = torch.device("cuda", torch.cuda.current_device())
    buffer = SymmetricBuffer(groups.world, 4096, device, timeout_s=1.0)
    buffer.barrier()
    torch.cuda.synchronize()
    if groups.world.rank == 1:
        time.sleep(8.0)
        return "late"
    begin = time.monotonic()
    buffer.barrier()
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return "refused" if time.monotonic() - begin < 6.0 else "refused late"
    return "waited"


def test_a_barrier_waits_no_longer_than_its_bound() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    # The device of rank 0 fails, and its process may end with it.
    first, second = run(check_late, 2, backend="nccl", timeout_s=60.0, doomed=(0,))
    assert first in ("refused", None) and second == "late"
