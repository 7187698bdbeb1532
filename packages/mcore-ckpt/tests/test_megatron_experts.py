# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts in every form that Megatron-LM has: SequentialMLP, TEGroupedMLP, GroupedMLP, with and without biases."""

import argparse

import pytest
import torch

from mcore_ckpt import CheckpointingException, read_tensor, save
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.megatron import export_checkpoint_megatron, import_checkpoint_megatron

# E experts, D model, F width of one, H heads, L layers.
E, D, F, H, L, VOCAB = 4, 8, 6, 2, 2, 32
CONFIG = {
    "num_layers": L, "hidden_size": D, "num_attention_heads": H, "num_query_groups": H, "ffn_hidden_size": F, "vocab_size": VOCAB,
    "num_moe_experts": E, "moe_router_topk": 2, "add_bias_linear": True, "add_qkv_bias": True,
}  # fmt: skip
ARGS = {
    "num_layers": L, "hidden_size": D, "num_attention_heads": H, "num_query_groups": H, "group_query_attention": False,
    "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope", "num_experts": E, "moe_router_topk": 2,
}  # fmt: skip


def ours(*, gated=True, biased=True):
    """Name -> whole tensor of a model with experts in all layers."""
    torch.manual_seed(0)
    halves = (2,) if gated else ()
    state = {"embedding.weight": (VOCAB, D), "final_norm.weight": (D,), "output.weight": (VOCAB, D)}
    for layer in range(L):
        parts = {
            "input_norm.weight": (D,), "attention.qkv.weight": (H, 3 * D // H, D), "attention.out.weight": (D, D), "ffn_norm.weight": (D,),
            "mlp.router.weight": (E, D), "mlp.experts.up": (E, *halves, F, D), "mlp.experts.down": (E, D, F),
        }  # fmt: skip
        if biased:
            parts |= {"attention.qkv.bias": (H, 3 * D // H), "attention.out.bias": (D,), "mlp.router.bias": (E,)}
            parts |= {"mlp.experts.up_bias": (E, *halves, F), "mlp.experts.down_bias": (E, D)}
        state |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return {f"model.{name}": torch.randn(shape) for name, shape in state.items()}


def experts_of(state, layer, fc1, fc2, tp, num_tp):
    """[experts, W, D] and so on of one layer, as a tensor-parallel rank holds them: of a gate its rows above its values'."""
    name = f"model.layers.{layer}.mlp.experts."

    def rows(value):
        # [E, 2, F, ...] -> this rank's [E, 2 F / tp, ...]
        halves = value if value.dim() > (3 if value.shape[-1] == D else 2) else value.unsqueeze(1)
        return halves.chunk(num_tp, 2)[tp].flatten(1, 2)

    weights = {f"{fc1}.weight": rows(state[f"{name}up"]), f"{fc2}.weight": state[f"{name}down"].chunk(num_tp, 2)[tp]}
    if f"{name}up_bias" in state:
        weights |= {f"{fc1}.bias": rows(state[f"{name}up_bias"]), f"{fc2}.bias": state[f"{name}down_bias"]}
    return weights


def write_ranks(folder, state, form, *, num_tp=2, num_ep=2, args=ARGS):
    """The older form, a directory for each tensor and expert rank."""
    for tp in range(num_tp):
        for ep in range(num_ep):
            model = {
                "embedding.word_embeddings.weight": state["model.embedding.weight"].chunk(num_tp)[tp],
                "decoder.final_layernorm.weight": state["model.final_norm.weight"],
                "output_layer.weight": state["model.output.weight"].chunk(num_tp)[tp],
            }
            for layer in range(L):
                before, name = f"decoder.layers.{layer}.", f"model.layers.{layer}."
                model |= {
                    f"{before}self_attention.linear_qkv.layer_norm_weight": state[f"{name}input_norm.weight"],
                    f"{before}self_attention.linear_qkv.weight": state[f"{name}attention.qkv.weight"].flatten(0, 1).chunk(num_tp)[tp],
                    f"{before}self_attention.linear_proj.weight": state[f"{name}attention.out.weight"].chunk(num_tp, 1)[tp],
                    f"{before}pre_mlp_layernorm.weight": state[f"{name}ffn_norm.weight"],
                    f"{before}mlp.router.weight": state[f"{name}mlp.router.weight"],
                }
                if f"{name}mlp.router.bias" in state:
                    model |= {
                        f"{before}self_attention.linear_qkv.bias": state[f"{name}attention.qkv.bias"].flatten().chunk(num_tp)[tp],
                        f"{before}self_attention.linear_proj.bias": state[f"{name}attention.out.bias"],
                        f"{before}mlp.router.bias": state[f"{name}mlp.router.bias"],
                    }
                own = {
                    key: value.chunk(num_ep)[ep] for key, value in experts_of(state, layer, "linear_fc1", "linear_fc2", tp, num_tp).items()
                }
                model |= {f"{before}mlp.experts.{key}": value for key, value in FORMS[form](own).items()}
            place = folder / f"mp_rank_{tp:02d}_{ep:03d}"
            place.mkdir(parents=True)
            settings = argparse.Namespace(**args, tensor_model_parallel_size=num_tp, expert_model_parallel_size=num_ep)
            model = {key: value.clone() for key, value in model.items()}
            torch.save({"model": model, "args": settings, "iteration": 3, "checkpoint_version": 3.0}, place / "model_optim_rng.pt")


FORMS = {
    "SequentialMLP": lambda own: {f"local_experts.{one}.{key}": row for key, rows in own.items() for one, row in enumerate(rows)},
    "TEGroupedMLP": lambda own: {f"{key}{one}": row for key, rows in own.items() for one, row in enumerate(rows)},
    # [D, experts * W] and [experts * F, D], which it views as [experts, D, W] and [experts, F, D].
    "GroupedMLP": lambda own: {
        "weight1": own["linear_fc1.weight"].transpose(1, 2).reshape(D, -1),
        "weight2": own["linear_fc2.weight"].transpose(1, 2).reshape(-1, D),
    },
}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_experts_of_tensor_and_expert_ranks_are_read_in_every_older_form(form, gated, tmp_path):
    state = ours(gated=gated, biased=form != "GroupedMLP")
    write_ranks(tmp_path / "theirs", state, form, args={**ARGS, "swiglu": gated, "squared_relu": not gated})
    assert import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours") == []
    manifest = read_manifest(tmp_path / "ours")
    assert set(manifest.tensors) == set(state)
    for name, value in state.items():
        assert torch.equal(read_tensor(tmp_path / "ours", name), value), name
    config = manifest.extra["config"]
    assert config["add_bias_linear"] == config["add_qkv_bias"] == (form != "GroupedMLP") and "moe_router_bias" not in config
    assert (config["num_moe_experts"], config["ffn_hidden_size"]) == (E, F)


def test_a_grouped_mlp_without_its_router_or_of_another_size_is_named(tmp_path):
    state = ours(biased=False)
    write_ranks(tmp_path / "theirs", state, "GroupedMLP", num_tp=1, num_ep=1)
    file = tmp_path / "theirs" / "mp_rank_00_000" / "model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    router = content["model"].pop("decoder.layers.1.mlp.router.weight")
    torch.save(content, file)
    with pytest.raises(
        CheckpointingException, match=r"layers\.1\.mlp\.experts\.weight1: no decoder\.layers\.1\.mlp\.router\.weight beside it"
    ):
        import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours")
    content["model"]["decoder.layers.1.mlp.router.weight"] = router.repeat(7, 1)
    torch.save(content, file)
    with pytest.raises(CheckpointingException, match=r"layers\.1\.mlp\.experts\.weight1 of shape \[8, 48\] are no 28 experts on 1 ranks"):
        import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("format", ["torch_dist", "fsdp_dtensor"])
def test_biases_of_experts_go_out_by_their_names_and_come_in(format, tmp_path):
    state = ours()
    save(state, tmp_path / "ours", extra={"config": CONFIG})
    assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs", format=format) == []
    shapes = {name: record.shape for name, record in read_manifest(tmp_path / "theirs").tensors.items()}
    if format == "torch_dist":
        before = "decoder.layers.mlp.experts.experts."
        assert shapes[f"{before}linear_fc1.bias"] == (L, E, 2 * F) and shapes[f"{before}linear_fc2.bias"] == (L, E, D)
    else:
        before = "model.module.decoder.layers.1.mlp.experts."
        assert shapes[f"{before}linear_fc1.bias3_w"] == shapes[f"{before}linear_fc1.bias3_v"] == (F,)
        assert shapes[f"{before}linear_fc2.bias3"] == (D,)
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    assert set(read_manifest(tmp_path / "again").tensors) == set(state)
    assert all(torch.equal(read_tensor(tmp_path / "again", name), value) for name, value in state.items())


def test_single_experts_of_sharded_ranks_are_read(tmp_path):
    """SequentialMLP under Megatron-FSDP."""
    state = ours()
    save(state, tmp_path / "ours", extra={"config": CONFIG})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "grouped", format="fsdp_dtensor")
    single = {}
    for name in read_manifest(tmp_path / "grouped").tensors:
        before, separator, after = name.partition(".mlp.experts.")
        product, _, rest = after.partition(".")
        kind, half = rest.rstrip("_wv"), rest[len(rest.rstrip("_wv")) :]
        number = kind.removeprefix("weight").removeprefix("bias")
        there = f"{before}{separator}local_experts.{number}.{product}.{kind.removesuffix(number)}{half}" if separator else name
        single[there] = read_tensor(tmp_path / "grouped", name)
    assert "model.module.decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.bias_v" in single
    save(single, tmp_path / "single", format="torch_dist")
    (tmp_path / "single" / "metadata.json").unlink(missing_ok=True)
    settings = {**ARGS, "untie_embeddings_and_output_weights": True}
    import_checkpoint_megatron(tmp_path / "single", tmp_path / "again", config=settings)
    assert all(torch.equal(read_tensor(tmp_path / "again", name), value) for name, value in state.items())


def test_experts_without_the_biases_that_the_model_has_are_named(tmp_path):
    state = {name: value for name, value in ours().items() if "experts.down_bias" not in name and "experts.up_bias" not in name}
    save(state, tmp_path / "ours", extra={"config": CONFIG})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    with pytest.raises(
        CheckpointingException, match=r"the experts lack biases \(experts\.experts\.linear_fc2\.bias\), and linear_proj has some"
    ):
        import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
