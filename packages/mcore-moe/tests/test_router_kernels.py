# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels of a router that learns, beside the same functions of torch in float64."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, TopKRouter
from mcore_moe._balance import balance_scores
from mcore_moe._routing import _route_by_kernel, count_experts, limit_to_groups, route, selection_scores, top
from mcore_parallel import ProcessGroups
from mcore_parallel.nn import Step
from tests.support.interpreter import run_interpreted

SCORES = [("softmax", False), ("softmax", True), ("sigmoid", False), ("sqrtsoftplus", False)]
CHOSEN = ((1, 1, 1), (70, 9, 3), (40, 128, 8), (3, 1000, 2), (5, 40, 20))
"""Tokens, experts and experts a token."""


def check_top(tokens: int, experts: int, topk: int, device: str) -> None:
    """Kernels choose as a stable sort does: among equal keys, of both zeros, of infinite ones and what is no number."""
    from mcore_moe import _triton_router

    generator = torch.Generator().manual_seed(tokens)
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-40, -1.5])
    for keys in (
        torch.randn(tokens, experts, generator=generator),
        torch.randint(-2, 3, (tokens, experts), generator=generator).float(),
        special[torch.randint(len(special), (tokens, experts), generator=generator)],
        torch.full((tokens, experts), float("-inf")),
    ):
        assert torch.equal(_triton_router.top(keys.to(device), topk).cpu(), top(keys, topk))


def check_choice(tokens: int, experts: int, topk: int, device: str) -> None:
    """Choice, weights, sums and all gradients are those of float64, whatever scores, and with all that has a say in the choice."""
    from mcore_moe import _triton_router

    generator = torch.Generator().manual_seed(experts)
    drawn = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    logits = 2 * drawn(tokens, experts)
    # One keeps its fresh choice.
    recorded = torch.stack([torch.randperm(experts, generator=generator)[:topk] for _ in range(tokens)])
    recorded[0, -1] = -1
    valid = torch.rand(tokens, generator=generator) < 0.7
    groups = next((number for number in (3, 4) if experts % number == 0 and topk % 2 == 0 and topk // 2 <= experts // number), None)
    for (function, pre), biased, replayed, padded in itertools.product(SCORES, (False, True), (False, True), (False, True)):
        bias = 0.3 * drawn(experts) if biased else None
        settings: dict[str, Any] = {"pre_softmax": pre, "score_function": function, "scaling_factor": 2.5 if biased else None}
        own, mask = recorded if replayed else None, valid if padded else None
        grouped = {"num_groups": groups, "group_topk": 2} if groups and biased else {"num_groups": None, "group_topk": None}
        wide = logits.double().requires_grad_()
        scores = balance_scores(wide, function)
        squares = wide.logsumexp(-1).square()
        if mask is not None:
            scores, squares = scores * mask[:, None], squares * mask
        narrow = logits.clone().to(device).requires_grad_()
        keys = None
        if grouped["num_groups"]:
            keys = selection_scores(logits, function, pre_softmax=pre)
            keys = limit_to_groups(keys if bias is None else keys + bias, topk, groups or 0, 2, in_order=False)
        there = [None if value is None else value.to(device) for value in (keys, bias, own, mask)]
        chosen, probs, sums, square, counts = _triton_router.Choose.apply(
            narrow, *there, _triton_router.ChoiceSettings(topk=topk, **settings), True
        )
        picks = chosen.cpu()
        check_picks(picks, wide.detach(), keys, bias, own, settings)
        assert torch.equal(counts.cpu(), count_experts(picks, experts, mask))
        wanted = route(wide, topk, **settings, **grouped, expert_bias=bias, experts_TK=picks, batch_invariant=False)
        gradients = drawn(tokens, topk), drawn(experts), drawn(())
        torch.autograd.backward([wanted.probs_TK, scores.sum(0), squares.sum()], [each.double() for each in gradients])
        torch.autograd.backward([probs, sums, square], [each.to(device) for each in gradients])
        close(probs, wanted.probs_TK)
        close(sums, scores.sum(0))
        close(square, squares.sum())
        close(narrow.grad, wide.grad)


def check_picks(
    picks: Tensor, wide: Tensor, keys: Tensor | None, bias: Tensor | None, recorded: Tensor | None, settings: dict[str, Any]
) -> None:
    """They are the best by keys that are given, and those of float64 but for scores that are equal in float32."""
    topk, fresh = picks.shape[1], torch.ones_like(picks[:, 0], dtype=torch.bool)
    if recorded is not None:
        fresh = recorded.min(-1).values < 0
        assert torch.equal(picks[~fresh], recorded[~fresh])
    if keys is not None:
        assert torch.equal(picks[fresh], top(keys, topk)[fresh])
        return
    exact = selection_scores(wide, settings["score_function"], pre_softmax=settings["pre_softmax"])
    exact = exact if bias is None else exact + bias
    best = top(exact, topk)
    torch.testing.assert_close(exact.gather(1, picks)[fresh], exact.gather(1, best)[fresh], rtol=1e-6, atol=1e-6)
    assert (picks != best)[fresh].sum() <= picks.numel() / 1000
    assert (picks.sort(-1).values.diff(dim=-1) > 0).all()


def check_low_scores(device: str) -> None:
    """Scores of low logits keep their digits, and have gradients down to those that are 0."""
    from mcore_moe import _triton_router

    logits = torch.tensor([[3.0, -9.0, -12.0, -17.0, -30.0, 25.0], [-18.0, -19.0, -15.0, -16.5, -17.0, -80.0]])
    for function in ("sigmoid", "sqrtsoftplus"):
        options: dict[str, Any] = {"score_function": function, "pre_softmax": False, "scaling_factor": None}
        settings = _triton_router.ChoiceSettings(topk=3, **options)
        wide, narrow = logits.double().requires_grad_(), logits.clone().to(device).requires_grad_()
        bare = {"num_groups": None, "group_topk": None, "expert_bias": None, "experts_TK": None, "batch_invariant": False}
        wanted = route(wide, 3, **options, **bare)
        chosen, probs, sums, *_ = _triton_router.Choose.apply(narrow, None, None, None, None, settings, True)
        scores = balance_scores(wide, function)
        assert torch.equal(chosen.cpu(), wanted.experts_TK)
        close(probs, wanted.probs_TK)
        close(sums, scores.sum(0))
        for total in (wanted.probs_TK[:, 0].sum() + scores[:, 1].sum(), probs[:, 0].sum() + sums[1]):
            total.backward()
        close(narrow.grad, wide.grad)
        nothing = torch.full((1, 6), -300.0, device=device).requires_grad_()
        probs = _triton_router.Choose.apply(nothing, None, None, None, None, settings, False)[1]
        probs.sum().backward()
        assert nothing.grad is not None and not probs.any() and not nothing.grad.any()


def check_low_scores_of_serving(device: str) -> None:
    """A router without gradients weighs low scores as one that learns does."""
    from mcore_moe._triton_router import SCORES as NUMBERS
    from mcore_moe.serving._triton_route import Gate, route_many

    logits = torch.tensor([-10.0, -10.5, -12.0, -14.0, -16.0, -18.0, -25.0, -40.0])
    weight, x_TD = torch.zeros(8, 16), torch.zeros(3, 16)
    weight[:, 0], x_TD[:, 0] = logits, 1.0
    options: dict[str, Any] = {"pre_softmax": False, "expert_bias": None}
    gate = Gate(weight=weight.to(device), bias=None, topk=4, score=NUMBERS["sqrtsoftplus"], scaling=1.0, **options)
    picks = route_many(x_TD.to(device), gate, torch.zeros(64, dtype=torch.int32, device=device))
    bare = {"num_groups": None, "group_topk": None, "scaling_factor": None, "experts_TK": None, "batch_invariant": False}
    wanted = route(logits.double().expand(3, 8), 4, score_function="sqrtsoftplus", **options, **bare)
    assert torch.equal(picks.experts_TK.cpu().long(), wanted.experts_TK)
    torch.testing.assert_close(picks.weights_TK.cpu(), wanted.probs_TK.float(), rtol=1e-4, atol=0)


def check_arguments(device: str) -> None:
    """A bias of any dtype and stride is taken; what is given as an expert and is none, or stands twice, weighs nothing."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(6))
    bias = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(7))[::2]
    options: dict[str, Any] = {"pre_softmax": False, "score_function": "sigmoid", "scaling_factor": None, "batch_invariant": False}
    for groups in ({"num_groups": None, "group_topk": None}, {"num_groups": 4, "group_topk": 2}):
        wanted = route(logits, 4, expert_bias=bias, experts_TK=None, **options, **groups)
        place = {"expert_bias": bias.to(device), "experts_TK": None, "valid_T": None, "with_sums": False}
        found = _route_by_kernel(logits.to(device), 4, **place, **options, **groups)
        assert torch.equal(found.experts_TK.cpu(), wanted.experts_TK)
        close(found.probs_TK, wanted.probs_TK)
    recorded = torch.tensor([[1, 1, 2], [8, 3, 9]], device=device)
    alone = {"num_groups": None, "group_topk": None, "expert_bias": None, "valid_T": None, "with_sums": False}
    # What was freed shows in memory that nobody wrote to.
    held = [torch.full((2, 3), float("nan"), device=device) for _ in range(50)]
    del held
    probs = _route_by_kernel(logits[:2].to(device), 3, experts_TK=recorded, **options, **alone).probs_TK
    assert not probs[0, 0] and not probs[1, [0, 2]].any()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, device=device))
    # The order of sums follows from how wide loads are, which follows from where memory begins.
    view = torch.zeros(81, device=device)[1:].view(5, 16).requires_grad_()
    probs = _route_by_kernel(view, 3, experts_TK=None, **{**options, "batch_invariant": True}, **alone).probs_TK
    assert probs.grad_fn is not None and view.data_ptr() % 16 and not probs.grad_fn.saved_tensors[0].data_ptr() % 16


def close(ours: Tensor | None, wide: Tensor | None) -> None:
    assert ours is not None and wide is not None
    torch.testing.assert_close(ours.detach().cpu(), wide.detach().cpu().float(), rtol=2e-5, atol=2e-5)


def check_alone(device: str) -> None:
    """Choice and weights of a token have the same bits in any company, with sums and without; one loss alone has gradients."""
    from mcore_moe import _triton_router

    # Rows of 64 are loaded by vectors.
    for experts, (function, pre) in itertools.product((64, 24), SCORES):
        logits = torch.randn(45, experts, generator=torch.Generator().manual_seed(2)).to(device)
        bias, valid = torch.linspace(-0.1, 0.1, experts, device=device), torch.arange(45, device=device) % 3 != 1
        settings = _triton_router.ChoiceSettings(topk=4, score_function=function, pre_softmax=pre, scaling_factor=1.5)
        together = _triton_router.Choose.apply(logits, None, bias, None, valid, settings, True)
        for one in (0, 17, 44):
            alone = _triton_router.Choose.apply(logits[one : one + 1], None, bias, None, None, settings, False)
            assert torch.equal(alone[0], together[0][one : one + 1]) and torch.equal(alone[1], together[1][one : one + 1])
            assert alone[2:] == (None, None, None)
    learnt = logits.clone().requires_grad_()
    _triton_router.Choose.apply(learnt, None, None, None, None, settings, True)[3].backward()
    wide = logits.double().requires_grad_()
    wide.logsumexp(-1).square().sum().backward()
    close(learnt.grad, wide.grad)
    empty = torch.zeros(0, 24, device=device, requires_grad=True)
    _, probs, scores, squares, counts = _triton_router.Choose.apply(empty, None, None, None, None, settings, True)
    (probs.sum() + scores.sum() + squares).backward()
    assert probs.shape == (0, 4) and not scores.any() and not squares and not counts.any() and empty.grad is not None


@pytest.mark.journey
def test_kernels_equal_functions_of_torch_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*CHOSEN, (20000, 256, 8)])
def test_kernels_equal_functions_of_torch_on_a_gpu(sizes: tuple[int, int, int]) -> None:
    check_top(*sizes, "cuda")
    check_choice(*sizes, "cuda")
    check_alone("cuda")
    check_low_scores("cuda")
    check_low_scores_of_serving("cuda")
    check_arguments("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "fields",
    [
        {"moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.2)},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_router_score_function": "sigmoid"},
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.1},
    ],
)
def test_a_router_on_a_gpu_has_the_losses_and_gradients_of_one_on_a_processor(fields: dict[str, Any]) -> None:
    config = MoEConfig(num_moe_experts=16, moe_router_topk=4, moe_z_loss_coeff=0.01, moe_router_dtype="fp32", **fields)
    results: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        router = TopKRouter(config, 32, ProcessGroups.single())
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(3))
        router = router.to(device)
        x = torch.randn(60, 32, generator=torch.Generator().manual_seed(4)).to(device).requires_grad_()
        step = Step(
            positions=torch.arange(60, device=device) % 20, batch_size=3, seq_len=20, valid=torch.arange(60, device=device) % 7 != 3
        )
        routing, losses = router(x, step)
        total = routing.probs_TK.square().sum() + sum(loss.value * loss.coefficient for loss in losses.values())
        total.backward()
        assert x.grad is not None and router.weight.grad is not None
        values = [routing.experts_TK, routing.probs_TK, routing.counts(16), total, x.grad, router.weight.grad]
        results.append([each.detach().cpu() for each in (*values, *(losses[name].value for name in sorted(losses)))])
    for ours, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mcore_moe import _triton_router
    from tests.support.hopper import CompiledLaunches

    launches = {name: CompiledLaunches(getattr(_triton_router, f"_{name}_kernel")) for name in ("top", "choose", "choose_backward")}
    for name, launch in launches.items():
        monkeypatch.setattr(_triton_router, f"_{name}_kernel", launch)
    # Many picks take a loop: written out, each kernel would take minutes.
    _triton_router.top(torch.zeros(20, 64), 64)
    for experts in (64, 500):
        _triton_router.top(torch.zeros(20, experts), 8)
        bias = torch.zeros(experts)
        recorded, valid = (None, None) if experts == 64 else (torch.zeros(20, 8, dtype=torch.int64), torch.ones(20, dtype=torch.bool))
        for function, pre in SCORES:
            logits = torch.zeros(20, experts, requires_grad=True)
            settings = _triton_router.ChoiceSettings(topk=8, score_function=function, pre_softmax=pre, scaling_factor=None)
            _, probs, scores, squares, _ = _triton_router.Choose.apply(logits, None, bias, recorded, valid, settings, True)
            (probs.sum() + scores.sum() + squares).backward()
    assert [len(launch.ptx) for launch in launches.values()] == [3, 8, 8]


if __name__ == "__main__":
    for each in CHOSEN:
        check_top(*each, "cpu")
        if each[1] < 1000:
            check_choice(*each, "cpu")
    check_alone("cpu")
    check_low_scores("cpu")
    check_low_scores_of_serving("cpu")
    check_arguments("cpu")
    print("same")
