# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""fp8 GEMMs on the CPU: the same values as the units get, multiplied in float32 or float64."""

import importlib.util

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, TorchBackend, choose_backend
from mcore_parallel.backends._factory import missing_units
from mcore_parallel.backends._fp8_products import Fp8Products
from mcore_parallel.backends._quantize import LEAST_AMAX, has_kernel, quantize, quantize_columns, quantize_rows, scaled_product, turn
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import ColumnParallelLinear, MainGradient, RowParallelLinear, WeightGradientQueue
from tests.support.interpreter import run_interpreted

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SINGLE = ProcessGroups.single()
TINY = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=64)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(("dtype", "step"), [(E4M3, 2**-4), (E5M2, 2**-3)])
def test_casts_err_by_half_a_step_of_the_format_at_most(dtype, step) -> None:
    x = torch.randn(64, 48) * torch.logspace(-3, 3, 48)
    rows, columns = quantize(x, dtype, columns=True)
    assert rows is not None and columns is not None
    largest = torch.finfo(dtype).max
    # Below the smallest normal number steps are constant.
    bound = (x.abs() * step).clamp(min=rows.inverse.item() * torch.finfo(dtype).smallest_normal * step) * (1 + 1e-6)
    assert bool(((rows.value() - x).abs() <= bound).all())
    assert rows.data.float().abs().max().item() == largest
    assert torch.equal(columns.data.float(), rows.data.float().t()) and columns.data.is_contiguous()
    assert torch.equal(turn(rows).data.float(), columns.data.float())
    each = quantize_rows(x, dtype)
    assert bool((each.data.float().abs().amax(-1) == largest).all()) and each.inverse.shape == (64, 1)
    assert relative(each.value(), x) < step


def test_zeros_stay_zero_and_what_is_not_finite_shows() -> None:
    rows, _ = quantize(torch.zeros(2, 16), E4M3)
    assert rows is not None and rows.value().abs().max() == 0
    for bad in (float("nan"), float("inf")):
        x = torch.ones(2, 16)
        x[1, 3] = bad
        rows, _ = quantize(x, E4M3)
        assert rows is not None and not bool(torch.isfinite(rows.value()[1, 3]))
        assert not bool(torch.isfinite(quantize_rows(x, E4M3).value()[1, 3]))


@pytest.mark.parametrize("by_rows", [False, True])
def test_emulated_product_is_the_product_of_the_eight_bit_values(by_rows) -> None:
    a, b = torch.randn(32, 64), torch.randn(48, 64)
    cast = quantize_rows if by_rows else lambda x, dtype: quantize(x, dtype)[0]
    qa, qb = cast(a, E4M3), cast(b, E4M3)
    exact = qa.value(torch.float64) @ qb.value(torch.float64).t()
    torch.testing.assert_close(scaled_product(qa, qb, torch.float64), exact, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(scaled_product(qa, qb, torch.float32).double(), exact, rtol=1e-5, atol=1e-5)
    assert relative(exact.float(), a @ b.t()) < 0.05


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"recipe": "int8"}, "recipe='int8'"),
        ({"gradient_format": "e3m4"}, "gradient_format='e3m4'"),
        ({"weight_gradients": "no"}, "weight_gradients='no' must be True or False"),
        ({"num_layers_at_end_in_bf16": -1}, "num_layers_at_end_in_bf16=-1"),
        ({"recipe": "rowwise", "reduce_amax": True}, "reduce_amax=True"),
    ],
)
def test_configs_that_cannot_be_are_refused(choices, text) -> None:
    with pytest.raises(ValueError, match=text):
        Fp8Config(**choices)


def test_backends_that_are_not_here_are_refused() -> None:
    with pytest.raises(ValueError, match="backend='jax' is unknown"):
        choose_backend("jax")
    with pytest.raises(ValueError, match="recipe='blockwise' needs backend"):
        TorchBackend(Fp8Config(recipe="blockwise"))
    if importlib.util.find_spec("transformer_engine") is None:
        with pytest.raises(RuntimeError, match="transformer_engine, which is not installed"):
            choose_backend("te")
    for recipe, capability, text in (("nvfp4", (9, 0), "Blackwell"), ("rowwise", (8, 9), "Hopper"), ("tensorwise", (8, 0), "use no fp8")):
        assert text in (missing_units(Fp8Config(recipe=recipe), capability) or "")
    assert missing_units(Fp8Config(recipe="nvfp4"), (12, 0)) is None


def layer_gradients(layer, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(grad)
    assert leaf.grad is not None and layer.weight.grad is not None
    return y.detach(), leaf.grad, layer.weight.grad


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_layer_is_the_product_of_quantised_factors_and_near_the_plain_one(kind, recipe) -> None:
    config = Fp8Config(recipe=recipe)
    plain = kind(64, 48, SINGLE, dtype=torch.float64)
    narrow = kind(64, 48, SINGLE, dtype=torch.float64, products=Fp8Products(config))
    x, grad = torch.randn(32, 64, dtype=torch.float64), torch.randn(32, 48, dtype=torch.float64)
    found, wanted = layer_gradients(narrow, x, grad), layer_gradients(plain, x, grad)
    assert all(relative(a, b) < 0.1 for a, b in zip(found, wanted, strict=True))
    assert relative(found[0], wanted[0]) > 1e-3
    weight = plain.weight.detach()
    if recipe == "tensorwise":
        qx, qw, qg = (quantize(t, d)[0] for t, d in ((x, E4M3), (weight, E4M3), (grad, E5M2)))
        qw_back, gradient = qw, lambda: qg.value(torch.float64).t() @ qx.value(torch.float64)
    else:
        qx, qw, qg = quantize_rows(x, E4M3), quantize_rows(weight, E4M3), quantize_rows(grad, E4M3)
        back = quantize_rows(weight.t().contiguous(), E4M3)
        qw_back, gradient = None, lambda: grad.t() @ x
    assert qx is not None and qw is not None and qg is not None
    torch.testing.assert_close(found[0], qx.value(torch.float64) @ qw.value(torch.float64).t())
    back_value = qw_back.value(torch.float64) if qw_back is not None else back.value(torch.float64).t()
    torch.testing.assert_close(found[1], qg.value(torch.float64) @ back_value)
    torch.testing.assert_close(found[2], gradient())


def test_weight_gradients_stay_exact_when_asked_for_and_gradient_formats_differ() -> None:
    x, grad = torch.randn(32, 64), torch.randn(32, 48)
    plain = layer_gradients(ColumnParallelLinear(64, 48, SINGLE), x, grad)
    wide, e4m3, e5m2 = (
        layer_gradients(ColumnParallelLinear(64, 48, SINGLE, products=Fp8Products(config)), x, grad)
        for config in (Fp8Config(weight_gradients=False), Fp8Config(gradient_format="e4m3"), Fp8Config())
    )
    torch.testing.assert_close(wide[2], plain[2])
    assert relative(e4m3[1], plain[1]) < 0.8 * relative(e5m2[1], plain[1])


def test_tokens_that_do_not_fill_a_tile_keep_the_dtype_of_the_model() -> None:
    plain = ColumnParallelLinear(64, 48, SINGLE)
    narrow = ColumnParallelLinear(64, 48, SINGLE, products=Fp8Products(Fp8Config()))
    for tokens in (0, 1, 17):
        x = torch.randn(tokens, 64)
        assert torch.equal(narrow(x), plain(x))
    assert not torch.equal(narrow(torch.ones(16, 64) / 3), plain(torch.ones(16, 64) / 3))


def test_layers_that_do_not_divide_into_tiles_are_left_alone() -> None:
    layers = choose_backend(fp8=Fp8Config()).layers(0, 1)
    assert layers.column_linear(64, 48, SINGLE).products is not None
    assert layers.column_linear(64, (2, 3), SINGLE).products is None
    assert layers.row_linear(24, 48, SINGLE).products is None


@pytest.mark.parametrize("config", [Fp8Config(), Fp8Config(recipe="rowwise"), Fp8Config(weight_gradients=False)])
def test_gradients_go_into_the_main_gradient_now_or_from_the_queue(config) -> None:
    x, grad = torch.randn(32, 64), torch.randn(32, 48)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        wanted = layer_gradients(kind(64, 48, SINGLE, products=Fp8Products(config)), x, grad)[2]
        for queue in (None, WeightGradientQueue()):
            layer, total, calls = kind(64, 48, SINGLE, products=Fp8Products(config)), torch.ones(48, 64), []
            layer.accumulate_weight_gradients_into({"weight": MainGradient(total, done=lambda calls=calls: calls.append(1))})
            layer.defer_weight_gradients_to(queue)
            for _ in range(2):
                layer(x.clone().requires_grad_()).backward(grad)
            if queue is not None:
                assert torch.equal(total, torch.ones(48, 64)) and not calls
                queue.drain()
            assert layer.weight.grad is None and len(calls) == 2
            torch.testing.assert_close(total, 1 + 2 * wanted)
            # What is claimed is overwritten.
            claims = [True]
            layer.accumulate_weight_gradients_into(
                {"weight": MainGradient(total, claim=lambda claims=claims: bool(claims) and claims.pop())}
            )
            for _ in range(2):
                layer(x.clone().requires_grad_()).backward(grad)
            if queue is not None:
                queue.drain()
            torch.testing.assert_close(total, 2 * wanted)


def test_one_of_two_gradients_can_be_asked_for_alone() -> None:
    layer = ColumnParallelLinear(64, 48, SINGLE, products=Fp8Products(Fp8Config()))
    x, grad = torch.randn(32, 64), torch.randn(32, 48)
    _, grad_x, grad_weight = layer_gradients(layer, x, grad)
    leaf = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(layer(leaf), leaf, grad)[0], grad_x)
    assert torch.equal(torch.autograd.grad(layer(leaf), layer.weight, grad)[0], grad_weight)
    layer.weight.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(layer(leaf), leaf, grad)[0], grad_x)


def test_weights_are_cast_once_a_step_when_somebody_says_when() -> None:
    products = Fp8Products(Fp8Config())
    layer = ColumnParallelLinear(64, 48, SINGLE, products=products)
    weight, alone = layer.weight.flatten(0, -2), SINGLE.tp
    assert products.weights(weight, alone)[0] is not products.weights(weight, alone)[0]
    layer.parameters_changed()
    first = products.weights(weight, alone)
    assert products.weights(weight, alone)[0] is first[0] and products.weights(weight, alone)[1] is first[1]
    layer.parameters_changed()
    assert products.weights(weight, alone)[0] is not first[0]
    second = products.weights(weight, alone)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    assert products.weights(weight, alone)[0].inverse == 2 * second[0].inverse


def train(model: GPTModel, steps: int, *, sliced: bool = False, groups: ProcessGroups = SINGLE) -> list[float]:
    sync = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=sliced), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=3e-3, use_distributed_optimizer=sliced), sync, groups)
    tokens = torch.arange(64).view(2, 32) * 7 % 64
    losses = []
    for _ in range(steps):
        sync.zero_grad_buffer()
        with sync.no_sync():
            loss(model, tokens[0]).backward()
        last = loss(model, tokens[1])
        last.backward()
        sync.finish_grad_sync()
        optimizer.step(grad_scale=1 / 64)
        losses.append(last.item() / 32)
    sync.close()
    return losses


def loss(model: GPTModel, tokens: Tensor) -> Tensor:
    output, _ = model(tokens, Step.causal(2, 16))
    return output.token_losses(tokens.roll(-1)).sum()


@pytest.mark.parametrize("sliced", [False, True])
def test_model_trains_as_with_casts_at_every_call(monkeypatch, sliced) -> None:
    backend = choose_backend(fp8=Fp8Config())
    kept = train(GPTModel(TINY, SINGLE, backend=backend), 4, sliced=sliced)
    monkeypatch.setattr(Fp8Products, "weight_changed", lambda self: None)
    fresh = train(GPTModel(TINY, SINGLE, backend=backend), 4, sliced=sliced)
    plain = train(GPTModel(TINY, SINGLE), 4, sliced=sliced)
    assert kept == fresh
    assert kept[-1] < kept[0] - 0.2 and kept != plain
    assert max(abs(a - b) for a, b in zip(kept, plain, strict=True)) < 0.05


@pytest.mark.parametrize(
    "recompute", [RecomputeConfig(modules=("norm",)), RecomputeConfig(modules=("mlp", "attention")), RecomputeConfig(granularity="full")]
)
def test_recomputation_keeps_the_bits(recompute) -> None:
    backend = choose_backend(fp8=Fp8Config())
    found = [train(GPTModel(TINY, SINGLE, backend=backend, recompute=choice), 3) for choice in (None, recompute)]
    assert found[0] == found[1]


def test_first_and_last_layers_can_keep_the_dtype_of_the_model() -> None:
    config = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=2, vocab_size=64)
    fp8 = Fp8Config(num_layers_at_start_in_bf16=1, num_layers_at_end_in_bf16=2)
    model = GPTModel(config, SINGLE, backend=choose_backend(fp8=fp8))
    narrow = {name.split(".")[1] for name, part in model.named_modules() if isinstance(getattr(part, "products", None), Fp8Products)}
    assert narrow == {"1"} and model.output is not None and model.output.products is None


def check_layouts(sequence_parallel: bool, recipe: str) -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    config = Fp8Config(recipe=recipe, reduce_amax=recipe == "tensorwise")
    tokens = 32
    share = slice(groups.tp.rank * tokens // 2, (groups.tp.rank + 1) * tokens // 2) if sequence_parallel else slice(None)
    options = {"dtype": torch.float64, "seed": 3}
    generator = torch.Generator().manual_seed(1)
    x, grad, wide = (torch.randn(tokens, n, generator=generator, dtype=torch.float64) for n in (64, 96, 96))
    column, row = ColumnParallelLinear(64, (2, 48), SINGLE, shard_dim=1, **options), RowParallelLinear(96, 64, SINGLE, **options)
    column.products, row.products = Fp8Products(config), Fp8Products(config)
    ours = ColumnParallelLinear(64, (2, 48), groups, shard_dim=1, products=Fp8Products(config), **options)
    ours_row = RowParallelLinear(96, 64, groups, products=Fp8Products(config), **options)
    cut = slice(groups.tp.rank * 24, (groups.tp.rank + 1) * 24)
    half = slice(groups.tp.rank * 48, (groups.tp.rank + 1) * 48)

    wanted = layer_gradients(column, x, grad)
    local_grad = grad.view(tokens, 2, 48)[:, :, cut].reshape(tokens, 48)
    found = layer_gradients(ours, x[share], local_grad)
    torch.testing.assert_close(found[0], wanted[0].view(tokens, 2, 48)[:, :, cut].reshape(tokens, 48), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[2], wanted[2][:, cut], rtol=1e-10, atol=1e-10)
    grad_y = x.flip(0)
    wanted_row = layer_gradients(row, wide, grad_y)
    found_row = layer_gradients(ours_row, wide[:, half], grad_y[share])
    torch.testing.assert_close(found_row[2], wanted_row[2][:, half], rtol=1e-10, atol=1e-10)
    if recipe == "tensorwise":
        torch.testing.assert_close(found[1], wanted[1][share], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found_row[0], wanted_row[0][share], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found_row[1], wanted_row[1][:, half], rtol=1e-10, atol=1e-10)
    else:
        # A rank scales its part of each row.
        assert relative(found[1], wanted[1][share]) < 0.05 and relative(found_row[0], wanted_row[0][share]) < 0.05


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_two_tensor_parallel_ranks_equal_one_when_they_share_scales(world, sequence_parallel, recipe) -> None:
    world(check_layouts, sequence_parallel=sequence_parallel, recipe=recipe)


def check_model(sequence_parallel: bool) -> list[float]:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
    backend = choose_backend(fp8=Fp8Config(reduce_amax=True))
    found = train(GPTModel(TINY, groups, backend=backend, dtype=torch.float64), 3, groups=groups)
    wanted = train(GPTModel(TINY, SINGLE, backend=backend, dtype=torch.float64), 3)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=2e-3, atol=0)
    own = train(GPTModel(TINY, groups, backend=choose_backend(fp8=Fp8Config()), dtype=torch.float64), 3, groups=groups)
    assert own != found
    torch.testing.assert_close(torch.tensor(own), torch.tensor(wanted), rtol=1e-2, atol=0)
    return found


@pytest.mark.world(2)
@pytest.mark.parametrize("sequence_parallel", [False, pytest.param(True, marks=pytest.mark.journey)])
def test_model_over_two_ranks_trains_as_on_one(world, sequence_parallel) -> None:
    first, second = world(check_model, sequence_parallel=sequence_parallel)
    assert first == second


def check_kernels(device: str) -> None:
    """The kernels give the bits of the torch code; inputs are values of the format, for the interpreter rounds others differently."""
    from mcore_parallel.backends import _triton_quantize as kernels

    generator = torch.Generator().manual_seed(0)
    for dtype in (E4M3, E5M2):
        largest = torch.finfo(dtype).max
        for tokens, width in ((130, 70), (128, 64), (1, 16), (300, 208)):
            x = torch.randn(tokens, width, generator=generator).mul(20).to(dtype).float()
            x[0, 0] = largest
            for scale in (1.0, 2.0**-12):
                given = (x * scale).bfloat16()
                rows, columns = quantize(given, dtype, columns=True)
                assert rows is not None and columns is not None
                given = given.to(device)
                data, turned, inverse = kernels.cast(
                    given, kernels.partial_amax(given), dtype, rows=True, columns=True, least_amax=LEAST_AMAX
                )
                assert torch.equal(inverse.cpu(), rows.inverse)
                assert torch.equal(data.cpu().view(torch.uint8), rows.data.view(torch.uint8))
                assert torch.equal(turned.cpu().view(torch.uint8), columns.data.view(torch.uint8))
                assert torch.equal(kernels.transpose(data).cpu().view(torch.uint8), columns.data.view(torch.uint8))
                only = kernels.cast(given, kernels.partial_amax(given), dtype, rows=False, columns=True, least_amax=LEAST_AMAX)
                assert only[0] is None and torch.equal(only[1].cpu().view(torch.uint8), columns.data.view(torch.uint8))
            # A program a row, which the interpreter runs one after the other.
            x = x if device == "cuda" else x[:5]
            x[:, 0] = largest
            wanted = quantize_rows(x, dtype)
            data, inverse = kernels.cast_rows(x.to(device), dtype, least_amax=LEAST_AMAX)
            assert torch.equal(inverse.cpu(), wanted.inverse) and torch.equal(data.cpu().view(torch.uint8), wanted.data.view(torch.uint8))
        stack = torch.randn(3, 130, 70, generator=generator).mul(20).to(dtype).bfloat16()
        stack[:, 5] = largest
        stack[1, :, 9] = 0
        wanted = quantize_columns(stack, dtype)
        for matrix, turned, inverse in zip(stack, wanted.data, wanted.inverse, strict=True):
            each = quantize_rows(matrix.t().contiguous(), dtype)
            assert torch.equal(inverse, each.inverse) and torch.equal(turned.view(torch.uint8), each.data.view(torch.uint8))
        data, inverse = kernels.cast_columns(stack.to(device), dtype, least_amax=LEAST_AMAX)
        assert torch.equal(inverse.cpu(), wanted.inverse) and torch.equal(data.cpu().view(torch.uint8), wanted.data.view(torch.uint8))
    # The interpreter has no NaN of fp8.
    for bad in (float("inf"),) if device == "cpu" else (float("inf"), float("nan")):
        x = torch.ones(40, 48)
        x[1, 3] = bad
        x = x.to(device)
        data, _, inverse = kernels.cast(x, kernels.partial_amax(x), E4M3, rows=True, columns=False, least_amax=LEAST_AMAX)
        assert not bool(torch.isfinite(data.float() * inverse)[1, 3])


@pytest.mark.journey
def test_kernels_equal_the_torch_code_in_the_interpreter() -> None:
    run_interpreted(__file__)
    assert not has_kernel(torch.ones(2))


if __name__ == "__main__":
    check_kernels("cpu")
    print("same")
