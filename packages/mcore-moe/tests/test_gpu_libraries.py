# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""DeepEP, HybridEP and Transformer Engine on GPUs, where they are installed, against this package's own paths."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import GroupedMLP, MoEAlltoAllTokenDispatcher, MoEConfig, MoEFlexTokenDispatcher, Routing, TEGroupedMLP
from mcore_moe.dispatch import choose_exchange
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from tests.support.expert_rows import ends_of
from tests.support.world import run

pytestmark = pytest.mark.gpu

E, K, D = 8, 4, 1024
CUDA = torch.device("cuda")


def results(dispatcher: Any, experts: GroupedMLP, x: Tensor, routing: Routing) -> list[Tensor]:
    leaf = x.detach().requires_grad_()
    sent = dispatcher.dispatch(leaf, routing)
    y = dispatcher.combine(experts(sent.rows_RD, sent.ends_N, sent.weights_R), sent, routing)
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [leaf, routing.probs_TK, *experts.parameters()])]


def check_exchange(library: str) -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    torch.manual_seed(groups.world.rank)
    config = MoEConfig(num_moe_experts=E, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=library)
    exchange = choose_exchange(config, groups, width=D, dtype=torch.bfloat16, device="cuda")
    assert exchange is not None
    experts = GroupedMLP(E, D, 256, groups, dtype=torch.bfloat16, device="cuda")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for tokens in (512, 100 * groups.world.rank, 3):
        x = torch.randn(tokens, D, device=CUDA, dtype=torch.bfloat16)
        chosen = torch.rand(tokens, E, device=CUDA).argsort(-1)[:, :K]
        routing = Routing(chosen, torch.rand(tokens, K, device=CUDA).requires_grad_(), kept_TK=torch.rand(tokens, K, device=CUDA) < 0.8)
        dispatchers = MoEFlexTokenDispatcher(E, groups, exchange), MoEAlltoAllTokenDispatcher(E, groups.ep)
        ours, theirs = (results(dispatcher, experts, x, routing) for dispatcher in dispatchers)
        for one, other in zip(ours, theirs, strict=True):
            scale = float(other.abs().max()) if other.numel() else 1.0
            torch.testing.assert_close(one.float(), other.float(), rtol=3e-2, atol=3e-2 * scale)


@pytest.mark.parametrize(("library", "module"), [("deepep", "deep_ep_cpp"), ("hybridep", "hybrid_ep_cpp")])
def test_a_library_exchanges_as_the_all_to_all(library: str, module: str) -> None:
    if importlib.util.find_spec(module) is None or torch.cuda.device_count() < 2:
        pytest.skip(f"needs {module} and two GPUs")
    run(check_exchange, 2, backend="nccl", timeout_s=100.0, library=library)


@pytest.mark.parametrize("recipe", [None, "tensorwise", "delayed"])
def test_transformer_engine_multiplies_experts_as_grouped_matmuls_do(recipe: Any) -> None:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    groups, options = ProcessGroups.single(), {"dtype": torch.bfloat16, "device": "cuda"}
    backend = choose_backend("te", fp8=None if recipe is None else Fp8Config(recipe=recipe))
    ours, theirs = TEGroupedMLP(4, 128, 64, groups, layers=backend.layers(0, 1), **options), GroupedMLP(4, 128, 64, groups, **options)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs.load_state_dict(ours.state_dict())
    x, grads = torch.randn(256, 128, device=CUDA, dtype=torch.bfloat16), []
    for experts in (ours, theirs):
        leaf = x.clone().requires_grad_()
        with backend.running(groups):
            y = experts(leaf, ends_of([64, 0, 17, 175], CUDA))
        grads.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), [leaf, *experts.parameters()])])
    for one, other in zip(*grads, strict=True):
        error = float((one.float() - other.float()).norm() / other.float().norm())
        assert error < (0.02 if recipe is None else 0.15), error
