# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels between a layer's products against the torch code, in Triton's interpreter and on a GPU."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import ACTIVATIONS, Activation, LayerNorm, RMSNorm, Step, apply_rotary, rotary_frequencies, rotary_tables
from mcore_parallel.nn._activations import RecomputedActivation, quantize_rows
from mcore_parallel.nn.kernels._fused import fused_layer_norm, fused_rms_norm, fused_rotary, fused_split_rotary, has_kernel
from tests.support.interpreter import run_interpreted


def check_norms(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from mcore_parallel.nn.kernels import _triton_layers

    # Few enough that a program takes several rows.
    with mock.patch.object(_triton_layers, "_NORM_PROGRAMS", 3):
        check_norms_of_all_sizes(device, dtype, tolerance)


def check_norms_of_all_sizes(device: str, dtype: torch.dtype, tolerance: float) -> None:
    for number, (tokens, width) in enumerate(((5, 48), (130, 300), (1, 1024), (67, 128), (3, 4100), (0, 16))):
        for build in (RMSNorm, LayerNorm):
            zero_centered = (number + (build is RMSNorm)) % 2 == 1
            norm = build(width, epsilon=1e-3, zero_centered=zero_centered, dtype=torch.float64)
            for parameter in norm.parameters():
                torch.nn.init.normal_(parameter)
            ours = [parameter.detach().to(device, dtype).requires_grad_() for parameter in norm.parameters()]
            for parameter, own in zip(norm.parameters(), ours, strict=True):
                parameter.data.copy_(own.detach())
            x, grad, residual = ((torch.randn(tokens, width) + 0.5).to(dtype) for _ in range(3))
            own, reference = x.to(device).requires_grad_(), x.detach().double().requires_grad_()
            fused = fused_rms_norm if len(ours) == 1 else fused_layer_norm
            (y, same), wanted = fused(own, *ours, 1e-3, shift=float(zero_centered)), norm(reference)
            assert torch.equal(same, own)
            # What flows back beside the norm is added by its kernel.
            ends = [(y, grad), (same, residual)][: 1 + number % 2]
            torch.autograd.backward([end for end, _ in ends], [flow.to(device) for _, flow in ends])
            torch.autograd.backward([wanted, reference][: len(ends)], [flow.double() for _, flow in ends])
            close(y, wanted, tolerance)
            close(own.grad, reference.grad, tolerance)
            for parameter, wide in zip(ours, norm.parameters(), strict=True):
                close(parameter.grad, wide.grad, tolerance, scale=max(1.0, tokens**0.5))


def check_strided_norm(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Per-head norms read heads out of a wider row."""
    norm, rows = RMSNorm(16), torch.randn(4, 3, 40).to(dtype)
    close(fused_rms_norm(rows.to(device)[..., 8:24], norm.weight.to(device, dtype), 1e-5)[0], norm(rows.double()[..., 8:24]), tolerance)


def check_activations(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from mcore_parallel.nn.kernels import _triton_activations

    for name in ACTIVATIONS:
        choices = [Activation(name=name)]
        if choices[0].gated:
            choices += [Activation(name=name, offset=1.0, clamp=0.7), Activation(name=name, offset=1.0, fp8_input_store=True)]
        shapes, arguments = ((3, 20), (2, 1500), (0, 8)), ((True, True), (False, True), (True, False))
        for activation, shape, (bias, weighted) in itertools.product(choices, shapes, arguments):
            first = (bias, weighted) == arguments[0]
            # The interpreter is slow: there the wide rows alone meet every choice of arguments.
            if not first and device == "cpu" and shape != shapes[1]:
                continue
            rows, width = shape
            wide = width * (1 + activation.gated)
            inputs = [torch.randn(rows, wide), torch.randn(wide) if bias else None, torch.rand(rows) if weighted else None]
            if not activation.fp8_input_store:
                against(device, dtype, tolerance, activation, inputs)
                if first:
                    against(device, dtype, tolerance, activation, [inputs[0]], recomputed=True)
                continue
            # Both sides round the same input to fp8, seldom apart by a step. The interpreter's own rounding loses carries.
            fused = _triton_activations.activate_and_store

            def stored(x: Tensor, *arguments: Any, fused: Any = fused, **options: Any) -> tuple[Tensor, ...]:
                y, narrow, scale = fused(x, *arguments, **options)
                return (y, narrow, scale) if device == "cuda" else (y, *quantize_rows(x))

            with mock.patch.object(_triton_activations, "activate_and_store", stored):
                against(device, dtype, 0.15, activation, inputs)


def against(
    device: str, dtype: torch.dtype, tolerance: float, activation: Activation, inputs: list[Tensor | None], *, recomputed: bool = False
) -> None:
    if recomputed:
        inputs = [*inputs, None, None]
    inputs = [None if x is None else x.to(dtype) for x in inputs]
    ours = [None if x is None else x.to(device).requires_grad_() for x in inputs]
    references = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    y, wanted = activation.run(*ours, True), activation.run(*references, False)
    grad = torch.randn(y.shape).to(dtype)
    wanted.backward(grad.double())
    if recomputed and ours[0] is not None:
        maker, held = RecomputedActivation(activation=activation, kernels=True), grad.to(device, copy=True)
        ours[0].grad, again = maker.backward(held, ours[0].detach())
        assert again.data_ptr() == held.data_ptr() and torch.equal(again, y)
    else:
        y.backward(grad.to(device))
    close(y, wanted, tolerance)
    for own, reference in zip(ours, references, strict=True):
        if own is not None and reference is not None:
            assert own.grad is not None and own.grad.dtype == own.dtype
            close(own.grad, reference.grad, tolerance, scale=4.0 if own.dim() == 1 else 1.0)


def check_left_out_rows(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Rows behind the number that the device holds are neither read nor written, in both directions."""
    from mcore_parallel.nn.kernels._triton_activations import activate, activate_backward

    options: dict[str, Any] = {"curve": "silu", "gated": True, "offset": 0.0, "clamp": None}
    x, weights, grad = (torch.randn(size).to(device, dtype) for size in ((4, 40), (4,), (4, 20)))
    wanted = [activate(x, None, weights, **options), *activate_backward(grad, x, None, None, weights, **options)]
    for number in (0, 3, 4):
        ends = torch.tensor([1, number], dtype=torch.int32, device=device)
        with mock.patch.object(torch, "empty", lambda size, **place: torch.full(size, 7.0, **place)):
            rows: dict[str, Any] = {**options, "num_rows": ends[-1:]}
            found = [activate(x, None, weights, **rows), *activate_backward(grad, x, None, None, weights, **rows)]
        for own, reference in zip(found, wanted, strict=True):
            assert own is not None and reference is not None and torch.equal(own[:number], reference[:number])
        assert bool((found[0][number:] == 7.0).all()) and bool((found[1][number:] == 7.0).all())


def check_narrow_rows(device: str, dtype: torch.dtype, tolerance: float) -> None:
    from mcore_parallel.nn.kernels._triton_activations import activate_and_store

    options: dict[str, Any] = {"curve": "silu", "gated": True, "offset": 0.0, "clamp": None}
    x = torch.randn(4, 5000) * torch.tensor([1.0, 1e4, 1e-6, 0.0])[:, None]
    _, narrow, scale = activate_and_store(x.to(device, dtype), None, None, 448.0, **options)
    wanted, wanted_scale = quantize_rows(x.to(dtype))
    close(scale, wanted_scale, 1e-6)
    assert narrow.float().abs().amax(-1).tolist() == [448.0, 448.0, 448.0, 0.0]
    assert (narrow.float().cpu() == wanted.float()).float().mean() > 0.9


def check_rotary(device: str, dtype: torch.dtype, tolerance: float) -> None:
    shapes = ((5, 2, 3, 8), (2, 9, 4, 96), (1, 8, 4, 128), (0, 2, 2, 8))
    for (tokens, kv_heads, group, width), share, interleaved in itertools.product(shapes, (1.0, 0.25, 0.75), (False, True)):
        qkv = torch.randn(tokens, kv_heads, group + 2, width).to(dtype)
        frequencies = rotary_frequencies(int(width * share))
        tables = rotary_tables(torch.arange(tokens) * 7, frequencies, interleaved=interleaved)
        there = tables[0].to(device), tables[1].to(device)
        ours, reference = qkv.to(device).requires_grad_(), qkv.detach().double().requires_grad_()
        q, k, v = reference[:, :, :-2].flatten(1, 2), reference[:, :, -2], reference[:, :, -1]
        wanted = (apply_rotary(q, tables, interleaved=interleaved), apply_rotary(k, tables, interleaved=interleaved), v)
        grads = [torch.randn(x.shape).to(dtype) for x in wanted]
        torch.autograd.backward(wanted, [grad.double() for grad in grads])
        found = fused_split_rotary(ours, there, interleaved=interleaved)
        torch.autograd.backward(found, [grad.to(device) for grad in grads])
        for a, b in zip((*found, ours.grad), (*wanted, reference.grad), strict=True):
            close(a, b, tolerance)
        # One by one, keys and values with the strides that they have in the packed tensor.
        ours.grad = None
        q, k, v = ours[:, :, :-2].flatten(1, 2), ours[:, :, -2], ours[:, :, -1]
        found = (fused_rotary(q, there, interleaved=interleaved), fused_rotary(k, there, interleaved=interleaved), v)
        torch.autograd.backward(found, [grad.to(device) for grad in grads])
        for a, b in zip((*found, ours.grad), (*wanted, reference.grad), strict=True):
            close(a, b, tolerance)


def close(found: Tensor | None, wanted: Tensor | None, tolerance: float, scale: float = 1.0) -> None:
    assert found is not None and wanted is not None
    torch.testing.assert_close(found.double().cpu(), wanted.double(), rtol=tolerance, atol=tolerance * scale)


CHECKS = (check_norms, check_strided_norm, check_activations, check_left_out_rows, check_narrow_rows, check_rotary)


def check_all(device: str, dtype: torch.dtype, tolerance: float) -> None:
    for check in CHECKS:
        torch.manual_seed(0)
        check(device, dtype, tolerance)


@pytest.mark.journey
def test_kernels_equal_torch_in_the_interpreter() -> None:
    run_interpreted(__file__)


def test_the_processor_and_double_precision_take_the_torch_code() -> None:
    assert not has_kernel(torch.zeros(2))
    assert not has_kernel(torch.zeros(2, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("check", CHECKS)
def test_kernels_equal_torch_on_a_gpu(check, dtype: torch.dtype, tolerance: float) -> None:
    assert has_kernel(torch.zeros(2, dtype=dtype, device="cuda"))
    torch.manual_seed(0)
    check("cuda", dtype, tolerance)


@pytest.mark.gpu
def test_layers_on_a_gpu_take_the_kernels() -> None:
    x = torch.randn(6, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    tables = rotary_tables(torch.arange(6, device="cuda"), rotary_frequencies(8, device="cuda"))
    results = (
        Activation(name="geglu")(x),
        RMSNorm(32, device="cuda")(x),
        LayerNorm(32, device="cuda")(x),
        apply_rotary(x.view(6, 4, 8), tables),
    )
    for result, name in zip(results, ("_Activate", "_Norm", "_Norm", "_Rotary"), strict=True):
        node = result.grad_fn
        assert node is not None
        # Rows may be seen in another shape.
        assert f"{name}Backward" in (node.name(), *(inner.name() for inner, _ in node.next_functions if inner is not None))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options", [{}, {"rotary_percent": 0.5}, {"rotary_interleaved": True}], ids=lambda options: "".join(options) or "plain"
)
def test_a_model_on_a_gpu_equals_the_processor(options: dict[str, Any]) -> None:
    sizes = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 80,
        "vocab_size": 64,
        "init_method_std": 0.2,
    }
    config = TransformerConfig(**sizes, activation="quick_geglu", glu_linear_offset=1.0, activation_func_clamp_value=0.7, **options)
    tokens, results = torch.arange(24) * 7 % 64, []
    for device in ("cpu", "cuda"):
        model = GPTModel(config, ProcessGroups.single(), dtype=torch.float32, device=device)
        output, _ = model(tokens.to(device), Step.causal(2, 12, device))
        output.token_losses(tokens.roll(-1).to(device)).sum().backward()
        results.append([output.logits().detach(), *(parameter.grad for parameter in model.parameters())])
    for wanted, found in zip(*results, strict=True):
        close(found, wanted, 1e-3, scale=float(wanted.abs().max()))


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_compiled_layers_on_a_gpu_equal_the_kernels() -> None:
    torch.manual_seed(0)
    norm, activation = RMSNorm(96, device="cuda"), Activation(name="swiglu", fp8_input_store=True)
    tables = rotary_tables(torch.arange(130, device="cuda"), rotary_frequencies(8, device="cuda"))

    def layers(x: Tensor) -> Tensor:
        return apply_rotary(activation(norm(x)).view(130, 4, 12), tables)

    x = torch.randn(130, 96, device="cuda", requires_grad=True)
    for function in (layers, torch.compile(layers, fullgraph=True)):
        y = function(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        if function is layers:
            wanted = y, grad
    close(y, wanted[0].cpu(), 1e-4)
    # Both round to fp8, seldom apart by a step.
    assert (grad - wanted[1]).norm() < 0.05 * wanted[1].norm()


@pytest.mark.gpu
def test_kernels_reach_behind_two_to_the_31_elements() -> None:
    rows, width = 70_000, 32_768
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, width)
    x.requires_grad_()
    last = x.detach()[-3:].double().cpu()
    tables = tuple(torch.full((rows, 128), value, device="cuda") for value in (0.6, 0.8))
    norm = RMSNorm(width)
    heads = (rows, width // 128, 128)
    for found, wanted in (
        (lambda x: fused_rms_norm(x, norm.weight.to("cuda"), 1e-5)[0], norm),
        (Activation(name="swiglu"), Activation(name="swiglu")),
        (
            lambda x: apply_rotary(x.view(heads), tables),
            lambda x: apply_rotary(x.view(3, *heads[1:]), tuple(table[-3:].cpu() for table in tables)),
        ),
    ):
        reference = last.clone().requires_grad_()
        y, expected = found(x), wanted(reference)
        close(y[-3:], expected, 3e-2)
        (grad,) = torch.autograd.grad(y[-3:].float().sum(), x)
        (wide,) = torch.autograd.grad(expected.sum(), reference)
        close(grad[-3:], wide, 3e-2)
        del y, grad


if __name__ == "__main__":
    check_all("cpu", torch.float32, 1e-5)
    print("same")
