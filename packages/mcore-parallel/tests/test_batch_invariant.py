# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""With a batch-invariant backend the bits of a sequence do not depend on the batch that it is in."""

import dataclasses
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.models import GPTModel, ModelOutput, TransformerConfig
from mcore_parallel.nn import AttentionSpec, GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig, Step, choose_attention
from mcore_parallel.tensor_parallel import LoraConfig, add_lora

SIZES = TransformerConfig(
    num_layers=2, hidden_size=48, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=72, vocab_size=90, init_method_std=0.2
)
LENGTHS = (1, 7, 30, 66)
LATENT = LatentAttentionConfig(q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=12)
MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=16)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=6, key_head_dim=7, value_head_dim=5, chunk_size=16)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"window_size": (9, 0), "softmax_type": "learnable", "qk_layernorm": True},
    {"softmax_type": "off-by-one", "normalization": "LayerNorm", "add_bias_linear": True, "activation": "gelu"},
    {"share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute", "max_position_embeddings": 80},
    {"attention_output_gate": True, "qk_layernorm": True, "qk_layernorm_across_heads": True},
    {"latent_attention": LATENT, "rotary_interleaved": True},
    {"latent_attention": dataclasses.replace(LATENT, q_lora_rank=None, v_head_dim=11), "window_size": (9, 0), "add_bias_linear": True},
    {"num_layers": 3, "hybrid_layer_pattern": "M*M", "mamba": MAMBA},
    {"num_layers": 3, "hybrid_layer_pattern": "G*-", "delta_net": DELTA},
]


def build(
    groups: ProcessGroups | None = None, *, exact: bool = True, dtype: torch.dtype = torch.float32, device: str = "cpu", **fields: Any
) -> GPTModel:
    backend = choose_backend(batch_invariant=exact)
    # Latents have no grouped queries.
    config = dataclasses.replace(SIZES, **{**({"num_query_groups": None} if "latent_attention" in fields else {}), **fields})
    return GPTModel(config, groups or ProcessGroups.single(), backend=backend, dtype=dtype, device=device, unpadded_vocab_size=87)


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(87, (length,), generator=generator) for length in LENGTHS]


def outcome(model: GPTModel, tokens: torch.Tensor, step: Step) -> torch.Tensor:
    """[T, 2]: log-probability of each token as its own label, and entropy."""
    device = next(model.parameters()).device
    tokens, step = tokens.to(device), dataclasses.replace(step, positions=step.positions.to(device))
    output, _ = model(tokens, step)
    assert isinstance(output, ModelOutput)
    values = output.log_probs_and_entropy(tokens, 0.7)
    assert torch.equal(values[0], output.log_probs(tokens, 0.7))
    return torch.stack(values, dim=1)


def packed(parts: list[torch.Tensor]) -> tuple[torch.Tensor, Step]:
    ends = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    return torch.cat(parts), Step(batch_size=1, seq_len=len(positions), positions=positions, cu_seqlens=ends)


def alone_and_packed(groups: ProcessGroups | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu", **fields: Any) -> None:
    model, parts = build(groups, dtype=dtype, device=device, **fields), sequences()
    with torch.no_grad():
        alone = [outcome(model, part, Step.causal(1, len(part))) for part in parts]
        for order in ([0, 1, 2, 3], [3, 1], [2, 3, 0]):
            together = outcome(model, *packed([parts[i] for i in order]))
            assert torch.equal(together, torch.cat([alone[i] for i in order]))
        batch = outcome(model, torch.cat([parts[2]] * 3), Step.causal(3, len(parts[2])))
        assert torch.equal(batch, torch.cat([alone[2]] * 3))
        # A beginning of a sequence knows nothing of what follows.
        assert torch.equal(outcome(model, parts[3][:40], Step.causal(1, 40)), alone[3][:40])


NAMES = [
    "plain",
    "window and sinks",
    "off-by-one",
    "tied",
    "gate and norms across heads",
    "latent",
    "latent of full queries",
    "mamba",
    "delta net",
]


MARKS = {
    ("window and sinks", torch.float32): pytest.mark.journey,
    ("window and sinks", torch.float64): (),
    ("gate and norms across heads", torch.bfloat16): (),
}


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        # Every variant in the dtype of training, the one of most operations in all of them.
        pytest.param(
            fields,
            dtype,
            id=f"{name}-{dtype}",
            marks=MARKS.get((name, dtype), pytest.mark.journey if torch.bfloat16 is dtype else pytest.mark.slow),
        )
        for name, fields in zip(NAMES, VARIANTS, strict=True)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ],
)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(fields: dict[str, Any], dtype: torch.dtype) -> None:
    alone_and_packed(dtype=dtype, **fields)


def mixed_positions(device: str, dtype: torch.dtype) -> None:
    """Of images and text, whose three components differ; where they do not, the bits are those of one component."""
    model, parts = build(dtype=dtype, device=device, position_embedding_type="mrope", mrope_section=(1, 3, 2)), sequences()
    generator = torch.Generator().manual_seed(4)
    places = [torch.randint(100, (3, len(part)), generator=generator) for part in parts]
    with torch.no_grad():
        alone = [
            outcome(model, part, dataclasses.replace(Step.causal(1, len(part)), positions=place))
            for part, place in zip(parts, places, strict=True)
        ]
        tokens, step = packed(parts)
        assert torch.equal(outcome(model, tokens, dataclasses.replace(step, positions=torch.cat(places, dim=1))), torch.cat(alone))
        text = outcome(model, tokens, dataclasses.replace(step, positions=step.positions.expand(3, -1)))
        assert torch.equal(text, outcome(model, tokens, step)) and not torch.equal(text, torch.cat(alone))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_sequence_with_positions_of_three_components_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    mixed_positions("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_positions_of_three_components_on_a_gpu(dtype: torch.dtype) -> None:
    mixed_positions("cuda", dtype)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("fields", [{}, {"latent_attention": LATENT}, *VARIANTS[-2:]], ids=["plain", "latent", "mamba", "delta net"])
def test_a_step_without_tokens_gives_gradients_of_zero(fields: dict[str, Any], exact: bool) -> None:
    model = build(exact=exact, **fields)
    tokens, step = packed([torch.zeros(0, dtype=torch.int64)])
    outcome(model, tokens, step).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, torch.zeros_like(parameter))


def further_heads(device: str, dtype: torch.dtype) -> None:
    """Heads that predict further tokens have the same bits for a sequence alone and in a batch, and so has the model beside them."""
    model, parts = build(dtype=dtype, device=device, mtp_num_layers=2, qk_layernorm=True).train(), sequences()

    def outcomes(tokens: torch.Tensor, step: Step) -> torch.Tensor:
        """[T, 3]: log-probabilities by the model and its heads."""
        tokens = tokens.to(device)
        output, _ = model(tokens, dataclasses.replace(step, positions=step.positions.to(device)))
        assert isinstance(output, ModelOutput) and len(output.depths) == 2
        return torch.stack([one.log_probs(tokens).detach() for one in (output, *output.depths)], dim=1)

    alone = [outcomes(part, Step.causal(1, len(part))) for part in parts]
    for order in ([0, 1, 2, 3], [3, 1]):
        assert torch.equal(outcomes(*packed([parts[i] for i in order])), torch.cat([alone[i] for i in order]))


@pytest.mark.journey
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_heads_of_further_tokens_have_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    further_heads("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_heads_of_further_tokens_on_a_gpu(dtype: torch.dtype) -> None:
    further_heads("cuda", dtype)


def check_tensor_parallel() -> None:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))
    alone_and_packed(groups)
    alone_and_packed(groups, latent_attention=LATENT)
    for fields in VARIANTS[-2:]:
        alone_and_packed(groups, **fields)
    with pytest.raises(ValueError, match="no path for tp=2 with qk_layernorm_across_heads=True"):
        build(groups, qk_layernorm=True, qk_layernorm_across_heads=True)


@pytest.mark.journey
@pytest.mark.world(2)
def test_over_two_tensor_parallel_ranks_too(world) -> None:
    world(check_tensor_parallel)


@pytest.mark.parametrize("fields", VARIANTS, ids=NAMES)
def test_values_and_gradients_are_those_of_the_plain_backend(fields: dict[str, Any]) -> None:
    tokens, step = packed(sequences())
    results = []
    for exact in (True, False):
        model = build(exact=exact, dtype=torch.float64, **fields)
        values = outcome_of(model, tokens, step)
        (values[:, 0].sum() + 0.3 * values[:, 1].square().sum()).backward()
        results.append((values.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    (ours, our_grads), (plain, plain_grads) = results
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-10)
    for name, grad in plain_grads.items():
        torch.testing.assert_close(our_grads[name], grad, rtol=1e-9, atol=1e-9, msg=name)


def outcome_of(model: GPTModel, tokens: torch.Tensor, step: Step) -> torch.Tensor:
    output, _ = model(tokens, step)
    assert isinstance(output, ModelOutput)
    return torch.stack(output.log_probs_and_entropy(tokens, 0.7), dim=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fields", VARIANTS, ids=NAMES)
def test_a_sequence_has_the_same_bits_alone_and_in_any_batch_on_a_gpu(fields: dict[str, Any], dtype: torch.dtype) -> None:
    alone_and_packed(dtype=dtype, device="cuda", **fields)


@pytest.mark.gpu
@pytest.mark.parametrize("fields", VARIANTS, ids=NAMES)
def test_values_and_gradients_on_a_gpu_are_those_of_the_cpu_and_repeat_bit_by_bit(fields: dict[str, Any]) -> None:
    tokens, step = packed(sequences())
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.float32)):
        model = build(dtype=dtype, device=device, **fields)
        values = outcome(model, tokens, step)
        (values[:, 0].sum() + 0.3 * values[:, 1].square().sum()).backward()
        results.append([values.detach(), *(parameter.grad for parameter in model.parameters())])
    for wanted, ours, again in zip(*results, strict=True):
        torch.testing.assert_close(ours.double().cpu(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
        assert torch.equal(ours, again)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_backend": "sdpa"}, "batch_invariant=True"),
        ({"device": "cuda", **VARIANTS[-2], "mamba": dataclasses.replace(MAMBA, state_dim=5000)}, "mamba.state_dim=5000 above 4096"),
        ({"device": "cuda", **VARIANTS[-1], "delta_net": dataclasses.replace(DELTA, key_head_dim=4097)}, "delta_net.key_head_dim=4097 ab"),
    ],
)
def test_what_has_no_such_path_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**fields)


def test_an_adapter_on_such_a_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="batch-invariant matmuls"):
        add_lora(build(), LoraConfig(rank=2, alpha=4.0), ProcessGroups.single())


def test_backends_and_devices_without_it_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="batch_invariant=True excludes fp8"):
        choose_backend(fp8=Fp8Config(), batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant=True needs the matmuls"):
        choose_backend("te", batch_invariant=True)
    with pytest.raises(ValueError, match="no path for device='cuda' with dtype=float64"):
        GPTModel(SIZES, ProcessGroups.single(), backend=choose_backend(batch_invariant=True), device="cuda", dtype=torch.float64)
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=512, batch_invariant=True)
    with pytest.raises(ValueError, match="no kernel for head_dim=512 on a GPU"):
        choose_attention(spec, ProcessGroups.single())
