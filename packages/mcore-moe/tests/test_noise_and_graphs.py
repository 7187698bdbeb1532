# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Routers that draw random numbers, and mixtures that no CUDA graph holds: refused where they would be wrong."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, MoELayer, moe_feed_forward
from mcore_moe.dispatch import TokenExchange
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import CaptureError, CudaGraphConfig, GraphReport, graph_modules
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import LoraConfig, add_lora
from mcore_parallel.training import Batch, CrossEntropyObjective, real_tokens, train_step
from tests.support.tape_capture import TapeCapture

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=8, init_method_std=0.5)
NOISY: dict[str, dict[str, Any]] = {
    "jitter": {"moe_input_jitter_eps": 0.5},
    "random logits": {"moe_router_force_load_balancing": True},
}
pytestmark = pytest.mark.filterwarnings("ignore:moe_router_force_load_balancing=True routes at random")


def build(recompute: RecomputeConfig | None = None, **fields: Any) -> GPTModel:
    mixture = moe_feed_forward(MoEConfig(num_moe_experts=4, **fields))
    return GPTModel(CONFIG, ProcessGroups.single(), feed_forward=mixture, recompute=recompute, dtype=torch.float64)


def gradients(model: GPTModel) -> list[Tensor]:
    tokens = torch.arange(12) % 16
    torch.manual_seed(7)
    output, _ = model(tokens, Step.causal(1, 12))
    output.loss_sum(tokens.roll(-1), torch.ones(12)).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("noise", NOISY)
def test_a_second_run_has_the_noise_of_the_first(noise: str) -> None:
    expected = gradients(build(**NOISY[noise]))
    choices: list[dict[str, Any]] = [{"granularity": "full"}, {"modules": ("mlp",)}]
    for choice in choices:
        assert all(map(torch.equal, gradients(build(RecomputeConfig(**choice), **NOISY[noise])), expected))


@pytest.mark.parametrize("noise", NOISY)
def test_a_second_run_with_other_noise_is_refused_before_a_tensor_is_made(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[dict[str, Any]] = [{"granularity": "full"}, {"modules": ("norm", "mlp")}]
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *_, **__: pytest.fail("something is allocated"))
        for choice in choices:
            with pytest.raises(
                ValueError, match=f"preserve_rng_state=False .* and {next(iter(NOISY[noise]))}=.* draws some.*True, or draw"
            ):
                build(RecomputeConfig(preserve_rng_state=False, **choice), **NOISY[noise])
    # What draws none, or is not run again, needs no copy of the generators' states.
    build(RecomputeConfig(granularity="full", preserve_rng_state=False))
    outside = RecomputeConfig(modules=("norm", "core_attention"), preserve_rng_state=False)
    assert all(map(torch.equal, gradients(build(outside, **NOISY[noise])), gradients(build(**NOISY[noise]))))


@pytest.mark.parametrize("noise", NOISY)
def test_a_graph_that_runs_again_has_no_noise(noise: str) -> None:
    model = build(**NOISY[noise])
    with pytest.raises(CaptureError, match=rf"mlp.router draws random numbers \({next(iter(NOISY[noise]))}=.*recompute=True"):
        graph_modules(model, config=CudaGraphConfig(recompute=True))
    graph_modules(model).remove()
    graph_modules(build(), config=CudaGraphConfig(recompute=True)).remove()


def test_dropout_of_adapters_is_drawn_on_the_host() -> None:
    model = build()
    add_lora(model, LoraConfig(rank=2, targets=("qkv",), dropout=0.1), model.groups)
    with pytest.raises(CaptureError, match=r"attention.qkv.lora: dropout=0.1 of LoraConfig is drawn on the host.*set it to 0"):
        graph_modules(model)


def refusal(groups: ProcessGroups, mixture: MoEConfig, **options: Any) -> str:
    layer = MoELayer(mixture, Site(layer=0, local_layer=0, config=CONFIG, groups=groups), **options)
    try:
        graph_modules(torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"0": layer})})).remove()
    except CaptureError as error:
        return str(error)
    return ""


def check_exchanges() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    plain = MoEConfig(num_moe_experts=4)
    padded = dataclasses.replace(plain, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True)
    for kind in ("alltoall", "allgather"):
        message = refusal(groups, dataclasses.replace(plain, moe_token_dispatcher_type=kind))
        assert f"moe_token_dispatcher_type={kind!r} reads the sizes" in message and "moe_pad_expert_input_to_capacity=True" in message
        assert refusal(groups, dataclasses.replace(padded, moe_token_dispatcher_type=kind)) == ""
    assert "pause lets another micro-batch run" in refusal(groups, padded, pause=lambda: None)
    exchange = cast(TokenExchange, SimpleNamespace())
    for backend in ("deepep", "hybridep"):
        flex = dataclasses.replace(plain, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
        assert f"moe_flex_dispatcher_backend={backend!r} sizes its exchanges on the host" in refusal(groups, flex, exchange=exchange)
    direct = dataclasses.replace(plain, moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="symmetric")
    for mixture in (direct, dataclasses.replace(direct, moe_expert_capacity_factor=1.0)):
        assert refusal(groups, mixture, exchange=exchange) == ""
    exact = dataclasses.replace(direct, moe_symmetric_exact_rows=True)
    assert "moe_symmetric_exact_rows=True reads the number of rows on the host" in refusal(groups, exact, exchange=exchange)
    # Where nothing travels the dispatcher has no say; elsewhere each refusal is at the construction of the graphs.
    assert refusal(ProcessGroups.single(), exact) == ""


@pytest.mark.world(2, shared=True)
def test_exchanges_that_ask_the_host_are_refused_when_graphs_are_made(world) -> None:
    world(check_exchanges)


def test_experts_on_one_rank_are_not_refused() -> None:
    assert refusal(ProcessGroups.single(), MoEConfig(num_moe_experts=4)) == ""
    assert refusal(ProcessGroups.single(), MoEConfig(num_moe_experts=4, moe_token_dispatcher_type="flex")) == ""


ROUTERS: dict[str, dict[str, Any]] = {
    "losses": {
        "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
        "moe_aux_loss_coeff": (0.1, 0.1, 0.1),
        "moe_z_loss_coeff": 0.1,
        "moe_router_report_entropy": True,
    },
    "bias": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.1},
    "quantiles": {"moe_router_load_balancing_type": "quantile_balancing", "moe_router_enable_expert_bias": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
}


def trained(groups: ProcessGroups, mixture: MoEConfig, capture: TapeCapture | None) -> tuple[list[Any], GraphReport | None]:
    """Losses, values of the routers, parameters and biases of three steps of two micro-batches with padding."""
    model = GPTModel(CONFIG, groups, feed_forward=moe_feed_forward(mixture), dtype=torch.float64, seed=3)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.01), sync, groups)
    graphs = None if capture is None else graph_modules(model, ("layers.*.mlp.router",), CudaGraphConfig(warmup_steps=1), capture=capture)
    draws, seen = torch.Generator().manual_seed(groups.world.rank), []
    mask = torch.ones(2, 6)
    mask[1, 4:] = 0
    for _ in range(3):
        rows = torch.randint(16, (2, 2, 7), generator=draws)
        batches = [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=mask, valid=real_tokens(mask)) for row in rows]
        report = train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=0.01, groups=groups)
        seen += [report.loss, report.grad_norm, report.aux]
    states = [value.detach().clone() for value in (*model.parameters(), *model.buffers())]
    return [seen, *states], None if graphs is None else graphs.report()


def check_graphs_of_routers(choice: str) -> None:
    """Of mixtures whose exchange no graph holds: the host reads the rows of each expert."""
    mixture = MoEConfig(num_moe_experts=4, **ROUTERS[choice])
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    assert "reads the sizes of its exchange" in refusal(groups, mixture)
    capture = TapeCapture()
    wanted, _ = trained(groups, mixture, None)
    found, report = trained(groups, mixture, capture)
    assert found[0] == wanted[0]
    assert all(map(torch.equal, found[1:], wanted[1:]))
    # The first micro-batch of a step has no loads of others before it, which the global loss reads.
    graphs = 2 if "moe_aux_loss_coeff" in ROUTERS[choice] else 1
    assert report is not None and (report.graphs, capture.recorded) == (graphs, 2 * graphs)
    assert (report.replays, report.eager) == (6 - graphs, {"warm-up": graphs})


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("choice", ROUTERS)
def test_graphs_of_the_routers_train_with_the_bits_of_the_eager_ones(choice: str, world) -> None:
    world(check_graphs_of_routers, choice=choice)
