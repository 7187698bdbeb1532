# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Dispatch by libraries, faked over gloo, against the all-to-all."""

import dataclasses
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mcore_moe import GroupedMLP, MoEAlltoAllTokenDispatcher, MoEConfig, MoEFlexTokenDispatcher, MoELayer, Routing, moe_feed_forward
from mcore_moe.dispatch import TokenExchange, choose_exchange
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import Site, TransformerConfig
from mcore_parallel.nn import Step
from tests.support import deep_ep
from tests.support.mixtures import pass_through, random_routing

D, E, K = 16, 8, 3
F64 = torch.float64
LIBRARIES = ("deepep", "hybridep")


def make_exchange(library: str, groups: ProcessGroups, *, num_sms: int = 4, timeout_s: float = 20.0) -> TokenExchange:
    deep_ep.install()
    place: dict[str, Any] = {"num_sms": num_sms, "timeout_s": timeout_s}
    if library == "deepep":
        from mcore_moe.dispatch._deepep import DeepEPExchange

        return DeepEPExchange(groups.tp_ep, E // groups.ep.size, D, **place)
    from mcore_moe.dispatch._hybridep import HybridEPExchange

    return HybridEPExchange(groups.tp_ep, E // groups.ep.size, D, **place)


def check_exchange(plan: ParallelPlan, library: str) -> None:
    groups = ProcessGroups.build(plan)
    rank = groups.world.rank
    torch.manual_seed(rank)
    experts = GroupedMLP(E, D, 6, groups, bias=True, dtype=F64)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    flex = MoEFlexTokenDispatcher(E, groups, make_exchange(library, groups))
    reference = MoEAlltoAllTokenDispatcher(E, groups.ep, groups.expt_tp)
    # Equally many tokens, other numbers, all tokens on one rank, one token, none at all, more than the first buffer holds.
    for case, tokens in enumerate((5, 3 * rank, 4 * (rank == 0), int(rank == 1), 0, 70)):
        x = torch.randn(tokens, D, dtype=F64)
        for skewed in (False, True) if case in (0, 5) else (case % 2 == 1,):
            routing = random_routing(tokens, E, K, 10 * case + rank, skewed=skewed)
            ours, theirs = (pass_through(dispatcher, experts, x, routing) for dispatcher in (flex, reference))
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
            again = pass_through(flex, experts, x, routing)
            assert all(torch.equal(*pair) for pair in zip(ours, again, strict=True))


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("library", LIBRARIES)
def test_two_ranks_exchange_as_the_all_to_all(world, library: str) -> None:
    world(check_exchange, plan=ParallelPlan(dp=2, ep=2), library=library)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "plan",
    [
        ParallelPlan(dp=4, ep=4),
        ParallelPlan(dp=4, ep=2, etp=2),
        ParallelPlan(tp=2, dp=2, ep=4, etp=1),
        ParallelPlan(dp=4, ep=2, etp=2, order="ep-tp-cp-dp-pp"),
    ],
    ids=["ep4", "ep2-etp2", "tp2-ep4", "ep-before-etp"],
)
def test_four_ranks_exchange_as_the_all_to_all(world, plan: ParallelPlan, library: str) -> None:
    world(check_exchange, plan=plan, library=library)


def check_weights_of_zero(library: str) -> None:
    """A weight that underflowed is no dropped pick: its expert computes the token, and the weight has a gradient."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    dispatcher = MoEFlexTokenDispatcher(E, groups, make_exchange(library, groups))
    probs = torch.zeros(4, 1, dtype=F64, requires_grad=True)
    routing = Routing(torch.tensor([[0], [0], [7], [7]]), probs, kept_TK=torch.tensor([[True], [False], [True], [True]]))
    x = torch.ones(4, D, dtype=F64)
    sent = dispatcher.dispatch(x, routing)
    assert sent.ends_N.tolist() == ([2, 2, 2, 2] if groups.world.rank == 0 else [0, 0, 0, 4])
    dispatcher.combine(sent.rows_RD * sent.weights_R.unsqueeze(-1), sent, routing).sum().backward()
    assert probs.grad is not None and probs.grad.flatten().tolist() == [D, 0.0, D, D]


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_weight_of_zero_is_no_dropped_pick(world, library: str) -> None:
    world(check_weights_of_zero, library=library)


MODEL = TransformerConfig(num_layers=1, hidden_size=D, num_attention_heads=2, vocab_size=16, ffn_hidden_size=6)
MIXTURE = MoEConfig(num_moe_experts=E, moe_router_topk=K, moe_aux_loss_coeff=0.1, moe_expert_capacity_factor=0.7)


def check_layer(library: str) -> None:
    """A whole layer with dropped picks, recomputed."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    layer = MoELayer(MIXTURE, Site(layer=0, local_layer=0, config=MODEL, groups=groups), dtype=F64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    exchange = make_exchange(library, groups)
    results = []
    for dispatcher in (layer.dispatcher, MoEFlexTokenDispatcher(E, groups, exchange)):
        layer.dispatcher = dispatcher
        assert layer.reads_device
        x = torch.randn(9, D, dtype=F64, generator=torch.Generator().manual_seed(groups.world.rank)).requires_grad_()
        for checkpoint in (False, True):
            step = Step.causal(1, 9)
            y = (
                torch.utils.checkpoint.checkpoint(lambda x, step=step: layer(x, step)[0], x, use_reentrant=False)
                if checkpoint
                else layer(x, step)[0]
            )
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-9, atol=1e-9)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_layer_with_dropped_picks_is_the_same(world, library: str) -> None:
    world(check_layer, library=library)


def check_sms() -> None:
    """The number of SMs belongs to an exchange, not to the process."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    few, many = (make_exchange("deepep", groups, num_sms=number) for number in (4, 24))
    assert deep_ep.Buffer.num_sms == 20
    routing = random_routing(3, E, K, 0)
    for exchange, number in ((few, 4), (many, 24)):
        dispatcher: Any = MoEFlexTokenDispatcher(E, groups, exchange)
        sent = dispatcher.dispatch(torch.ones(3, D, dtype=F64, requires_grad=True), routing)
        dispatcher.combine(sent.rows_RD, sent, routing).sum().backward()
        assert dispatcher.exchange._buffer.used_sms == {number}
    hybrid: Any = make_exchange("hybridep", groups, num_sms=6)
    MoEFlexTokenDispatcher(E, groups, hybrid).dispatch(torch.ones(3, D, dtype=F64), routing)
    assert hybrid._buffer.sms == (6, 6) and hybrid._buffer.room == 128


@pytest.mark.world(2, shared=True)
def test_numbers_of_sms_are_those_of_the_config(world) -> None:
    world(check_sms)


def check_late(library: str) -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    dispatcher = MoEFlexTokenDispatcher(E, groups, make_exchange(library, groups, timeout_s=0.2))
    if groups.world.rank == 1:
        time.sleep(0.8)
        return
    with pytest.raises(TimeoutError, match=r"rank 0 waited 0.2 s for ranks \[1\] in the dispatch of tokens by (Deep|Hybrid)EP"):
        dispatcher.dispatch(torch.ones(3, D, dtype=F64), random_routing(3, E, K, 0))


@pytest.mark.world(2)
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_that_does_not_come_is_named(world, library: str) -> None:
    world(check_late, library=library)


def check_choice(lacking: int | None) -> None:
    """One rank lacks the library: all refuse, or all fall back, before the first token."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    if groups.world.rank != lacking:
        deep_ep.install()
    mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type="flex", moe_flex_timeout_s=20.0)
    place: dict[str, Any] = {"layer": 0, "local_layer": 0, "config": MODEL, "groups": groups}
    reason = "is not installed: pip install" if groups.world.rank == lacking else r"ranks \[1\] cannot use it"
    if lacking is None:
        with pytest.raises(ValueError, match="needs CUDA tensors, found device='cpu'"):
            MoELayer(mixture, Site(**place))
        return
    options: dict[str, Any] = {"width": D, "dtype": torch.bfloat16, "device": "cuda"}
    with pytest.raises(ValueError, match=f"moe_flex_dispatcher_backend='deepep': .*{reason}.*; or set moe_flex_dispatcher_fallback="):
        choose_exchange(mixture, groups, **options)
    mixture = dataclasses.replace(mixture, moe_flex_dispatcher_fallback="alltoall")
    with pytest.warns(UserWarning, match="tokens travel by all-to-all"):
        assert choose_exchange(mixture, groups, **options) is None
    build = moe_feed_forward(mixture)
    with pytest.warns(UserWarning, match="tokens travel by all-to-all"):
        layers: list[Any] = [build(Site(**place))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.append(build(Site(**{**place, "layer": 1})))
    assert all(type(layer.dispatcher) is MoEAlltoAllTokenDispatcher for layer in layers)


@pytest.mark.world(2)
@pytest.mark.parametrize("lacking", [1, None])
def test_ranks_choose_together(world, lacking: int | None) -> None:
    world(check_choice, lacking=lacking)


def check_limits() -> None:
    deep_ep.install()
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    for width, fields, reason in (
        (24, {}, "send a multiple of 16 elements, at most 8176, found 24"),
        (8192, {}, "send a multiple of 16 elements, at most 8176, found 8192"),
        (16, {"num_moe_experts": 512}, "count at most 128 experts a rank, found 256; raise ep=2"),
        (16, {"num_moe_experts": 64, "moe_router_topk": 33}, r"take at most 32 picks a token, found moe_router_topk \* etp = 33"),
    ):
        mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type="flex", **fields)
        with pytest.raises(ValueError, match=f"moe_flex_dispatcher_backend='deepep': its kernels {reason}"):
            choose_exchange(mixture, groups, width=width, dtype=torch.bfloat16, device="cuda")


@pytest.mark.world(2)
def test_what_kernels_of_deepep_cannot_do_is_refused_before_they_run(world) -> None:
    world(check_limits)


def check_limits_of_hybridep() -> None:
    deep_ep.install()
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    for width, fields, toolkit, reason in (
        (24, {}, True, "its kernels send a multiple of 16 elements, found 24"),
        (16, {"num_moe_experts": 6}, True, r"its kernels are .* multiple of 4 experts, found ep \* etp = 2 and num_moe_experts \* etp = 6"),
        (
            9600,
            {},
            True,
            "its kernels have 232000 bytes of shared memory, and 9600 elements in 12 stages with 8 experts over 2 ranks take 232832",
        ),
        (16, {}, False, "it compiles its kernels by CUDA_HOME/bin/nvcc, found CUDA_HOME='/nowhere'; set it"),
    ):
        mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep", **fields)
        with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, CUDA_HOME=folder if toolkit else "/nowhere"):
            Path(folder, "bin").mkdir()
            Path(folder, "bin", "nvcc").touch()
            with pytest.raises(ValueError, match=f"moe_flex_dispatcher_backend='hybridep': {reason}"):
                choose_exchange(mixture, groups, width=width, dtype=torch.bfloat16, device="cuda")

    # By as many stages as the library is told, and as a version of it that takes a host for eight ranks.
    mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="hybridep")
    place: dict[str, Any] = {"width": 9600, "dtype": torch.bfloat16, "device": "cuda"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, CUDA_HOME=folder, NUM_OF_STAGES_DISPATCH_API="8"):
        Path(folder, "bin").mkdir()
        Path(folder, "bin", "nvcc").touch()
        assert choose_exchange(mixture, groups, **place) is not None
        with mock.patch("mcore_moe.dispatch._hybridep.deep_ep.HybridEPBuffer", lambda num_of_ranks_per_nvlink_domain=None: None):
            with pytest.raises(ValueError, match=r"takes 8 of ep \* etp = 2 ranks for those of a host; set NUM_OF_RANKS_PER_NVLINK_DOMAIN"):
                choose_exchange(mixture, groups, **place)
            with mock.patch.dict(os.environ, NUM_OF_RANKS_PER_NVLINK_DOMAIN="2"):
                assert choose_exchange(mixture, groups, **place) is not None


@pytest.mark.world(2)
def test_what_kernels_of_hybridep_cannot_do_is_refused_before_they_run(world) -> None:
    world(check_limits_of_hybridep)


def check_no_buffer() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    dispatcher = MoEFlexTokenDispatcher(E, groups, make_exchange("hybridep", groups))
    with (
        mock.patch.object(deep_ep.HybridEPBuffer, "__init__", side_effect=AssertionError("ranks per node")),
        pytest.raises(ValueError, match=r"makes no buffer of 128 tokens, .* for 2 ranks: ranks per node; set moe_token_dispatcher_type"),
    ):
        dispatcher.dispatch(torch.ones(3, D, dtype=F64), random_routing(3, E, K, 0))


@pytest.mark.world(2)
def test_a_buffer_that_hybridep_does_not_make_is_named(world) -> None:
    world(check_no_buffer)


def check_shared() -> None:
    """Layers of one model share an exchange, and so its buffers."""
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    deep_ep.install()
    mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type="flex", moe_deepep_num_sms=6)
    exchange = choose_exchange(mixture, groups, width=D, dtype=torch.bfloat16, device="cuda")
    build: Any = moe_feed_forward(mixture)
    place: dict[str, Any] = {"local_layer": 0, "config": MODEL, "groups": groups, "dtype": torch.bfloat16, "device": "cpu"}
    build.exchanges[(groups.tp_ep, torch.bfloat16, "cpu")] = exchange
    layers: list[Any] = [build(Site(layer=number, **place)) for number in range(2)]
    assert all(type(layer.dispatcher) is MoEFlexTokenDispatcher and layer.dispatcher.exchange is exchange for layer in layers)
    y, _ = layers[0](torch.ones(4, D, dtype=torch.bfloat16), Step.causal(1, 4))
    assert y.shape == (4, D) and y.dtype == torch.bfloat16


@pytest.mark.world(2)
def test_layers_share_an_exchange(world) -> None:
    world(check_shared)


def test_a_rank_that_holds_all_experts_needs_no_library() -> None:
    mixture = dataclasses.replace(MIXTURE, moe_token_dispatcher_type="flex")
    layer: Any = moe_feed_forward(mixture)(Site(layer=0, local_layer=0, config=MODEL, groups=ProcessGroups.single()))
    assert not layer.reads_device or type(layer.dispatcher).__name__ == "LocalTokenDispatcher"


def check_three_ranks() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=3, ep=1, etp=3))
    with pytest.raises(ValueError, match=r"no configuration for ep \* etp = 3 ranks; change ep"):
        make_exchange("deepep", groups)


@pytest.mark.world(3)
def test_numbers_of_ranks_that_the_library_does_not_know_are_refused(world) -> None:
    world(check_three_ranks)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_flex_dispatcher_backend": "nccl"}, "moe_flex_dispatcher_backend='nccl' must be deepep, hybridep or symmetric"),
        ({"moe_flex_dispatcher_fallback": "allgather"}, "moe_flex_dispatcher_fallback='allgather' must be alltoall or None"),
        ({"moe_flex_timeout_s": 0.0}, "moe_flex_timeout_s=0.0 must be above 0 and finite"),
        ({"moe_deepep_num_sms": 5}, "moe_deepep_num_sms=5 must be even and at least 2"),
        ({"moe_hybridep_num_sms": 0}, "moe_hybridep_num_sms=0 must be at least 1"),
        (
            {"moe_token_dispatcher_type": "flex", "moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0},
            "moe_pad_expert_input_to_capacity=True does not go with moe_token_dispatcher_type='flex'",
        ),
    ],
)
def test_fields_that_do_not_fit_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{"num_moe_experts": 8, **values})


def test_the_old_name_of_the_library_warns_once() -> None:
    with pytest.warns(DeprecationWarning, match="moe_enable_deepep is deprecated; set moe_token_dispatcher_type='flex'") as caught:
        config = MoEConfig(num_moe_experts=8, moe_enable_deepep=True)
    assert caught[0].filename == __file__
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", "deepep")
    assert dataclasses.replace(config, moe_router_topk=4).moe_token_dispatcher_type == "flex"
