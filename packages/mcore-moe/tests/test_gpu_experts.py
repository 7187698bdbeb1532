# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Grouped GEMMs against one matmul per expert."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from mcore_moe import GroupedMLP, MoEConfig, MoELayer, SequentialMLP, moe_feed_forward
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.graphs import graph_modules
from mcore_parallel.models import GPTModel, Site, TransformerConfig
from mcore_parallel.nn import ACTIVATIONS, Activation, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import LoraConfig, MainGradient
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from tests.support.expert_rows import ends_of

pytestmark = pytest.mark.gpu


CUDA = torch.device("cuda")
COUNTS = [[64, 0, 17, 175], [0, 0, 0, 256], [1, 2, 3, 250]]


@pytest.mark.parametrize("counts", COUNTS)
def test_grouped_products_equal_sequential_ones(counts: list[int]) -> None:
    compare(counts)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    "activation",
    [*(Activation(name=name) for name in ACTIVATIONS), Activation(name="quick_geglu", offset=1.0, clamp=0.5)],
    ids=lambda activation: f"{activation.name}-{activation.offset}",
)
def test_grouped_products_take_every_activation(activation: Activation, bias: bool) -> None:
    compare(COUNTS[0], activation=activation, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_a_row_have_zero_gradients(dtype: torch.dtype) -> None:
    experts = GroupedMLP(4, 128, 64, ProcessGroups.single(), bias=True, dtype=dtype, device="cuda")
    y = experts(torch.empty(0, 128, device="cuda", dtype=dtype, requires_grad=True), ends_of([0, 0, 0, 0], CUDA))
    assert y.shape == (0, 128)
    y.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in experts.parameters())


def compare(counts: list[int], **options: Any) -> None:
    """Outputs and gradients in bfloat16 against one matmul per expert in float64, or gradients where the activation has a kink in bfloat16.

    An input that rounds across a kink has another gradient, in bfloat16 either way.
    """
    torch.manual_seed(0)
    groups = ProcessGroups.single()
    grouped = GroupedMLP(4, 128, 64, groups, dtype=torch.bfloat16, device="cuda", **options)
    exact, rounded = (SequentialMLP(4, 128, 64, groups, dtype=kind, device="cuda", **options) for kind in (torch.float64, torch.bfloat16))
    with torch.no_grad():
        for ours, *references in zip(grouped.parameters(), exact.parameters(), rounded.parameters(), strict=True):
            ours.normal_(std=0.1)
            for reference in references:
                reference.copy_(ours)
    activation = options.get("activation")
    has_kink = activation is not None and (activation.clamp is not None or activation.name == "relu")
    x = torch.randn(sum(counts), 128, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(sum(counts), 128, device="cuda", dtype=torch.bfloat16)
    leaves = x.clone().requires_grad_(), x.double().requires_grad_(), x.clone().requires_grad_()
    ends = ends_of(counts, CUDA)
    outputs = grouped(leaves[0], ends), exact(leaves[1], ends), rounded(leaves[2], ends)
    for output in outputs:
        (output * weight.to(output.dtype)).sum().backward()

    def error(ours: torch.Tensor, reference: torch.Tensor) -> float:
        return ((ours.double() - reference).norm() / reference.norm()).item()

    assert error(outputs[0], outputs[1]) < 1e-2
    leaf, reference_experts = (leaves[2], rounded) if has_kink else (leaves[1], exact)
    assert error(leaves[0].grad, leaf.grad.double()) < 1e-2
    for ours, reference in zip(grouped.parameters(), reference_experts.parameters(), strict=True):
        assert error(ours.grad, reference.grad.double()) < 1e-2


@pytest.mark.parametrize(("hidden_size", "ffn_size"), [(16, 8), (8, 24), (24, 40)])
def test_the_widths_that_pass_the_check_can_be_multiplied(hidden_size: int, ffn_size: int) -> None:
    from mcore_parallel.backends import check_grouped_width

    for name, width in (("hidden_size", hidden_size), ("ffn_size", ffn_size)):
        check_grouped_width(name, width, torch.bfloat16, "cuda")
    experts = GroupedMLP(2, hidden_size, ffn_size, ProcessGroups.single(), dtype=torch.bfloat16, device="cuda")
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    rows = torch.randn(6, hidden_size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    experts(rows, ends_of([4, 2], CUDA)).sum().backward()
    assert rows.grad is not None and rows.grad.isfinite().all()


@pytest.mark.parametrize(("hidden_size", "ffn_size"), [(16, 12), (12, 16)])
def test_the_widths_that_are_refused_cannot(hidden_size: int, ffn_size: int) -> None:
    experts = GroupedMLP(2, hidden_size, ffn_size, ProcessGroups.single(), dtype=torch.bfloat16, device="cuda")
    rows = torch.randn(6, hidden_size, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(RuntimeError, match="16"):
        experts(rows, ends_of([4, 2], CUDA))


def make_layer(dtype: torch.dtype, device: str, fp8: Fp8Config | None = None, *, bias: bool = False, **router: Any) -> MoELayer:
    config = TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, vocab_size=64, ffn_hidden_size=128, add_bias_linear=bias
    )
    place: Any = {"dtype": dtype, "device": torch.device(device), "layers": choose_backend("torch", fp8=fp8).layers(0, 1)}
    site = Site(layer=0, local_layer=0, config=config, groups=ProcessGroups.single(), **place)
    layer = MoELayer(MoEConfig(num_moe_experts=16, moe_router_topk=4, moe_ffn_hidden_size=128, **router), site, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return layer


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_a_layer_waits_for_the_device_nowhere_and_has_the_same_bits_twice(recipe: Any, bias: bool) -> None:
    layer = make_layer(torch.bfloat16, "cuda", None if recipe is None else Fp8Config(recipe=recipe), bias=bias)
    layer.experts.parameters_changed()
    totals = {name: torch.zeros_like(getattr(layer.experts, name), dtype=torch.float32) for name in ("up", "down")}
    layer.experts.accumulate_weight_gradients_into({name: MainGradient(total) for name, total in totals.items()})
    x, grad = (torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    step, results = Step.causal(1, 512, CUDA), []
    for turn in range(4):
        leaf = x.clone().requires_grad_()
        for total in totals.values():
            total.zero_()
        layer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        # The first turn compiles kernels.
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            y, _ = layer(leaf, step)
            y.backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert layer.experts.up.grad is None and leaf.grad is not None and layer.router.weight.grad is not None
        values = [y, leaf.grad, layer.router.weight.grad, *totals.values()]
        values += [layer.experts.up_bias.grad, layer.experts.down_bias.grad] if bias else []
        results.append([value.clone() for value in values])
    assert all(torch.equal(a, b) for again in results[1:] for a, b in zip(results[0], again, strict=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "router",
    [
        {
            "moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"), "moe_aux_loss_coeff": (0.1, 0.2), "moe_z_loss_coeff": 0.01,
        },
        {
            "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1, "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
        },
    ],
)  # fmt: skip
def test_losses_of_a_router_wait_for_the_device_nowhere(router: dict[str, Any]) -> None:
    layer = make_layer(torch.bfloat16, "cuda", **router)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    step = dataclasses.replace(Step.causal(2, 256, CUDA), valid=torch.arange(512, device="cuda") % 256 < 200)
    gradients = []
    for turn in range(3):
        leaf = x.clone().requires_grad_()
        layer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        # The first turn compiles kernels.
        torch.cuda.set_sync_debug_mode("error" if turn else "default")
        try:
            y, aux = layer(leaf, step)
            (y.float().square().mean() + aux.total()).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert layer.router.weight.grad is not None and aux.total().item() > 0
        gradients.append(layer.router.weight.grad.clone())
    assert torch.equal(gradients[1], gradients[2])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_experts_that_gather_their_rows_are_those_that_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TransformerConfig(num_layers=1, hidden_size=512, num_attention_heads=4, vocab_size=64)
    place: Any = {"dtype": torch.bfloat16, "device": CUDA, "layers": choose_backend("torch").layers(0, 1)}
    site = Site(layer=0, local_layer=0, config=model, groups=ProcessGroups.single(), **place)
    config = MoEConfig(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=384)
    layer = MoELayer(config, site, dtype=torch.bfloat16, device=CUDA)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.05)
    x, grad = (torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    gathers, step, results = GroupedMLP.gathers, Step.causal(1, 2048, CUDA), []
    if torch.cuda.get_device_capability()[0] == 9:
        assert layer.experts.gathers(x, 4096)
    for chosen in (lambda *_: False, gathers, gathers):
        monkeypatch.setattr(GroupedMLP, "gathers", chosen)
        layer.zero_grad(set_to_none=True)
        leaf = x.clone().requires_grad_()
        torch.cuda.set_sync_debug_mode("error" if len(results) == 2 else "default")
        try:
            y, _ = layer(leaf, step)
            y.backward(grad)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append([value.clone() for value in (y, leaf.grad, *(parameter.grad for parameter in layer.parameters()))])
    plain, fused, again = results
    assert all(torch.equal(one, other) for one, other in zip(fused, again, strict=True))
    for one, other in zip(fused, plain, strict=True):
        assert (one - other).float().norm() < 1e-2 * other.float().norm()


def test_a_layer_is_that_of_float64() -> None:
    wide, ours = make_layer(torch.float64, "cpu"), make_layer(torch.bfloat16, "cuda")
    x = torch.randn(512, 256).bfloat16()
    grad = torch.randn(512, 256).bfloat16()
    with torch.no_grad():
        for reference, parameter in zip(wide.parameters(), ours.parameters(), strict=True):
            reference.copy_(parameter)
    leaf, reference = x.cuda().requires_grad_(), x.double().requires_grad_()
    y, _ = ours(leaf, Step.causal(1, 512, CUDA))
    # The same choice: of nearly equal scores another one may win.
    with torch.no_grad():
        routing, _ = ours.router(leaf, Step.causal(1, 512, CUDA))
        other, _ = wide.router(reference, Step.causal(1, 512))
    same = (routing.experts_TK.cpu() == other.experts_TK).all(-1)
    assert same.float().mean() > 0.97
    wanted, _ = wide(reference, Step.causal(1, 512))
    keep = same.double()[:, None]
    y.backward((grad * keep.bfloat16()).cuda())
    wanted.backward(grad.double() * keep)

    def error(a: torch.Tensor, b: torch.Tensor) -> float:
        return ((a.double().cpu() - b).norm() / b.norm()).item()

    assert error(y[same.cuda()], wanted[same]) < 2e-2
    assert error(leaf.grad[same.cuda()], reference.grad[same]) < 2e-2
    for name in ("up", "down"):
        assert error(getattr(ours.experts, name).grad, getattr(wide.experts, name).grad) < 2e-2


@pytest.mark.parametrize("number", [math.inf, math.nan])
@pytest.mark.parametrize(
    "choices",
    [
        {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1},
        {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True, "moe_latent_size": 64},
        {"moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True},
    ],
    ids=["losses", "shared", "capacity"],
)
def test_what_is_no_number_in_padding_reaches_no_gradient(choices: dict[str, Any], number: float) -> None:
    valid = torch.arange(256, device="cuda") % 3 != 1
    step = dataclasses.replace(Step.causal(1, 256, CUDA), valid=valid)
    config = TransformerConfig(num_layers=1, hidden_size=128, num_attention_heads=4, vocab_size=256, ffn_hidden_size=64)
    place = Site(layer=0, local_layer=0, config=config, groups=ProcessGroups.single(), dtype=torch.bfloat16)
    x = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).to("cuda", torch.bfloat16)
    found: list[list[torch.Tensor]] = []
    for padding in (0.0, number):
        layer = MoELayer(MoEConfig(num_moe_experts=8, **choices), place, dtype=torch.bfloat16, device="cuda")
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator("cuda").manual_seed(parameter.numel()))
        leaf = x.masked_fill(~valid[:, None], padding).requires_grad_()
        y, aux = layer(leaf, step)
        auxiliary = aux.total()
        (y[valid].float().square().sum() + (0.0 if auxiliary is None else auxiliary)).backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
        assert leaf.grad is not None and not leaf.grad[~valid].any()
        found.append([y[valid].detach(), leaf.grad, *gradients])
    assert all(map(torch.equal, *found))


CHOICES = {
    "dropless": {},
    "capacity": {"moe_expert_capacity_factor": 1.25},
    "padded": {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True},
}


def trained(choice: str, patterns: tuple[str, ...], recipe: Any) -> tuple[list[Any], Any]:
    """Losses, values of the routers and parameters of six steps of three micro-batches, and what became of the graphs."""
    groups = ProcessGroups.single()
    config = TransformerConfig(
        num_layers=2, hidden_size=128, num_attention_heads=4, vocab_size=256, ffn_hidden_size=64, attention_backend="reference"
    )
    mixture = MoEConfig(
        num_moe_experts=8, moe_router_topk=2, moe_aux_loss_coeff=0.01, moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid", moe_shared_expert_intermediate_size=64, **CHOICES[choice],
    )  # fmt: skip
    backend = choose_backend("torch", fp8=None if recipe is None else Fp8Config(recipe=recipe))
    place: Any = {"dtype": torch.bfloat16, "device": "cuda", "seed": 3}
    model = GPTModel(config, groups, backend=backend, feed_forward=moe_feed_forward(mixture), **place)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups)
    graphs = graph_modules(model, patterns) if patterns else None
    generator, seen = torch.Generator().manual_seed(0), []
    for _ in range(6):
        rows = torch.randint(256, (3, 2, 65), generator=generator).cuda()
        mask = torch.ones(2, 64, device="cuda")
        batches = [Batch(tokens=row[:, :-1].contiguous(), labels=row[:, 1:].contiguous(), loss_mask=mask) for row in rows]
        report = train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=1e-3, groups=groups)
        seen += [report.loss, report.grad_norm, report.aux]
    states = [value.clone() for value in (*model.parameters(), *model.buffers())]
    return [seen, states], None if graphs is None else graphs.report()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
@pytest.mark.parametrize("patterns", [("layers.*",), ("layers.*.mlp",), ("layers.*.mlp.router",)], ids=["block", "layer", "router"])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_graph_of_the_layer_has_its_bits(choice: str, patterns: tuple[str, ...], recipe: Any) -> None:
    """Nothing waits for the device and no shape depends on the routing, so blocks with experts are captured whole."""
    found, report = trained(choice, patterns, recipe)
    wanted, _ = trained(choice, (), recipe)
    assert report is not None and report.graphs and report.replays and set(report.eager) <= {"warm-up"}
    assert found[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


def test_frozen_experts_in_eight_bits_are_those_with_the_rounded_weights() -> None:
    groups = ProcessGroups.single()
    rounded, narrow = (GroupedMLP(4, 64, 128, groups, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for experts in (rounded, narrow):
        experts.requires_grad_(False)
        experts.add_lora(LoraConfig(rank=8, base_dtype="fp8_weight_only"), 7)
        for name, parameter in experts.named_parameters():
            generator = torch.Generator("cuda").manual_seed(len(name))
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    assert narrow.quantize_base() and narrow.up.dtype == torch.float8_e4m3fn
    for name in ("up", "down"):
        # Exact in bfloat16.
        value = getattr(narrow, name).flatten(1, -2).float() * narrow._stored[name].inverse_NO1
        getattr(rounded, name).data.copy_(value.view_as(getattr(narrow, name)))
    ends = torch.tensor([5, 5, 30, 40], dtype=torch.int32, device="cuda")
    results = []
    for experts in (rounded, narrow):
        generator = torch.Generator("cuda").manual_seed(3)
        rows = torch.randn(40, 64, dtype=torch.bfloat16, device="cuda", generator=generator).requires_grad_()
        y = experts(rows, ends)
        y.backward(torch.randn(y.shape, dtype=y.dtype, device="cuda", generator=generator))
        adapters = [parameter.grad for parameter in experts.parameters() if parameter.requires_grad]
        results.append([y.detach(), rows.grad, *adapters])
    for found, expected in zip(*results, strict=True):
        assert found is not None and torch.equal(found, expected)
