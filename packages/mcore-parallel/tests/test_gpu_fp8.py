# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""fp8 GEMMs on a GPU, by torch and by Transformer Engine."""

import importlib.util
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ProcessGroups, named_shards
from mcore_parallel.backends import Backend, Fp8Config, choose_backend, grouped_matmul, quantize_base
from mcore_parallel.backends._doctor import main
from mcore_parallel.backends._fp8_loss import Fp8LossProducts
from mcore_parallel.backends._quantize import has_kernel, quantize, quantize_rows, scaled_product
from mcore_parallel.backends._quantized_base import StoredProducts
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import AttentionSpec, RecomputeConfig, Step, choose_attention
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import ColumnParallelLinear, LoraConfig, MainGradient, Route, add_lora, fused_linear_cross_entropy
from tests.support.expert_rows import ends_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"),
    # Transformer Engine uses what torch deprecates.
    pytest.mark.filterwarnings("default"),
]
needs_te = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs transformer_engine")
SINGLE = ProcessGroups.single()
TINY = TransformerConfig(num_layers=2, hidden_size=128, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=256, vocab_size=256)
E4M3 = torch.float8_e4m3fn
TORCH = [("torch", Fp8Config()), ("torch", Fp8Config(recipe="rowwise")), ("torch", Fp8Config(weight_gradients=False))]
TE = [("te", Fp8Config(recipe=recipe)) for recipe in ("tensorwise", "delayed", "blockwise")]
ALL = [*TORCH, *(pytest.param(*case, marks=needs_te) for case in TE)]
PLAIN = [("torch", None), pytest.param("te", None, marks=needs_te)]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, device="cuda")).to(dtype)


def relative(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def gradients(layer: nn.Module, x: Tensor, grad: Tensor, backend: Backend) -> list[Tensor]:
    """Output, gradient of the input, gradients of the parameters, of the second call: delayed scales come from the first."""
    leaf = x.clone().requires_grad_()
    y = leaf
    for _ in range(2):
        layer.zero_grad()
        leaf.grad = None
        with backend.running(SINGLE):
            y = layer(leaf)
        y.backward(grad)
    assert leaf.grad is not None
    return [y.detach(), leaf.grad, *(weight.grad for weight in layer.parameters() if weight.grad is not None)]


def test_kernels_give_the_bits_of_the_torch_code() -> None:
    assert has_kernel(torch.ones(2, device="cuda"))
    runpy.run_path(str(Path(__file__).with_name("test_fp8.py")))["check_kernels"]("cuda")


def test_kernel_of_the_narrow_gradient_gives_what_the_torch_code_does() -> None:
    runpy.run_path(str(Path(__file__).with_name("test_fp8_loss.py")))["check_kernel"]("cuda")


@pytest.mark.parametrize("gradient_format", [None, "e4m3"])
def test_loss_from_eight_bit_factors_is_near_the_wide_one(gradient_format) -> None:
    hidden, weight = draw(2048, 512).requires_grad_(), draw(4096, 512, scale=0.05, seed=1).requires_grad_()
    target = torch.randint(0, 4000, (2048,), device="cuda")
    weights = torch.ones(2048, device="cuda")
    target[::7] = -100
    route = Route(group=SINGLE.tp, sequence_parallel=False)
    products = Fp8LossProducts(Fp8Config(gradient_format=gradient_format))
    found = products.losses(hidden, weight, target, weights, route, 4000)
    wide = fused_linear_cross_entropy(hidden.float(), weight.float(), target, SINGLE.tp, vocab_size=4000)
    assert relative(found, wide) < 0.01
    wanted = torch.autograd.grad(wide.sum(), (hidden, weight))
    ours = torch.autograd.grad(found.sum(), (hidden, weight), retain_graph=True)
    for mine, theirs in zip(ours, wanted, strict=True):
        assert relative(mine.float(), theirs.float()) < (0.08 if gradient_format is None else 0.05)
    total = torch.ones(4096, 512, device="cuda")
    sink = products.losses(hidden, weight, target, weights, replace(route, main_grad=MainGradient(total)), 4000)
    sink.sum().backward()
    assert weight.grad is None and relative(total - 1, ours[1].float()) < 0.005


@pytest.mark.parametrize("by_rows", [False, True])
def test_units_multiply_as_the_emulation_does(by_rows) -> None:
    cast = quantize_rows if by_rows else lambda x, dtype: quantize(x, dtype)[0]
    a, b = cast(draw(256, 512), E4M3), cast(draw(384, 512, seed=1), E4M3)
    exact = a.value(torch.float64) @ b.value(torch.float64).t()
    for dtype, bound in ((torch.bfloat16, 4e-3), (torch.float32, 4e-3 if by_rows else 1e-3)):
        found = scaled_product(a, b, dtype)
        assert found.dtype == dtype and relative(found, exact) < bound
        assert relative(scaled_product(a, b, dtype, fast=True), exact) < 1e-2


@pytest.mark.parametrize("base_dtype", ["fp8", "fp8_weight_only"])
def test_frozen_weights_in_eight_bits_multiply_as_they_are_stored(base_dtype) -> None:
    layer = ColumnParallelLinear(512, (2, 384), SINGLE, shard_dim=1, dtype=torch.bfloat16, device="cuda")
    model = nn.ModuleDict({"layer": layer})
    add_lora(model, LoraConfig(rank=4, targets=("layer",), base_dtype=base_dtype), SINGLE)
    before = torch.cuda.memory_allocated()
    assert quantize_base(model) == ["layer"]
    assert torch.cuda.memory_allocated() < before - 0.9 * layer.weight.numel()
    assert isinstance(layer.products, StoredProducts)
    rounded = layer.weight.flatten(0, -2).double() * layer.products.inverse_O1.double()
    for tokens, bound in ((1024, 0.05 if base_dtype == "fp8" else 0.006), (1000, 0.006)):
        x, grad = draw(tokens, 512).requires_grad_(), draw(tokens, 768, scale=1e-3, seed=1)
        y = layer(x)
        y.backward(grad)
        assert x.grad is not None and y.dtype == x.grad.dtype == torch.bfloat16
        assert relative(y.detach(), x.detach().double() @ rounded.t()) < bound
        assert relative(x.grad, grad.double() @ rounded) < bound


@pytest.mark.parametrize(("name", "fp8"), [*PLAIN, *ALL])
@pytest.mark.parametrize("kind", ["column", "row", "norm_column"])
def test_linear_layers_stay_within_the_bounds_of_the_format(kind, name, fp8) -> None:
    backend = choose_backend(name, fp8=fp8)
    layers = backend.layers(0, 1)
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    if kind == "norm_column":
        layer = layers.norm_linear(512, (2, 384), SINGLE, shard_dim=1, **options)
    else:
        layer = (layers.column_linear if kind == "column" else layers.row_linear)(512, 768, SINGLE, **options)
    x, grad = draw(1024, 512), draw(1024, 768, scale=1e-3, seed=1)
    found = gradients(layer, x, grad, backend)
    shapes = {parameter: tuple(value.shape) for parameter, value in layer.named_parameters()}
    weight = {"norm.weight": (512,), "linear.weight": (2, 384, 512)} if kind == "norm_column" else {"weight": (768, 512)}
    assert shapes == weight and {shard.name: shard.spec.shape for shard in named_shards(layer)} == weight

    wide = [parameter.detach().float().requires_grad_() for parameter in layer.parameters()]
    leaf = x.float().requires_grad_()
    inner = leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + 1e-5) * wide[0] if kind == "norm_column" else leaf
    y = inner @ wide[-1].flatten(0, -2).t()
    wanted = [y.detach(), *torch.autograd.grad(y, [leaf, *wide], grad.float())]
    assert len(found) == len(wanted)
    # Half a step of e4m3 is 2^-4 of a value and of e5m2 2^-3, of which a mean over products leaves a third or so.
    bounds = [0.006] * 4 if fp8 is None else [0.05, 0.08, *([0.08] * (len(wanted) - 2))]
    for ours, exact, bound in zip(found, wanted, bounds, strict=False):
        assert relative(ours.view_as(exact), exact) < bound


@pytest.mark.parametrize(("name", "fp8"), [*PLAIN, *ALL])
def test_weight_gradients_are_added_to_the_float32_sum(name, fp8) -> None:
    backend = choose_backend(name, fp8=fp8)
    layer = backend.layers(0, 1).column_linear(512, 768, SINGLE, dtype=torch.bfloat16, device="cuda")
    x, grad = draw(1024, 512), draw(1024, 768, scale=1e-3, seed=1)
    wanted = gradients(layer, x, grad, backend)[2]
    layer.zero_grad()
    calls: list[int] = []
    total = torch.full((768, 512), 2.0, device="cuda")
    layer.accumulate_weight_gradients_into({"weight": MainGradient(total, done=lambda: calls.append(1))})
    layer.parameters_changed()
    for _ in range(2):
        with backend.running(SINGLE):
            y = layer(x.clone().requires_grad_())
        y.backward(grad)
    assert layer.weight.grad is None and len(calls) == 2
    assert relative(total - 2.0, 2 * wanted.float()) < 0.01


@pytest.mark.parametrize(("name", "fp8"), ALL)
def test_calls_that_do_not_fill_a_tile_keep_the_dtype_of_the_model(name, fp8) -> None:
    backend = choose_backend(name, fp8=fp8)
    layer = backend.layers(0, 1).column_linear(512, 768, SINGLE, dtype=torch.bfloat16, device="cuda")
    x = draw(17, 512)
    with backend.running(SINGLE):
        y = layer(x)
    assert relative(y, x.float() @ layer.weight.float().t()) < 0.006


@needs_te
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_of_transformer_engine_equals_ours(zero_centered) -> None:
    x, grad = draw(512, 1024, scale=3.0), draw(512, 1024, seed=1)
    found = []
    for name in ("torch", "te"):
        backend = choose_backend(name)
        norm = backend.layers(0, 1).norm(1024, zero_centered=zero_centered, epsilon=1e-6, dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            norm.weight.copy_(draw(1024, seed=2))
        found.append(gradients(norm, x, grad, backend))
        assert [(shard.name, shard.spec.shape) for shard in named_shards(norm)] == [("weight", (1024,))]
    for theirs, ours in zip(found[1], found[0], strict=True):
        assert relative(theirs, ours) < 0.006


@pytest.mark.parametrize(("name", "fp8"), [*PLAIN, pytest.param("te", Fp8Config(), marks=needs_te)])
@pytest.mark.parametrize("rows", [[64, 0, 128, 32], [63, 0, 130, 1], [0, 0, 0, 0]], ids=str)
def test_experts_are_multiplied_one_by_one(name, fp8, rows) -> None:
    products = choose_backend(name, fp8=fp8).layers(0, 1).grouped_products(256, 512, SINGLE)
    weight = draw(4, 512, 256, scale=0.06).requires_grad_()
    # Three rows behind the last expert belong to none.
    x, grad = draw(sum(rows) + 3, 256), draw(sum(rows), 512, seed=1)
    leaf = x.clone().requires_grad_()
    y = (grouped_matmul if products is None else products.matmul)(leaf, weight, ends_of(rows, "cuda"), None)[: sum(rows)]
    grad_x, grad_weight = torch.autograd.grad(y, [leaf, weight], grad)
    ours = [y.detach(), grad_x[: sum(rows)], grad_weight]
    wide, exact_weight = x[: sum(rows)].float().requires_grad_(), weight.detach().float().requires_grad_()
    exact = torch.cat([part @ expert.t() for part, expert in zip(wide.split(rows), exact_weight, strict=True)])
    wanted = [exact.detach(), *torch.autograd.grad(exact, [wide, exact_weight], grad.float())]
    for own, other in zip(ours, wanted, strict=True):
        assert not sum(rows) or relative(own, other) < (0.006 if fp8 is None else 0.08)
    assert sum(rows) or not grad_weight.any()


@needs_te
@pytest.mark.parametrize("options", [{}, {"window": (127, 0)}, {"causal": False}])
def test_attention_of_transformer_engine_is_the_reference(options) -> None:
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, **options)
    q, k, v = draw(1024, 8, 64), draw(1024, 2, 64, seed=1), draw(1024, 2, 64, seed=2)
    step = Step.causal(2, 512, device="cuda")
    theirs, ours = (choose_attention(spec, SINGLE, name)(q, k, v, 0, step) for name in ("te", "reference"))
    assert relative(theirs, ours) < 0.01


def loss(model: GPTModel, tokens: Tensor) -> Tensor:
    output, _ = model(tokens, Step.causal(2, tokens.numel() // 2, device="cuda"))
    return output.token_losses(tokens.roll(-1)).sum()


def train(backend: Backend | None, *, steps: int = 20, sliced: bool = False, recompute: RecomputeConfig | None = None) -> Tensor:
    """Losses of a tiny model on two batches in turn, of two micro-batches each."""
    model = GPTModel(TINY, SINGLE, backend=backend, recompute=recompute, dtype=torch.bfloat16, device="cuda", seed=1)
    sync = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=sliced), model, SINGLE)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=sliced), sync, SINGLE)
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = torch.randint(0, 256, (2, 2, 256), device="cuda", generator=generator)
    losses = []
    for index in range(steps):
        sync.zero_grad_buffer()
        with sync.no_sync():
            first = loss(model, tokens[index % 2, 0])
            first.backward()
        second = loss(model, tokens[index % 2, 1])
        second.backward()
        sync.finish_grad_sync()
        optimizer.step(grad_scale=1 / 512)
        losses.append((first + second).detach() / 512)
    sync.close()
    return torch.stack(losses).float().cpu()


@pytest.mark.parametrize(("name", "fp8"), [pytest.param("te", None, marks=needs_te), *ALL])
def test_loss_curve_is_that_of_bfloat16(name, fp8) -> None:
    plain, narrow = train(None), train(choose_backend(name, fp8=fp8))
    assert plain[-1] < plain[0] - 0.5
    # Delayed scales begin at one and need some steps to fit.
    bound = 0.005 if fp8 is None else 0.03 if fp8.recipe == "delayed" else 0.01
    assert ((narrow - plain).abs() / plain).max() < bound


@pytest.mark.parametrize(("name", "fp8"), [("torch", Fp8Config()), pytest.param("te", Fp8Config(), marks=needs_te)])
@pytest.mark.parametrize("options", [{"sliced": True}, {"recompute": RecomputeConfig(granularity="full")}])
def test_distributed_optimizer_and_recomputation_follow_the_same_curve(options, name, fp8) -> None:
    backend = choose_backend(name, fp8=fp8)
    plain, other = train(backend, steps=8), train(backend, steps=8, **options)
    assert ((other - plain).abs() / plain).max() < 0.005


@pytest.mark.parametrize(("name", "fp8"), [*ALL, pytest.param("te", None, marks=needs_te)])
def test_checkpoints_go_between_backends(name, fp8) -> None:
    ours = GPTModel(TINY, SINGLE, dtype=torch.bfloat16, device="cuda", seed=1)
    theirs = GPTModel(TINY, SINGLE, backend=choose_backend(name, fp8=fp8), dtype=torch.bfloat16, device="cuda", seed=1)
    found, wanted = ([(shard.name, shard.spec) for shard in named_shards(model)] for model in (theirs, ours))
    assert found == wanted
    tokens = torch.randint(0, 256, (256,), device="cuda")
    before = loss(theirs, tokens)
    # Everything that a state has is a parameter of the same bits, before and after a forward.
    state = theirs.state_dict()
    assert list(state) == list(ours.state_dict()) and all(torch.equal(state[key], value) for key, value in ours.state_dict().items())
    assert relative(before, loss(ours, tokens)) < 0.01
    with torch.no_grad():
        theirs.load_state_dict({key: value * 1.5 for key, value in state.items()})
        ours.load_state_dict({key: value * 1.5 for key, value in ours.state_dict().items()})
        assert relative(loss(theirs, tokens), loss(ours, tokens)) < 0.02


def test_recipes_of_a_newer_generation_are_refused(capsys) -> None:
    if torch.cuda.get_device_capability() < (10, 0):
        for recipe in ("mxfp8", "nvfp4"):
            with pytest.raises(ValueError, match="Blackwell"):
                choose_backend("te", fp8=Fp8Config(recipe=recipe))
    assert main([]) == 0
    assert "fp8, tensorwise" in capsys.readouterr().out
