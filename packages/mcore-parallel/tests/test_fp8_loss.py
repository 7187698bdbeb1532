# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The loss of an output layer from fp8 operands, on the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.backends._fp8_loss import Fp8LossProducts
from mcore_parallel.backends._quantize import quantize
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import MainGradient, Route, WeightGradientQueue, fused_linear_cross_entropy
from tests.support.interpreter import run_interpreted

TOKENS, WIDTH, VOCAB, TRUE_VOCAB = 64, 32, 96, 90
SINGLE = ProcessGroups.single()
ALONE = Route(group=SINGLE.tp, sequence_parallel=False)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EXACT = {"rtol": 1e-10, "atol": 1e-12}
TINY = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=64)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64).to(dtype) for n in (TOKENS, VOCAB))
    target = torch.randint(0, TRUE_VOCAB, (TOKENS,), generator=generator)
    target[5] = -100
    return hidden.requires_grad_(), weight.mul_(0.3).requires_grad_(), target, torch.rand(TOKENS, generator=generator, dtype=torch.float64)


def exact(x: Tensor, dtype: torch.dtype) -> Tensor:
    scaled, _ = quantize(x.detach(), dtype)
    assert scaled is not None
    return scaled.value(torch.float64)


def run(products: Fp8LossProducts, route: Route = ALONE, upstream: Tensor | None = None) -> tuple[Tensor, ...]:
    """Losses, and the gradients of the hidden states and the weight."""
    hidden, weight, target, weights = inputs()
    losses = products.losses(hidden, weight, target, weights, route, TRUE_VOCAB)
    upstream = losses.new_ones(()).expand(TOKENS) if upstream is None else upstream
    return losses.detach(), *torch.autograd.grad(losses, (hidden, weight), upstream, allow_unused=True)


def check_parts(gradient_format, upstream: Tensor | None) -> None:
    """The three products are those of the quantised factors."""
    hidden, weight, target, weights = inputs()
    dtype = E4M3 if gradient_format == "e4m3" else E5M2
    factor = weights if upstream is None else weights * upstream
    x, w = exact(hidden, E4M3), exact(weight, E4M3)
    logits = (x @ w.T)[:, :TRUE_VOCAB]
    counted = target >= 0
    losses = torch.where(counted, F.cross_entropy(logits, target.clamp(min=0), reduction="none"), 0.0) * weights
    wide = F.pad(logits.softmax(-1) - F.one_hot(target.clamp(min=0), TRUE_VOCAB), (0, VOCAB - TRUE_VOCAB))
    factor = torch.where(counted, factor, 0.0)
    inverse = factor.abs().max().float() / torch.finfo(dtype).max
    grad = (wide * factor[:, None] * inverse.reciprocal()).to(dtype).double() * inverse
    found = run(Fp8LossProducts(Fp8Config(gradient_format=gradient_format)), upstream=upstream)
    for mine, theirs in zip(found, (losses, grad @ w, grad.T @ x), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gradient_format", [None, "e4m3"])
@pytest.mark.parametrize("uniform", [True, False])
def test_products_are_those_of_the_quantised_factors(gradient_format, uniform) -> None:
    check_parts(gradient_format, None if uniform else torch.linspace(-1.0, 2.0, TOKENS, dtype=torch.float64))


def test_losses_and_gradients_stay_near_the_wide_ones() -> None:
    hidden, weight, target, weights = inputs()
    losses = fused_linear_cross_entropy(hidden, weight, target, SINGLE.tp, token_weights=weights, vocab_size=TRUE_VOCAB)
    wanted = losses.detach(), *torch.autograd.grad(losses.sum(), (hidden, weight))
    for gradient_format, bound in ((None, 0.08), ("e4m3", 0.05)):
        found = run(Fp8LossProducts(Fp8Config(gradient_format=gradient_format)))
        assert relative(found[0], wanted[0]) < 0.02
        # Half a step of e4m3 is 2^-4 of a value and of e5m2 2^-3, of which a mean over values leaves 0.024 and 0.047.
        assert all(1e-3 < relative(mine, theirs) < bound for mine, theirs in zip(found[1:], wanted[1:], strict=True))


@pytest.mark.parametrize("queued", [False, True])
def test_main_gradient_takes_the_weight_gradient_in_slices(monkeypatch, queued) -> None:
    monkeypatch.setattr("mcore_parallel.backends._fp8_products._SUM_ELEMENTS", 20 * WIDTH)
    wanted = run(Fp8LossProducts(Fp8Config()))[2]
    total, calls, queue = torch.ones(VOCAB, WIDTH, dtype=torch.float64), [], WeightGradientQueue() if queued else None
    sink = MainGradient(total, begin=lambda: calls.append("begin"), done=lambda: calls.append("done"))
    products = Fp8LossProducts(Fp8Config())
    for _ in range(2):
        *_, grad_weight = run(products, replace(ALONE, main_grad=sink, queue=queue))
        assert grad_weight is None
    if queue is not None:
        assert not calls
        queue.drain()
    assert calls == ["begin", "done"] * 2
    torch.testing.assert_close(total, 1 + 2 * wanted, **EXACT)


def test_what_does_not_come_in_sixteens_keeps_the_dtype_of_the_model() -> None:
    hidden, weight, target, weights = inputs()
    products = Fp8LossProducts(Fp8Config())
    for tokens, rows in ((17, 96), (32, 90)):
        parts = hidden[:tokens], weight[:rows], target[:tokens], weights[:tokens]
        wanted = fused_linear_cross_entropy(*parts[:3], SINGLE.tp, token_weights=parts[3])
        assert torch.equal(products.losses(*parts, ALONE, rows), wanted)
    wide = fused_linear_cross_entropy(hidden, weight, target, SINGLE.tp, token_weights=weights)
    with torch.no_grad():
        narrow = products.losses(hidden, weight, target, weights, ALONE, VOCAB)
    assert not narrow.requires_grad and not torch.equal(narrow, wide)


def check_layouts(sequence_parallel: bool) -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    tp = groups.tp
    wanted = run(Fp8LossProducts(Fp8Config()))
    hidden, weight, target, weights = inputs()
    share = slice(tp.rank * TOKENS // 2, (tp.rank + 1) * TOKENS // 2) if sequence_parallel else slice(None)
    rows = slice(tp.rank * VOCAB // 2, (tp.rank + 1) * VOCAB // 2)
    x, w = hidden.detach()[share].requires_grad_(), weight.detach()[rows].requires_grad_()
    route = Route(group=tp, sequence_parallel=sequence_parallel)
    losses = Fp8LossProducts(Fp8Config(reduce_amax=True)).losses(x, w, target, weights, route, TRUE_VOCAB)
    found = losses.detach(), *torch.autograd.grad(losses.sum(), (x, w))
    for mine, theirs in zip(found, (wanted[0], wanted[1][share], wanted[2][rows]), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_vocabulary_over_two_ranks_equals_one(world, sequence_parallel) -> None:
    world(check_layouts, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("tied", [False, True])
def test_model_uses_it_for_the_loss_and_nothing_else(tied, recipe) -> None:
    config = replace(TINY, share_embeddings_and_output_weights=tied)
    fp8 = Fp8Config(recipe=recipe, output_layer=True, num_layers_at_start_in_bf16=1)
    plain, narrow = GPTModel(config, SINGLE), GPTModel(config, SINGLE, backend=choose_backend(fp8=fp8))
    tokens, weights, found = torch.arange(32), torch.ones(32), []
    for model in (plain, narrow):
        output, _ = model(tokens, Step.causal(2, 16))
        loss = output.loss_sum(tokens.roll(-1), weights)
        loss.backward()
        found.append((loss, output.logits(), output.log_probs(tokens), {name: p.grad for name, p in model.named_parameters()}))
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[0][2], found[1][2])
    assert 0 < abs(found[0][0] - found[1][0]) < 0.01 * found[0][0]
    assert all(0 < relative(grad, found[0][3][name]) < 0.1 for name, grad in found[1][3].items())


def test_copies_of_the_weight_follow_the_parameter() -> None:
    fp8 = Fp8Config(output_layer=True, num_layers_at_start_in_bf16=1)
    model = GPTModel(TINY, SINGLE, backend=choose_backend(fp8=fp8))
    tokens, weights = torch.arange(32), torch.ones(32)
    assert model.output is not None
    losses = []
    for factor in (1.0, 2.0):
        with torch.no_grad():
            model.output.weight.data.mul_(factor)
        model.output.parameters_changed()
        for _ in range(2):
            losses.append(model(tokens, Step.causal(2, 16))[0].loss_sum(tokens, weights).item())
    assert losses[0] == losses[1] != losses[2] == losses[3]


def test_recipes_with_other_scales_are_refused() -> None:
    for other in ({"recipe": "delayed"}, {"weight_gradients": False}):
        with pytest.raises(ValueError, match='output_layer=True needs recipe="tensorwise" or "rowwise" and weight_gradients=True'):
            Fp8Config(output_layer=True, **other)


def test_the_loss_has_one_scale_a_tensor_beside_every_recipe() -> None:
    for recipe in ("tensorwise", "rowwise"):
        products = Fp8LossProducts(Fp8Config(recipe=recipe, output_layer=True)).products
        assert not products.by_rows and products.gradient_dtype == torch.float8_e5m2


def check_kernel(device: str) -> None:
    """The interpreter rounds to fp8 in its own way, so that there the result is left in float32."""
    from mcore_parallel.tensor_parallel import _triton_rows
    from mcore_parallel.tensor_parallel._rows import RowMaths, to_narrow_gradient

    generator = torch.Generator().manual_seed(0)
    formats = (torch.float32, torch.float32) if device == "cpu" else (E5M2, E4M3)
    for dtype, smoothing, valid in zip(formats, (0.0, 0.1), (300, 257), strict=True):
        maths = RowMaths(vocab_size=valid, smoothing=smoothing, temperature=1.25)
        logits = torch.randn(150, 304, generator=generator).mul(3).bfloat16()
        column = torch.randint(-1, valid, (150,), generator=generator)
        norm = (logits[:, :valid].float() / 1.25).logsumexp(-1)
        grad = torch.randn(150, generator=generator)
        inverse = grad.abs().max() / min(torch.finfo(dtype).max, 500.0)
        here, there = (torch.full((304, 200), 7.0).to(dtype).to(place) for place in ("cpu", device))
        wanted = to_narrow_gradient(logits, column, valid, maths, norm, grad, inverse, here[:, 32:182])
        given = [x.to(device) for x in (logits, column, norm, grad, inverse)]
        found = _triton_rows.to_narrow_gradient(given[0], given[1], valid, maths, *given[2:], there[:, 32:182]).cpu()
        apart, format_ = (found.float() - wanted.float()).abs(), torch.finfo(dtype)
        if dtype == torch.float32:
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        else:
            # An exponential near the middle of two values may fall to either.
            assert bool((apart <= format_.eps * wanted.float().abs().clamp(min=format_.smallest_normal)).all())
            assert (apart > 0).float().mean() < 1e-3
        whole = there.cpu().float()
        assert torch.equal(whole[:, 32:182], found.t().float())
        assert bool((whole[:, :32] == 7).all()) and bool((whole[:, 182:] == 7).all())
        assert not found[:, valid:].float().any()


def test_kernel_equals_the_torch_code_in_the_interpreter() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    check_kernel("cpu")
    print("same")
