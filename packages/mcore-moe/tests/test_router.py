# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The router: losses against explicit formulas, padding, noise, replay, and the state that is not trained."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, MoELayer, TopKRouter, _router, choose_experts
from mcore_moe._balance import balance_scores
from mcore_moe._capacity import limit_to_capacity
from mcore_moe._gating import gate
from mcore_moe._routing import RoutedSums, Routing, route
from mcore_moe._tokens import LocalTokens
from mcore_parallel import ParallelPlan, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.models import AuxLoss, Site, TransformerConfig
from mcore_parallel.nn import Step

E, K, D = 6, 2, 8
DEVICES = 3
F64 = torch.float64
EVERY_LOSS: dict[str, Any] = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "device_aux_loss", "comm_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2, 0.3, 0.5, 0.6),
    "moe_aux_loss_num_devices": DEVICES,
    "moe_z_loss_coeff": 0.4,
}
MODEL = TransformerConfig(num_layers=1, hidden_size=D, num_attention_heads=2, vocab_size=16, ffn_hidden_size=10)


def router(**choices: Any) -> TopKRouter:
    module = TopKRouter(MoEConfig(num_moe_experts=E, moe_router_topk=K, **choices), D, ProcessGroups.single(), layer=3, dtype=F64)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    return module


def layer(**choices: Any) -> MoELayer:
    config = MoEConfig(**{"num_moe_experts": E, "moe_router_topk": K, **choices})
    module = MoELayer(config, Site(layer=0, local_layer=0, config=MODEL, groups=ProcessGroups.single()), dtype=F64)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    return module


def balance(scores: Tensor, picks: Tensor) -> Tensor:
    """The loss of tokens with these scores and picks, both as [tokens, ...]."""
    total = torch.zeros((), dtype=F64)
    for expert in range(E):
        total = total + scores[:, expert].mean() * (picks == expert).sum() / (K * len(scores))
    return E * total


def balance_of_devices(scores: Tensor, picks: Tensor, num_devices: int, most: int) -> tuple[Tensor, Tensor]:
    """The loss of the picks of devices, and of the tokens sent to them, each to ``most`` of them."""
    held = E // num_devices
    by_picks, by_tokens = torch.zeros((), dtype=F64), torch.zeros((), dtype=F64)
    for device in range(num_devices):
        experts = range(device * held, (device + 1) * held)
        share = sum(scores[:, expert].mean() for expert in experts)
        loads = [E / K * (picks == expert).sum() / len(scores) for expert in experts]
        sent = sum(any(pick in experts for pick in row) for row in picks.tolist())
        by_picks = by_picks + share * sum(loads) / held
        by_tokens = by_tokens + share * num_devices / (most * len(scores)) * sent
    return by_picks, by_tokens


def expected_losses(logits: Tensor, sequences: list[list[int]], sigmoid: bool) -> dict[str, Tensor]:
    """Of real tokens, by the lists of them that are a sequence."""
    scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True) if sigmoid else logits.softmax(-1)
    picks = scores.topk(K).indices
    real = [token for sequence in sequences for token in sequence]
    of_sequences = [balance(scores[sequence], picks[sequence]) for sequence in sequences if sequence]
    whole = balance(scores[real], picks[real])
    by_picks, by_tokens = balance_of_devices(scores[real], picks[real], DEVICES, K)
    return {
        "load_balancing_loss": whole,
        "seq_load_balancing_loss": sum(of_sequences[1:], start=of_sequences[0]) / len(of_sequences),
        "global_load_balancing_loss": whole,
        "device_load_balancing_loss": by_picks,
        "comm_load_balancing_loss": by_tokens,
        "z_loss": torch.stack([logits[token].exp().sum().log() ** 2 for token in real]).mean(),
    }


def check_losses(module: TopKRouter, losses: dict[str, AuxLoss], x: Tensor, expected: dict[str, Tensor]) -> None:
    assert set(losses) == set(expected)
    for name, loss in losses.items():
        torch.testing.assert_close(loss.value, expected[name], rtol=1e-12, atol=0)
        ours = torch.autograd.grad(loss.value, [x, *module.parameters()], retain_graph=True)
        theirs = torch.autograd.grad(expected[name], [x, *module.parameters()], retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("sigmoid", [False, True], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_losses_equal_their_formulas(sigmoid: bool, bias: bool) -> None:
    module = router(**EVERY_LOSS, moe_router_score_function="sigmoid" if sigmoid else "softmax", moe_router_bias=bias)
    x = torch.randn(12, D, dtype=F64, requires_grad=True)
    _, losses = module(x, Step.causal(3, 4))
    logits = x @ module.weight.t() + (module.bias if bias else 0)
    check_losses(module, losses, x, expected_losses(logits, [[*range(4)], [*range(4, 8)], [*range(8, 12)]], sigmoid))
    assert {name: loss.coefficient for name, loss in losses.items()} == {
        "load_balancing_loss": 0.1, "seq_load_balancing_loss": 0.2, "global_load_balancing_loss": 0.3,
        "device_load_balancing_loss": 0.5, "comm_load_balancing_loss": 0.6, "z_loss": 0.4,
    }  # fmt: skip


@pytest.mark.parametrize(("num_devices", "most"), [(None, 1), (2, 2)], ids=["groups", "devices"])
def test_losses_of_devices_follow_the_picks_of_the_groups(num_devices: int | None, most: int) -> None:
    choices: dict[str, Any] = {"moe_router_num_groups": 3, "moe_router_group_topk": 1, "moe_router_score_function": "sigmoid"}
    types: dict[str, Any] = {"moe_router_load_balancing_type": ("device_aux_loss", "comm_aux_loss"), "moe_aux_loss_coeff": (1.0, 1.0)}
    module = router(**choices, **types, moe_aux_loss_num_devices=num_devices, moe_router_enable_expert_bias=True)
    assert module.expert_bias is not None
    module.expert_bias.normal_(generator=torch.Generator().manual_seed(0))
    x = torch.randn(11, D, dtype=F64, requires_grad=True)
    routing, losses = module(x, Step.causal(1, 11))
    scores = (x @ module.weight.t()).sigmoid()
    picked = balance_of_devices(scores / scores.sum(-1, keepdim=True), routing.experts_TK, num_devices or 3, most)
    check_losses(module, losses, x, dict(zip(("device_load_balancing_loss", "comm_load_balancing_loss"), picked, strict=True)))
    if num_devices is None:
        # A token whose experts lie on one device is one token there.
        torch.testing.assert_close(*picked)


def test_losses_of_packed_sequences_with_padding() -> None:
    module = router(**EVERY_LOSS)
    x = torch.randn(12, D, dtype=F64, requires_grad=True)
    valid = torch.tensor([True] * 4 + [True, False, True] + [False] * 2 + [True] * 2 + [False])
    step = dataclasses.replace(Step.causal(1, 12), cu_seqlens=torch.tensor([0, 4, 7, 9, 12]), valid=valid)
    _, losses = module(x, step)
    # The third sequence is padding only.
    expected = expected_losses(x @ module.weight.t(), [[0, 1, 2, 3], [4, 6], [], [9, 10]], False)
    check_losses(module, losses, x, expected)


def route_with_sums(logits: Tensor, topk: int, *, valid_T: Tensor | None, with_sums: bool, **options: Any) -> Routing:
    """As a kernel routes, which makes the sums of losses on its way."""
    routing = route(logits, topk, valid_T=valid_T, with_sums=with_sums, **options)
    if not with_sums:
        return routing
    real = torch.ones_like(logits[:, :1]) if valid_T is None else valid_T.unsqueeze(-1).to(logits.dtype)
    scores = (balance_scores(logits, options["score_function"]) * real).sum(0)
    squares = (logits.logsumexp(-1, keepdim=True).square() * real).sum()
    sums = RoutedSums(
        scores_E=scores,
        squares=squares,
        counts_E=routing_counts(routing, valid_T),
        experts_TK=routing.experts_TK,
        valid_T=valid_T,
    )
    return dataclasses.replace(routing, valid_T=valid_T, sums=sums)


def routing_counts(routing: Routing, valid: Tensor | None) -> Tensor:
    return dataclasses.replace(routing, valid_T=valid).counts(E)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        {"moe_router_num_groups": 3, "moe_router_group_topk": 1},
        {"moe_router_force_load_balancing": True},
        {"moe_expert_capacity_factor": 0.7, "moe_router_report_entropy": True},
        {"replayed": True},
    ],
    ids=lambda choices: next(iter(choices), "plain"),
)
@pytest.mark.filterwarnings("ignore:moe_router_force_load_balancing")
def test_losses_of_sums_of_a_kernel_are_those_of_the_tokens(choices: dict[str, Any], padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = dict(choices)
    replayed = (
        torch.stack([torch.randperm(E)[:K] for _ in range(12)])[:, None].expand(-1, 4, -1) if choices.pop("replayed", False) else None
    )
    valid = torch.arange(12) % 5 != 2 if padded else None
    step = dataclasses.replace(Step.causal(3, 4), valid=valid, routed_experts=replayed)
    kinds = EVERY_LOSS["moe_router_load_balancing_type"]
    # All together, and without those that need the scores of each token.
    for names in (kinds, (kinds[0], *kinds[2:]), kinds[2:], kinds[:1], ()):
        devices = DEVICES if "device_aux_loss" in names else None
        losses = {
            "moe_aux_loss_num_devices": devices,
            "moe_router_load_balancing_type": names or "none",
            "moe_aux_loss_coeff": (0.1,) * len(names) or 0.0,
        }
        results = []
        for routed in (route, route_with_sums):
            monkeypatch.setattr(_router, "route", routed)
            module = router(**{**EVERY_LOSS, **losses}, **choices)
            if module.expert_bias is not None:
                module.expert_bias.normal_(generator=torch.Generator().manual_seed(0))
            x = torch.randn(12, D, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
            torch.manual_seed(2)
            routing, found = module(x, step)
            assert (routing.sums is not None) == (routed is route_with_sums and not module.config.moe_router_force_load_balancing)
            values = [found[name].value for name in sorted(found)]
            learnt = [value for value in values if value.requires_grad]
            grads = [torch.autograd.grad(value, [x, module.weight], retain_graph=True) for value in learnt]
            results.append([routing.counts(E), *values, *(one for both in grads for one in both)])
        for sums, wanted in zip(*reversed(results), strict=True):
            torch.testing.assert_close(sums, wanted, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("padded", [False, True])
def test_sums_of_a_kernel_are_not_those_of_another_choice(padded: bool) -> None:
    options: dict[str, Any] = {"pre_softmax": False, "score_function": "softmax", "num_groups": None, "group_topk": None}
    options |= {"scaling_factor": None, "expert_bias": None, "experts_TK": None, "batch_invariant": False}
    valid = torch.arange(7) % 3 != 1 if padded else None
    routing = route_with_sums(torch.randn(7, E, dtype=F64), K, valid_T=valid, with_sums=True, **options)
    for same in (
        dataclasses.replace(routing, probs_TK=torch.ones_like(routing.probs_TK)),
        limit_to_capacity(routing, E, 2, "probs", pad=False),
    ):
        assert same.sums is routing.sums and same.counts(E) is routing.sums.counts_E
    moved = dataclasses.replace(routing, experts_TK=(routing.experts_TK + 1) % E)
    assert moved.sums is None
    assert torch.equal(moved.counts(E), routing.counts(E).roll(1))
    for fewer in (dataclasses.replace(routing, valid_T=torch.arange(7) == 2), routing.share(2, 7)):
        assert fewer.sums is None
        assert fewer.counts(E).sum() == K


def test_bounds_on_the_device_are_not_read_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    module = router(**EVERY_LOSS)
    x = torch.randn(8, D, dtype=F64, requires_grad=True)
    # The last two sequences are empty.
    bounds = torch.tensor([0, 4, 6, 8, 8, 8], dtype=torch.int32)
    step = dataclasses.replace(Step.causal(1, 8), cu_seqlens=bounds, max_seqlen=8)
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "tolist", None)
        _, losses = module(x, step)
    check_losses(module, losses, x, expected_losses(x @ module.weight.t(), [[*range(4)], [4, 5], [6, 7]], False))


def test_the_global_loss_sees_the_micro_batches_before() -> None:
    module = router(**EVERY_LOSS)
    first, second = torch.randn(5, D, dtype=F64), torch.randn(7, D, dtype=F64, requires_grad=True)
    before, _ = module(first, Step.causal(1, 5))
    routing, losses = module(second, dataclasses.replace(Step.causal(1, 7), counts={3: before.counts(E), 4: torch.ones(E)}))
    logits = second @ module.weight.t()
    counts = before.counts(E) + routing.counts(E)
    expected = E * (logits.softmax(-1).mean(0) * counts / (K * 12)).sum()
    torch.testing.assert_close(losses["global_load_balancing_loss"].value, expected, rtol=1e-12, atol=0)


def test_a_balanced_router_costs_one_and_evaluation_costs_nothing() -> None:
    module = router(**EVERY_LOSS)
    torch.nn.init.zeros_(module.weight)
    x = torch.randn(9, D, dtype=F64)
    _, losses = module(x, Step.causal(1, 9))
    # All scores are equal, so whoever is chosen the loss is 1.
    # All go to experts of one device, of two that they may go to.
    assert [losses[name].value.item() for name in list(losses)[:5]] == pytest.approx([1.0] * 4 + [0.5])
    assert module.eval()(x, Step.causal(1, 9))[1] == {}
    with torch.no_grad():
        assert module.train()(x, Step.causal(1, 9))[1] == {}


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_the_entropy_of_the_scores_is_reported_of_real_tokens_and_costs_nothing(function: str) -> None:
    module = router(moe_router_report_entropy=True, moe_router_score_function=function)
    x, valid = torch.randn(12, D, dtype=F64, requires_grad=True), torch.arange(12) % 3 != 0
    _, losses = module(x, dataclasses.replace(Step.causal(1, 12), valid=valid))
    logits = (x @ module.weight.t()).detach()
    scores = logits.softmax(-1) if function == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    expected = -(scores * scores.log()).sum(-1)[valid].mean()
    torch.testing.assert_close(losses["router_entropy"].value, expected)
    assert (
        losses["router_entropy"].coefficient == 0
        and not losses["router_entropy"].value.requires_grad
        and list(losses) == ["router_entropy"]
    )
    torch.nn.init.zeros_(module.weight)
    assert module(x, Step.causal(1, 12))[1]["router_entropy"].value.item() == pytest.approx(torch.tensor(float(E)).log().item())
    assert "router_entropy" not in router()(x, Step.causal(1, 12))[1]


def test_losses_change_no_output() -> None:
    x = torch.randn(9, D, dtype=F64)
    assert torch.equal(layer(**EVERY_LOSS)(x, Step.causal(3, 3))[0], layer()(x, Step.causal(3, 3))[0])


@pytest.mark.parametrize("shared", [None, 4])
def test_padding_is_neither_routed_nor_counted_and_what_it_holds_does_not_matter(shared: int | None) -> None:
    module = layer(**EVERY_LOSS, moe_shared_expert_intermediate_size=shared)
    x = torch.randn(10, D, dtype=F64)
    valid = torch.tensor([True, True, False, True, False, True, True, False, True, False])
    step = dataclasses.replace(Step.causal(2, 5), valid=valid)
    # Sequence 0 has 3 tokens, sequence 1 the same number.
    y, aux = module(x, step)
    alone, aux_alone = module(x[valid], Step.causal(2, 3))
    torch.testing.assert_close(y[valid], alone, rtol=1e-12, atol=1e-14)
    if shared is None:
        assert not y[~valid].any()
    assert torch.equal(aux.counts[0], aux_alone.counts[0]) and aux.counts[0].sum() == 6 * K
    for key, loss in aux.losses.items():
        torch.testing.assert_close(loss.value, aux_alone.losses[key].value, rtol=1e-12, atol=0)
    other = x.masked_fill(~valid[:, None], 1e3)
    torch.testing.assert_close(module(other, step)[0][valid], y[valid], rtol=0, atol=0)
    leaf = other.clone().requires_grad_()
    y, aux = module(leaf, step)
    (y[valid].square().sum() + aux.total()).backward()
    assert not leaf.grad[~valid].any()
    with pytest.raises(ValueError, match="step.valid speaks of 10 tokens, of which 10 lie here, but 6 came"):
        module(x[valid], step)


PADDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "losses": EVERY_LOSS | {"moe_router_report_entropy": True},
    "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_bias": True},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "quantiles": {"moe_router_load_balancing_type": "quantile_balancing", "moe_router_enable_expert_bias": True},
    "jitter": {"moe_input_jitter_eps": 0.1},
    "capacity": {"moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True},
    "weights on input": {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
    "fp8 rows": {"moe_dispatch_fwd_dtype": "fp8"},
    "shared": {"moe_shared_expert_intermediate_size": 4},
    "gated": {"moe_shared_expert_intermediate_size": 4, "moe_shared_expert_gate": True},
    "latent": {"moe_latent_size": 4},
}


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("choices", PADDED.values(), ids=PADDED)
def test_what_is_no_number_in_padding_reaches_no_gradient(choices: dict[str, Any], number: float) -> None:
    valid = torch.arange(10) % 3 != 1
    step = dataclasses.replace(Step.causal(2, 5), valid=valid)
    x = torch.randn(10, D, dtype=F64, generator=torch.Generator().manual_seed(0))
    found: list[list[Tensor]] = []
    for padding in (0.0, number):
        module = layer(**choices)
        leaf = x.masked_fill(~valid[:, None], padding).requires_grad_()
        torch.manual_seed(1)
        y, aux = module(leaf, step)
        auxiliary = aux.total()
        (y[valid].square().sum() + (0.0 if auxiliary is None else auxiliary)).backward()
        module.end_of_batch(aux.counts[0], torch.tensor(False))
        gradients = [parameter.grad for parameter in module.parameters()]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        assert leaf.grad is not None and not leaf.grad[~valid].any()
        found.append([y[valid].detach(), leaf.grad, *gradients, *module.buffers(), *(loss.value for loss in aux.losses.values())])
    assert all(map(torch.equal, *found))


def check_padding_of_other_ranks(sequence_parallel: bool) -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, ep=2, sequence_parallel=True) if sequence_parallel else ParallelPlan(dp=2, ep=2))
    place = Site(layer=0, local_layer=0, config=MODEL, groups=groups)
    step = dataclasses.replace(Step.causal(1, 12), valid=torch.arange(12) % 3 != 1)
    for kind in ("alltoall", "allgather"):
        config = MoEConfig(num_moe_experts=E, moe_token_dispatcher_type=kind, moe_shared_expert_intermediate_size=4, **EVERY_LOSS)
        module = MoELayer(config, place, dtype=F64)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        valid = LocalTokens.of(step, groups, 6 if sequence_parallel else 12).valid_T
        assert valid is not None
        x = torch.randn(len(valid), D, dtype=F64).masked_fill(~valid[:, None], math.nan).requires_grad_()
        y, aux = module(x, step)
        (y[valid].square().sum() + aux.total()).backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in module.parameters())
        assert x.grad is not None and x.grad[valid].any() and not x.grad[~valid].any()


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_is_no_number_in_padding_reaches_no_other_rank(sequence_parallel: bool, world: Any) -> None:
    world(check_padding_of_other_ranks, sequence_parallel=sequence_parallel)


def test_a_batch_of_padding_only_changes_nothing() -> None:
    module = layer(**EVERY_LOSS)
    x = torch.randn(4, D, dtype=F64, requires_grad=True)
    y, aux = module(x, dataclasses.replace(Step.causal(1, 4), valid=torch.zeros(4, dtype=torch.bool)))
    assert not y.any() and not aux.counts[0].any() and aux.total().item() == 0
    (y.sum() + aux.total()).backward()
    assert not x.grad.any()


def test_jitter_keeps_the_dtype_and_is_for_training_only() -> None:
    module = router(moe_input_jitter_eps=0.1).bfloat16()
    x = torch.randn(64, D).bfloat16()
    seen: list[Tensor] = []
    module.weight.register_hook(lambda grad: seen.append(grad))
    torch.manual_seed(0)
    one = module(x, Step.causal(1, 64))[0].probs_TK
    torch.manual_seed(0)
    again = module(x, Step.causal(1, 64))[0].probs_TK
    other = module(x, Step.causal(1, 64))[0].probs_TK
    assert torch.equal(one, again) and not torch.equal(one, other) and one.dtype == torch.float32
    module.eval()
    plain = choose_experts(x.float() @ module.weight.float().t(), K).probs_TK
    assert all(torch.equal(module(x, Step.causal(1, 64))[0].probs_TK, plain) for _ in range(2))


def test_forced_balance_is_random_in_the_forward_and_absent_from_the_backward() -> None:
    with pytest.warns(UserWarning, match="for benchmarks only"):
        module = router(moe_router_force_load_balancing=True)
    num_tokens = 6000
    x = torch.randn(num_tokens, D, dtype=F64, requires_grad=True)
    torch.nn.init.zeros_(module.weight)
    with torch.no_grad():
        module.weight[0] += 10.0 * x.detach().mean(0)
    counts = module(x, Step.causal(1, num_tokens))[0].counts(E).double()
    mean = num_tokens * K / E
    assert (counts - mean).abs().max() < 5 * (mean * (1 - K / E)) ** 0.5
    from mcore_moe import apply_random_logits

    logits = torch.randn(4, E, requires_grad=True)
    (grad,) = torch.autograd.grad((apply_random_logits(logits) * torch.arange(4.0)[:, None]).sum(), logits)
    assert torch.equal(grad, torch.arange(4.0)[:, None].expand(4, E))


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_balances_in_training_and_takes_the_best_in_evaluation(topk: int) -> None:
    config = MoEConfig(num_moe_experts=E, moe_router_topk=topk, moe_router_load_balancing_type="sinkhorn")
    module = TopKRouter(config, D, ProcessGroups.single(), dtype=F64)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        module.weight[2] *= 3
    x = torch.randn(600, D, dtype=F64) + 0.3
    step = Step.causal(1, 600)
    trained, _ = module(x, step)
    evaluated, _ = module.eval()(x, step)
    logits = x @ module.weight.t()
    assert torch.equal(evaluated.experts_TK, logits.topk(topk).indices)
    for routing in (trained, evaluated):
        weights = logits.sigmoid() if topk == 1 else logits.softmax(-1)
        torch.testing.assert_close(routing.probs_TK, weights.gather(1, routing.experts_TK))
    assert trained.counts(E).double().std() < 0.5 * evaluated.counts(E).double().std()


def test_what_was_recorded_is_replayed_with_present_or_recorded_weights() -> None:
    module, other = router(), router()
    with torch.no_grad():
        other.weight.add_(torch.randn(E, D, dtype=F64))
    x = torch.randn(10, D, dtype=F64)
    record: dict[int, tuple[Tensor, Tensor]] = {}
    step = dataclasses.replace(Step.causal(2, 5), routing_recorder=lambda number, *tensors: record.update({number: tensors}))
    first, _ = module(x, step)
    assert torch.equal(record[3][0], first.experts_TK) and torch.equal(record[3][1], first.probs_TK) and list(record) == [3]
    experts = torch.zeros(10, 4, K, dtype=torch.int16)
    experts[:, 3] = record[3][0].to(torch.int16)
    replay = dataclasses.replace(Step.causal(2, 5), routed_experts=experts)
    second, _ = other(x, replay)
    assert torch.equal(second.experts_TK, first.experts_TK)
    torch.testing.assert_close(second.probs_TK, (x @ other.weight.t()).gather(1, first.experts_TK).softmax(-1))
    assert second.probs_TK.requires_grad
    same, _ = module(x, replay)
    torch.testing.assert_close(same.probs_TK, first.probs_TK, rtol=0, atol=0)
    weights = torch.zeros(10, 4, K, dtype=F64)
    weights[:, 3] = record[3][1]
    third, _ = other(x, dataclasses.replace(replay, routed_weights=weights))
    assert torch.equal(third.probs_TK, first.probs_TK)


def test_a_fresh_choice_among_replayed_ones_has_its_own_weights() -> None:
    module, x = router(), torch.randn(10, D, dtype=F64)
    fresh, _ = module(x, Step.causal(2, 5))
    experts = torch.arange(K).expand(10, 4, K).clone()
    experts[4, 3, 1] = -1
    weights = torch.full((10, 4, K), 0.25, dtype=F64)
    mixed, _ = module(x, dataclasses.replace(Step.causal(2, 5), routed_experts=experts, routed_weights=weights))
    assert torch.equal(mixed.experts_TK[4], fresh.experts_TK[4]) and torch.equal(mixed.probs_TK[4], fresh.probs_TK[4])
    others = torch.arange(10) != 4
    assert (mixed.experts_TK[others] == torch.arange(K)).all() and (mixed.probs_TK[others] == 0.25).all()


def recorded(experts: list[int], tokens: int = 10) -> Tensor:
    return torch.tensor(experts).expand(tokens, 4, len(experts))


@pytest.mark.parametrize(
    ("replayed", "message"),
    [
        ({"routed_weights": torch.ones(10, 4, K)}, "step.routed_weights are those of step.routed_experts, which is None"),
        ({"routed_experts": recorded([*range(K + 1)])}, rf"shape \[10, 4, {K + 1}\], must be \[tokens=10, layers, moe_router_topk={K}\]"),
        ({"routed_experts": recorded([*range(K)], 9)}, rf"shape \[9, 4, {K}\], must be \[tokens=10, layers, moe_router_topk={K}\]"),
        ({"routed_experts": recorded([*range(K)])[:, 3]}, rf"shape \[10, {K}\], must be \[tokens=10, layers"),
        (
            {"routed_experts": recorded([*range(K)]), "routed_weights": torch.ones(10, 4, 1)},
            rf"step.routed_weights has shape \[10, 4, 1\], step.routed_experts \[10, 4, {K}\]; give each expert a weight",
        ),
        ({"routed_experts": recorded([*range(K - 1), E])}, f"names expert {E} in layer 3, must be below num_moe_experts={E}"),
        ({"routed_experts": recorded([0] * K)}, "sends a token to expert 0 of layer 3 twice"),
    ],
)
def test_a_replay_that_is_no_routing_of_this_router_is_refused(replayed: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router()(torch.randn(10, D, dtype=F64), dataclasses.replace(Step.causal(2, 5), **replayed))


def test_the_gate_keeps_no_wider_copy_and_its_gradients_are_exact() -> None:
    module = TopKRouter(MoEConfig(num_moe_experts=E, moe_router_bias=True), D, ProcessGroups.single(), dtype=torch.bfloat16)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(7, D, dtype=torch.bfloat16, requires_grad=True)
    saved: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor.dtype), tensor)[1], lambda tensor: tensor):
        logits = gate(x, module.weight, module.bias, torch.float32)
    assert logits.dtype == torch.float32 and set(saved) == {torch.bfloat16}
    torch.testing.assert_close(logits, x.float() @ module.weight.float().t() + module.bias.float(), rtol=1e-6, atol=1e-6)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, module.weight, module.bias)]
    assert torch.autograd.gradcheck(lambda a, b, c: gate(a, b, c, torch.float64), wide)
    assert router(moe_router_dtype="fp64").float()(x.detach().float(), Step.causal(1, 7))[0].probs_TK.dtype == F64


def test_the_bias_moves_once_a_batch_and_only_in_training() -> None:
    module = layer(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25)
    counts = torch.tensor([4.0, 0.0, 2.0, 2.0, 3.0, 1.0])
    no, yes = torch.tensor(False), torch.tensor(True)
    module.end_of_batch(counts, yes)
    assert not module.router.expert_bias.any()
    module.end_of_batch(counts, no)
    assert module.router.expert_bias.tolist() == [-0.25, 0.25, 0.0, 0.0, -0.25, 0.25]
    module.eval().end_of_batch(counts, no)
    assert module.router.expert_bias[0] == -0.25
    # The choice changes, the weights of what is chosen do not.
    x = torch.randn(20, D, dtype=F64)
    module.router.expert_bias.fill_(-9.0)[3] = 9.0
    routing, _ = module.router(x, Step.causal(1, 20))
    assert (routing.experts_TK == 3).any(-1).all()
    scores = (x @ module.router.weight.t()).sigmoid().gather(1, routing.experts_TK)
    torch.testing.assert_close(routing.probs_TK, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize(
    ("style", "rates"), [("constant", [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]), ("linear", [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]), ("cosine", None)]
)
def test_the_rate_of_the_bias_comes_down_to_zero_by_its_step(style: str, rates: list[float] | None) -> None:
    if rates is None:
        rates = [0.5 + 0.5 * math.cos(math.pi * step / 4) for step in range(4)] + [0.0, 0.0]
    module = layer(
        moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_bias_update_rate=0.25,
        moe_router_bias_decay_steps=4, moe_router_bias_decay_style=style,
    )  # fmt: skip
    counts, no = torch.tensor([4.0, 0.0, 2.0, 2.0, 3.0, 1.0]), torch.tensor(False)
    for step, rate in enumerate(rates):
        before = module.router.expert_bias.clone()
        module.end_of_batch(counts, no, step)
        torch.testing.assert_close(before - module.router.expert_bias, 0.25 * rate * (counts - 2).sign(), rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match=r"moe_router_bias_decay_steps=4 counts the steps of a schedule; pass lr=schedule.lr\(n\)"):
        module.end_of_batch(counts, no)


def test_the_bias_is_state_with_a_name_and_stays_float32() -> None:
    module = layer(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    (state,) = named_buffer_shards(module)
    assert (state.name, state.spec.shape, dict(state.spec.shards), state.spec.view) == ("router.expert_bias", (E,), {}, "dense")
    assert "router.expert_bias" not in {shard.name for shard in named_shards(module)}
    module.router.expert_bias.fill_(1.001)
    for cast in (module.bfloat16, module.half, module.double):
        cast()
        assert module.router.expert_bias.dtype == torch.float32
        assert torch.equal(module.router.expert_bias, torch.full((E,), 1.001))
    state = {name: value.bfloat16() for name, value in module.state_dict().items()}
    for assign in (True, False):
        module.load_state_dict(state, assign=assign)
        assert module.router.expert_bias.dtype == torch.float32 and module.router.expert_bias[0] == state["router.expert_bias"][0]
    assert module.router.weight.dtype == torch.bfloat16 and "expert_bias" in dict(module.router.named_buffers())
    assert module.to("meta").router.expert_bias.is_meta
    assert list(named_buffer_shards(layer())) == []


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_a_dense_feed_forward_beside(gated: bool) -> None:
    module = layer(moe_shared_expert_intermediate_size=6, moe_shared_expert_gate=gated)
    x = torch.randn(9, D, dtype=F64)
    y, _ = module(x, Step.causal(1, 9))
    up, down = module.shared_experts.up.weight, module.shared_experts.down.weight
    shared = (torch.nn.functional.silu(x @ up[0].t()) * (x @ up[1].t())) @ down.t()
    shared = shared * (x @ module.shared_expert_gate.weight.t()).sigmoid() if gated else shared
    module.shared_experts = None
    torch.testing.assert_close(y, module(x, Step.causal(1, 9))[0] + shared, rtol=1e-12, atol=1e-14)


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [None, math.inf, math.nan])
def test_narrow_products_of_the_gate_are_those_of_float32_on_a_gpu(padding: float | None) -> None:
    torch.manual_seed(0)
    x, weight, grad = torch.randn(500, 2048), torch.randn(128, 2048) * 0.02, torch.randn(500, 128) * 1e-3
    valid = None if padding is None else torch.arange(500, device="cuda") % 5 != 2
    if valid is not None and padding is not None:
        x[~valid.cpu()] = padding
    narrow = [values.to("cuda", torch.bfloat16).requires_grad_() for values in (x, weight)]
    logits = gate(*narrow, None, torch.float32, valid)
    logits.backward(grad.cuda())
    wide = [values.detach().double().requires_grad_() for values in narrow]
    exact = gate(*wide, None, torch.float64, valid)
    exact.backward(grad.cuda().double())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    for ours, reference in zip(narrow, wide, strict=True):
        assert ours.grad is not None and reference.grad is not None and ours.grad.dtype == torch.bfloat16
        # Of the result alone, which is bfloat16.
        torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=2**-7, atol=1e-6)
