# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts are the dense feed-forwards of the model: same activation, same biases."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_moe import GroupedMLP, MoEConfig, MoELayer, SequentialMLP, choose_experts, moe_feed_forward
from mcore_moe._experts import _rows_of_experts
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import gathered_swiglu
from mcore_parallel.models import GPTModel, Site, TransformerConfig, dense_feed_forward
from mcore_parallel.nn import ACTIVATIONS, Activation, LayerMemory, Step
from mcore_parallel.tensor_parallel import LoraConfig

CHOICES: list[dict[str, Any]] = [
    *({"activation": name} for name in ACTIVATIONS),
    {"activation": "quick_geglu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 0.5},
]


def site(**fields: Any) -> Site:
    config = TransformerConfig(num_layers=1, hidden_size=12, num_attention_heads=2, vocab_size=16, ffn_hidden_size=10, **fields)
    return Site(layer=0, local_layer=0, config=config, groups=ProcessGroups.single(), dtype=torch.float64)


def tie(dense: torch.nn.Module, experts: SequentialMLP | GroupedMLP, expert: int) -> None:
    """Parameters of one expert in a dense feed-forward."""
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            parameter.copy_(getattr(experts, name.removesuffix(".weight").replace(".bias", "_bias"))[expert])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(str(value) for value in choice.values()))
def test_a_mixture_is_a_weighted_sum_of_dense_feed_forwards(choice: dict[str, Any], bias: bool) -> None:
    torch.manual_seed(0)
    place, mixture = site(**choice, add_bias_linear=bias), MoEConfig(num_moe_experts=4, moe_router_topk=2)
    layer = MoELayer(mixture, place, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    dense = [dense_feed_forward(place) for _ in range(4)]
    for expert, module in enumerate(dense):
        tie(module, layer.experts, expert)
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    leaf, router = x.detach().clone().requires_grad_(), layer.router.weight.detach().clone().requires_grad_()
    step = Step.causal(1, 9)
    y, _ = layer(x, step)
    logits = leaf @ router.t() if layer.router.bias is None else leaf @ router.t() + layer.router.bias.detach()
    routing = choose_experts(logits, 2)
    every_TED = torch.stack([module(leaf, step)[0] for module in dense], 1)
    rows = torch.arange(9)[:, None]
    expected = (every_TED[rows, routing.experts_TK] * routing.probs_TK[..., None]).sum(1)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn_like(y)
    (y * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(x.grad, leaf.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.router.weight.grad, router.grad, rtol=1e-10, atol=1e-12)
    assert len(list(dense[0].parameters())) == len(list(layer.experts.parameters())) == (4 if bias else 2)
    for expert, module in enumerate(dense):
        for name, parameter in module.named_parameters():
            stacked = getattr(layer.experts, name.removesuffix(".weight").replace(".bias", "_bias"))
            torch.testing.assert_close(stacked.grad[expert], parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", [SequentialMLP, GroupedMLP])
@pytest.mark.parametrize("ends", [[3, 9], [4, 2], [-1, 4], [5, 5, 5]], ids=str)
def test_ends_that_are_no_rows_are_refused(kind: type[SequentialMLP | GroupedMLP], ends: list[int]) -> None:
    experts, rows = kind(2, 12, 8, ProcessGroups.single()), torch.randn(5, 12)
    message = "zip" if len(ends) == 3 else rf"ends_N=\[{ends[0]}, {ends[1]}\] of 5 rows must not fall, nor lie outside of 0..5"
    with pytest.raises(ValueError, match=message):
        experts(rows, torch.tensor(ends, dtype=torch.int32))
    # Rows behind the last expert are nobody's.
    assert experts(rows, torch.tensor([0, 4], dtype=torch.int32)).shape == rows.shape


def by_gathers(rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: Any = None) -> Tensor:
    """Stands for the grouped GEMM of a GPU, which reads no size on the host."""
    expert_R = torch.searchsorted(ends_N, torch.arange(len(rows_RI), dtype=ends_N.dtype), right=True)
    return torch.einsum("ri,roi->ro", rows_RI, F.pad(weight_NOI, (0, 0, 0, 0, 0, 1))[expert_R])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_a_layer_reads_nothing_back(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of ``test_a_layer_waits_for_the_device_nowhere`` that needs no device."""
    layer = MoELayer(MoEConfig(num_moe_experts=4, moe_aux_loss_coeff=0.1), site(add_bias_linear=bias), dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)

    def read(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host reads a value of the device")

    monkeypatch.setattr("mcore_moe._experts.grouped_matmul", by_gathers)
    for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    y, aux = layer(x, Step.causal(1, 9))
    ((y * y).sum() + aux.total()).backward()
    monkeypatch.undo()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_bias_is_the_sum_over_the_rows_of_its_expert(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for counts in ([3, 0, 40, 1], [0, 0, 0, 0], [700, 0, 0, 3]):
        bias = torch.randn(4, 5, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        num_rows = sum(counts) + 2
        grad = torch.randn(num_rows, 5, generator=generator, dtype=torch.float64).to(dtype)
        grad[sum(counts) :] = torch.nan
        gradients = [torch.autograd.grad(_rows_of_experts(bias, num_rows, ends), bias, grad)[0] for _ in range(2)]
        expected = torch.stack([rows.double().sum(0) for rows in grad[: sum(counts)].split(counts)])
        assert torch.equal(*gradients) and gradients[0].dtype == dtype
        bounds = {torch.float64: (1e-13, 1e-13), torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-8, 1e-4)}[dtype]
        torch.testing.assert_close(gradients[0].double(), expected, rtol=bounds[0], atol=bounds[1])


def test_shapes_follow_the_gate_and_the_biases() -> None:
    def shapes(**options: Any) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in GroupedMLP(3, 4, 6, ProcessGroups.single(), **options).named_parameters()}

    assert shapes() == {"up": (3, 2, 6, 4), "down": (3, 4, 6)}
    assert shapes(activation="relu") == {"up": (3, 6, 4), "down": (3, 4, 6)}
    biases = {"up_bias": (3, 2, 6), "down_bias": (3, 4)}
    assert shapes(activation=Activation(name="quick_geglu", clamp=7.0, offset=1.0), bias=True) == shapes() | biases


def test_a_model_begins_with_biases_of_zero() -> None:
    experts = moe_feed_forward(MoEConfig(num_moe_experts=4))
    model = GPTModel(site(add_bias_linear=True).config, ProcessGroups.single(), feed_forward=experts)
    values = {name: value for name, value in model.named_parameters() if ".experts." in name}
    assert {name.rpartition(".")[2]: bool(value.any()) for name, value in values.items()} == {
        "up": True, "down": True, "up_bias": False, "down_bias": False
    }  # fmt: skip


@pytest.mark.parametrize("valid", [None, [True, False, True] * 3], ids=["all tokens", "some tokens"])
def test_rows_that_the_first_gemm_gathers_give_the_same_layer(valid: list[bool] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MoELayer(MoEConfig(num_moe_experts=4, moe_router_topk=2), site(), dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, grad = torch.randn(9, 12, dtype=torch.float64), torch.randn(9, 12, dtype=torch.float64)
    step, calls, seen, runs = Step.causal(1, 9), [], [], []
    if valid is not None:
        step = dataclasses.replace(step, valid=torch.tensor(valid))
    monkeypatch.setattr("mcore_moe._experts.gathered_swiglu", lambda *inputs: calls.append(inputs) or gathered_swiglu(*inputs))
    # What works around a module sees the experts either way.
    layer.experts.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    for gathers in (False, True):
        monkeypatch.setattr("mcore_moe._experts.has_gathered_kernel", lambda *_, gathers=gathers: gathers)
        leaf = x.clone().requires_grad_()
        y, _ = layer(leaf, step)
        runs.append([y, *torch.autograd.grad(y, [leaf, *layer.parameters()], grad)])
        assert len(calls) == gathers
    assert seen == [(18, 12)] * 2
    for found, expected in zip(*runs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_experts_with_more_than_swiglu_do_not_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_moe._experts.has_gathered_kernel", lambda *_: True)
    x, groups = torch.zeros(9, 4), ProcessGroups.single()

    def gathers(**options: Any) -> bool:
        return GroupedMLP(3, 4, 6, groups, **options).gathers(x, 18)

    assert gathers() and gathers(memory=LayerMemory(recomputed=["norm"]))
    assert not any(gathers(activation=name) for name in ACTIVATIONS if name != "swiglu")
    assert not gathers(bias=True) and not gathers(activation=Activation(name="swiglu", clamp=1.0))
    assert not any(gathers(memory=LayerMemory(**{kind: ["moe_act"]})) for kind in ("recomputed", "offloaded"))
    experts = GroupedMLP(3, 4, 6, groups)
    experts.add_lora(LoraConfig(rank=2), 0)
    assert not experts.gathers(x, 18)
