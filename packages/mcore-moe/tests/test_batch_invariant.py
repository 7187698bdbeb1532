# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""With a batch-invariant backend the experts of a token, and the bits of its sequence, do not depend on the batch that it is in."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, MoELayer, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, LayerPatternError, ModelOutput, TransformerConfig
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.tensor_parallel import LoraConfig, add_lora

SIZES = TransformerConfig(
    num_layers=2, hidden_size=48, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=40, vocab_size=90, init_method_std=0.3
)
LENGTHS = (1, 7, 30, 47)
EXPERTS = MoEConfig(num_moe_experts=8, moe_router_topk=3)
SHARED = {"moe_shared_expert_intermediate_size": 24, "moe_shared_expert_gate": True}
# Of each kind what its mixture has, and its model.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}, {}),
    "deepseek": (
        {
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 4,
            "moe_router_group_topk": 2, "moe_router_topk": 4, "moe_router_topk_scaling_factor": 2.5, "moe_layer_freq": (0, 1), **SHARED,
        },
        {},
    ),
    "biases": ({}, {"add_bias_linear": True, "activation": "quick_geglu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 1.0}),
    "latent": (
        {"moe_latent_size": 20, "moe_router_pre_softmax": True, "moe_router_dtype": None, **SHARED}, {"activation": "squared_relu"},
    ),
    "one expert": (
        {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True, "moe_router_dtype": "fp64"}, {},
    ),
    "sqrtsoftplus": ({"moe_router_score_function": "sqrtsoftplus", "moe_router_load_balancing_type": "none"}, {}),
}  # fmt: skip


def build(
    kind: str,
    dtype: torch.dtype,
    *,
    exact: bool = True,
    device: str = "cpu",
    groups: ProcessGroups | None = None,
    recompute: RecomputeConfig | None = None,
    **changes: Any,
) -> GPTModel:
    fields, model_fields = KINDS[kind]
    mixture = dataclasses.replace(EXPERTS, **{**fields, **changes})
    config, backend = dataclasses.replace(SIZES, **model_fields), choose_backend(batch_invariant=exact)
    place: dict[str, Any] = {"dtype": dtype, "device": device, "recompute": recompute}
    model = GPTModel(config, groups or ProcessGroups.single(), feed_forward=moe_feed_forward(mixture), backend=backend, **place)
    generator = torch.Generator().manual_seed(3)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("bias"):
            value.data.copy_(0.2 * torch.randn(value.shape, generator=generator))
    return model


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(90, (length,), generator=generator) for length in LENGTHS]


def packed(parts: list[Tensor], padding: int = 0) -> tuple[Tensor, Step]:
    """Sequences behind one another; ``padding`` tokens that count for nothing are a sequence at the end."""
    parts = [*parts, torch.zeros(padding, dtype=torch.int64)] if padding else parts
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    valid = torch.arange(len(positions)) < len(positions) - padding if padding else None
    return torch.cat(parts), Step(batch_size=1, seq_len=len(positions), positions=positions, cu_seqlens=ends, valid=valid)


def outcome(model: GPTModel, tokens: Tensor, step: Step) -> Tensor:
    """[T, 2]: log-probability of each token as its own label, and entropy."""
    device = next(model.parameters()).device
    valid = None if step.valid is None else step.valid.to(device)
    output, _ = model(tokens.to(device), dataclasses.replace(step, positions=step.positions.to(device), valid=valid))
    assert isinstance(output, ModelOutput)
    return torch.stack(output.log_probs_and_entropy(tokens.to(device), 0.7), dim=1)


def check_company(model: GPTModel) -> None:
    parts = sequences()
    with torch.no_grad():
        alone = [outcome(model, part, Step.causal(1, len(part))) for part in parts]
        for order in ([0, 1, 2, 3], [3, 1], [2, 3, 0]):
            together = outcome(model, *packed([parts[i] for i in order]))
            assert torch.equal(together, torch.cat([alone[i] for i in order]))
        padded = outcome(model, *packed(parts, padding=9))[:-9]
        assert torch.equal(padded, torch.cat(alone))
        batch = outcome(model, torch.cat([parts[2]] * 3), Step.causal(3, len(parts[2])))
        assert torch.equal(batch, torch.cat([alone[2]] * 3))
        # A beginning of a sequence knows nothing of what follows.
        assert torch.equal(outcome(model, parts[3][:23], Step.causal(1, 23)), alone[3][:23])
    # A training computes the same.
    assert torch.equal(outcome(model.train(), *packed(parts)).detach(), torch.cat(alone))


MARKS = {("deepseek", torch.bfloat16): (), ("deepseek", torch.float32): pytest.mark.journey, ("one expert", torch.bfloat16): ()}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        # Every kind in the dtype of training, the one of most operations in another.
        pytest.param(kind, dtype, marks=MARKS.get((kind, dtype), pytest.mark.journey if torch.bfloat16 is dtype else pytest.mark.slow))
        for kind in KINDS
        for dtype in (torch.bfloat16, torch.float32)
    ],
    ids=str,
)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(kind: str, dtype: torch.dtype) -> None:
    check_company(build(kind, dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_values_losses_and_gradients_are_those_of_the_plain_backend(kind: str) -> None:
    tokens, step = packed(sequences(), padding=5)
    results = []
    for exact in (True, False):
        model = build(kind, torch.float64, exact=exact).train()
        output, aux = model(tokens, step)
        assert isinstance(output, ModelOutput) and aux is not None
        values = output.log_probs(tokens)[:-5]
        loss = aux.total()
        (values.sum() if loss is None else values.sum() + loss).backward()
        losses = [loss.value.detach() for _, loss in sorted(aux.losses.items())]
        results.append([values.detach(), *losses, *aux.counts.values(), *(parameter.grad for parameter in model.parameters())])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["deepseek", "latent"])
def test_a_step_without_tokens_gives_gradients_of_zero(kind: str, exact: bool) -> None:
    model = build(kind, torch.float32, exact=exact)
    outcome(model, *packed([torch.zeros(0, dtype=torch.int64)])).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_a_recomputed_activation_changes_no_bit() -> None:
    tokens, step = packed(sequences())
    results = []
    for recompute in (None, RecomputeConfig(modules=("moe_act",))):
        model = build("plain", torch.float32, recompute=recompute)
        values = outcome(model, tokens, step)
        values.sum().backward()
        results.append([values.detach(), *(parameter.grad for parameter in model.parameters())])
    for kept, again in zip(*results, strict=True):
        assert torch.equal(kept, again)


def test_a_recorded_routing_is_replayed_to_the_bit() -> None:
    model, parts = build("deepseek", torch.float32), sequences()
    tokens, step = packed(parts)
    recorded: dict[int, list[Tensor]] = {}
    with torch.no_grad():
        wanted = outcome(
            model, tokens, dataclasses.replace(step, routing_recorder=lambda layer, *picks: recorded.update({layer: [*picks]}))
        )
        experts, weights = (torch.stack([torch.zeros_like(recorded[1][i]), recorded[1][i]], dim=1) for i in range(2))
        replayed = dataclasses.replace(step, routed_experts=experts, routed_weights=weights)
        assert torch.equal(outcome(model, tokens, replayed), wanted)
        assert torch.equal(outcome(model, tokens, dataclasses.replace(replayed, routed_weights=None)), wanted)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor=1.0: an expert drops"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type='sinkhorn'"),
        ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps=0.1: it is noise"),
        ({"moe_dispatch_fwd_dtype": "fp8"}, "moe_dispatch_fwd_dtype='fp8'"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True"),
        ({"moe_router_dtype": "fp64", "device": "cuda"}, "moe_router_dtype='fp64': cuda has no kernel; set 'fp32'"),
        ({"num_moe_experts": 2048, "device": "cuda"}, "num_moe_experts=2048: use at most 1024"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_has_no_such_path_is_refused_by_name(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine without Triton would refuse the device first.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(ValueError, match=f"no path for a mixture with {message}"):
        build("plain", torch.float32, **{"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None, **changes})


def test_of_a_pattern_without_experts_the_pattern_is_refused_and_no_mixture() -> None:
    experts = moe_feed_forward(dataclasses.replace(EXPERTS, moe_expert_capacity_factor=1.0, moe_aux_loss_coeff=0.0))
    place: dict[str, Any] = {"feed_forward": experts, "backend": choose_backend(batch_invariant=True)}
    with pytest.raises(LayerPatternError, match=r"hybrid_layer_pattern='\*-' has no E for the feed_forward that was given"):
        GPTModel(dataclasses.replace(SIZES, hybrid_layer_pattern="*-"), ProcessGroups.single(), **place)
    with pytest.raises(ValueError, match="no path for a mixture with moe_expert_capacity_factor=1.0"):
        GPTModel(dataclasses.replace(SIZES, hybrid_layer_pattern="*E"), ProcessGroups.single(), **place)


@pytest.mark.parametrize("layers", [range(1), range(1, 2)], ids=["dense", "mixture"])
def test_inputs_in_fp8_are_refused_by_every_pipeline_stage(layers: range) -> None:
    experts = moe_feed_forward(dataclasses.replace(EXPERTS, moe_layer_freq=(0, 1)), fp8_input_store=True)
    exact = choose_backend(batch_invariant=True)
    with pytest.raises(ValueError, match="fp8_input_store=True has no path beside batch_invariant=True of the backend; leave one out"):
        GPTModel(SIZES, ProcessGroups.single(), layers=layers, feed_forward=experts, backend=exact)


def check_expert_parallel(kind: str, dtype: torch.dtype) -> None:
    groups, parts = ProcessGroups.build(ParallelPlan(dp=2, ep=2)), sequences()
    mine = [parts[i] for i in ((0, 2, 1) if groups.dp.rank else (3, 1))]
    whole, cut = build(kind, dtype), build(kind, dtype, groups=groups)
    for training in (False, True):
        alone = [outcome(whole, part, Step.causal(1, len(part))) for part in mine]
        assert torch.equal(outcome(cut.train(training), *packed(mine, padding=3))[:-3], torch.cat(alone))


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=pytest.mark.journey), torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["deepseek", "latent"])
def test_tokens_that_travel_to_experts_of_other_ranks_have_the_bits_of_one_rank(world, kind: str, dtype: torch.dtype) -> None:
    world(check_expert_parallel, kind=kind, dtype=dtype)


def test_exchanges_that_add_up_on_the_way_are_refused_by_name() -> None:
    groups = dataclasses.replace(ProcessGroups.single(), plan=ParallelPlan(dp=2, ep=2))
    for name in ("allgather", "flex"):
        with pytest.raises(ValueError, match=f"no path for a mixture with moe_token_dispatcher_type='{name}': .* with ep=2 set 'alltoall'"):
            build("plain", torch.float32, groups=groups, moe_token_dispatcher_type=name)


@pytest.mark.parametrize(("plan", "message"), [({"etp": 2, "dp": 2}, "etp=2"), ({"tp": 2}, "tp=2")], ids=str)
def test_layouts_without_such_a_path_are_refused_by_name(plan: dict[str, int], message: str) -> None:
    groups = dataclasses.replace(ProcessGroups.single(), plan=ParallelPlan(**plan))
    with pytest.raises(ValueError, match=f"no path for a mixture with {message}"):
        build("plain", torch.float32, groups=groups)


def test_adapters_and_weights_in_fp8_are_refused_by_name() -> None:
    model = build("plain", torch.float32)
    with pytest.raises(ValueError, match="batch-invariant matmuls"):
        add_lora(model, LoraConfig(rank=2, alpha=4.0, targets=("mlp.experts",)), ProcessGroups.single())
    layer = model.layers["0"].mlp
    assert isinstance(layer, MoELayer)
    assert "build the model without batch_invariant" in (layer.fp8_obstacle() or "")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "one expert"])
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    changes = {"moe_latent_size": 24} if kind == "latent" else {}
    check_company(build(kind, dtype, device="cuda", **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "deepseek", "biases"])
def test_values_and_gradients_on_a_gpu_are_those_of_the_cpu_and_repeat_bit_by_bit(kind: str) -> None:
    tokens, step = packed(sequences())
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.float32)):
        model = build(kind, dtype, device=device)
        values = outcome(model, tokens, step)
        values.sum().backward()
        results.append([values.detach(), *(parameter.grad for parameter in model.parameters())])
    for wanted, ours, again in zip(*results, strict=True):
        torch.testing.assert_close(ours.double().cpu(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
        assert torch.equal(ours, again)
