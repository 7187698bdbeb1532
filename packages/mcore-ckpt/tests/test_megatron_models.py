# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Further models in checkpoints of the megatron-core wheel: latent attention, learnable sinks, a dense layer before experts."""

import math
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointingException, read_tensor, save
from mcore_ckpt.hf import export_checkpoint_hf, import_hf
from mcore_ckpt.hf._config import complete, measure
from mcore_ckpt.hf._families import FAMILIES
from mcore_ckpt.hf._rules import sites
from mcore_ckpt.inspect import diff
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.megatron import export_checkpoint_megatron, import_checkpoint_megatron

FIXTURES = Path(__file__).parent / "fixtures"
MLP = {"mlp.up.weight": ("mlp.linear_fc1.weight", (48, 16)), "mlp.down.weight": ("mlp.linear_fc2.weight", (16, 24))}
OUT = {"attention.out.weight": ("self_attention.linear_proj.weight", (16, 16))}
GROUPED = {
    "input_norm.weight": ("self_attention.linear_qkv.layer_norm_weight", (16,)),
    "attention.qkv.weight": ("self_attention.linear_qkv.weight", (32, 16)),
    "attention.q_norm.weight": ("self_attention.q_layernorm.weight", (4,)),
    "attention.k_norm.weight": ("self_attention.k_layernorm.weight", (4,)),
    "ffn_norm.weight": ("mlp.linear_fc1.layer_norm_weight", (16,)),
    **OUT,
}
LATENT = {
    "input_norm.weight": ("input_layernorm.weight", (16,)),
    "attention.q_down.weight": ("self_attention.linear_q_down_proj.weight", (6, 16)),
    "attention.q_norm.weight": ("self_attention.q_layernorm.weight", (6,)),
    "attention.q_up.weight": ("self_attention.linear_q_up_proj.weight", (24, 6)),
    "attention.kv_down.weight": ("self_attention.linear_kv_down_proj.weight", (10, 16)),
    "attention.kv_norm.weight": ("self_attention.kv_layernorm.weight", (8,)),
    "attention.kv_up.weight": ("self_attention.linear_kv_up_proj.weight", (32, 8)),
    "ffn_norm.weight": ("pre_mlp_layernorm.weight", (16,)),
    **OUT,
    **MLP,
}
SINKS = {**GROUPED, **MLP, "attention.softmax_offset": ("self_attention.core_attention.softmax_offset", (4,))}
EXPERTS = {
    **GROUPED,
    "mlp.router.weight": ("mlp.router.weight", (4, 16)),
    "mlp.experts.up": ("mlp.experts.experts.linear_fc1.weight", (4, 24, 16)),
    "mlp.experts.down": ("mlp.experts.experts.linear_fc2.weight", (4, 16, 12)),
}
ENDS = {
    "embedding.weight": ("embedding.word_embeddings.weight", (32, 16)),
    "final_norm.weight": ("decoder.final_layernorm.weight", (16,)),
    "output.weight": ("output_layer.weight", (32, 16)),
}
OUR_SHAPES = {
    "attention.qkv.weight": (2, 16, 16),
    "mlp.up.weight": (2, 24, 16),
    "mlp.experts.up": (4, 2, 12, 16),
    "attention.q_up.weight": (4, 6, 6),
    "attention.kv_up.weight": (4, 8, 8),
}
# name -> (weights of each layer, whether keys carry its number)
CASES = {
    "0.19_latent": ((LATENT, LATENT), False),
    "0.19_sinks": ((SINKS, SINKS), False),
    "0.19_dense_first": (({**GROUPED, **MLP}, EXPERTS), True),
}
LATENT_SIZES = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
BASE = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 32,
    "latent_attention": LATENT_SIZES,
    "norm_epsilon": 1e-6,
}


def shapes_of_a_model(config):
    """Of the weights that mcore-parallel, which this wheel does not need, makes for a configuration."""
    parallel = pytest.importorskip("mcore_parallel", reason="compares with the models of mcore-parallel")
    models = pytest.importorskip("mcore_parallel.models")
    model = models.GPTModel(models.TransformerConfig.from_dict(config), parallel.ProcessGroups.single())
    return {f"model.{shard.name}": tuple(shard.parameter.shape) for shard in parallel.named_shards(model)}


def unpack(name, folder):
    with zipfile.ZipFile(FIXTURES / f"megatron_{name}.zip") as archive:
        archive.extractall(folder / name)
    return folder / name


def values(key, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def expected(name, kind=""):
    """Every tensor by our name, float32, from the rule by which the fixtures were filled."""
    layers, numbered = CASES[name]
    tensors = {ours: values(kind + key, shape) for ours, (key, shape) in ENDS.items()}
    for number, layer in enumerate(layers):
        for ours, (key, shape) in layer.items():
            stacked = f"{kind}decoder.layers.{key}"
            whole = values(f"{kind}decoder.layers.{number}.{key}", shape) if numbered else values(stacked, (2, *shape))[number]
            tensors[f"layers.{number}.{ours}"] = whole.reshape(OUR_SHAPES.get(ours, shape))
    return tensors


@pytest.mark.journey
@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_a_real_checkpoint_is_the_one_that_was_written_and_goes_out_again(name, tmp_path):
    left = import_checkpoint_megatron(unpack(name, tmp_path), tmp_path / "ours")
    assert [key for key in left if "_extra_state" not in key] == []
    wanted = {f"model.{ours}": value.bfloat16() for ours, value in expected(name).items()}
    wanted |= {f"optimizer.master.{ours}": value for ours, value in expected(name).items()}
    for kind in ("exp_avg", "exp_avg_sq"):
        wanted |= {f"optimizer.{kind}.{ours}": value for ours, value in expected(name, f"{kind}.").items()}
    assert set(read_manifest(tmp_path / "ours").tensors) == set(wanted)
    for ours, value in wanted.items():
        assert torch.equal(read_tensor(tmp_path / "ours", ours), value), ours
    for format in ("torch_dist", "fsdp_dtensor"):
        assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / format, format=format) == []
        import_checkpoint_megatron(tmp_path / format, tmp_path / f"{format}_again")
        differences = [str(one) for one in diff(tmp_path / "ours", tmp_path / f"{format}_again")]
        assert [one for one in differences if "optimizer_param_groups" not in one] == []


def test_latents_come_with_their_sizes_and_go_out_with_the_names_of_a_gpu(tmp_path):
    import_checkpoint_megatron(unpack("0.19_latent", tmp_path), tmp_path / "ours")
    extra = read_manifest(tmp_path / "ours").extra
    config = extra["config"]
    assert config["latent_attention"] == LATENT_SIZES and config["rotary_interleaved"] is True
    assert config["position_embedding_type"] == "yarn" and config["yarn"]["mscale_all_dim"] == 1.0 and "family" not in extra
    stored = read_manifest(tmp_path / "ours").tensors
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs", optimizer=False)
    names = read_manifest(tmp_path / "theirs").tensors
    for key in ("input_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"):
        assert f"decoder.layers.{key}" in names
    assert names["decoder.layers.self_attention.linear_kv_up_proj.weight"].shape == (2, 32, 8)
    args = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)["args"]
    assert args.multi_latent_attention and args.qk_head_dim == 4 and args.rope_type == "yarn" and args.rotary_scaling_factor == 4.0
    shapes = shapes_of_a_model({name: value for name, value in config.items() if name != "activation"})
    assert shapes == {name: record.shape for name, record in stored.items() if name.startswith("model.")}


def test_sinks_are_a_setting_of_the_model(tmp_path):
    import_checkpoint_megatron(unpack("0.19_sinks", tmp_path), tmp_path / "ours", optimizer=False)
    extra = read_manifest(tmp_path / "ours").extra
    assert extra["config"]["softmax_type"] == "learnable" and "family" not in extra
    names = set(read_manifest(tmp_path / "ours").tensors)
    assert "model.layers.1.attention.softmax_offset" in names and names == set(shapes_of_a_model(extra["config"]))


def test_layers_of_two_kinds_are_exported_one_by_one(tmp_path):
    import_checkpoint_megatron(unpack("0.19_dense_first", tmp_path), tmp_path / "ours")
    config = read_manifest(tmp_path / "ours").extra["config"]
    assert (config["moe_layer_freq"], config["ffn_hidden_size"], config["moe_ffn_hidden_size"]) == ([0, 1], 24, 12)
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    names = set(read_manifest(tmp_path / "theirs").tensors)
    for state in ("", "optimizer.state.exp_avg."):
        for key in ("0.mlp.linear_fc2.weight", "1.mlp.router.weight", "0.self_attention.linear_qkv.weight", "1.pre_mlp_layernorm.weight"):
            assert f"{state}decoder.layers.{key}" in names
    assert not any(name.startswith("decoder.layers.self") for name in names)
    common = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)
    assert common["args"].moe_layer_freq == [0, 1] and common["content_metadata"]["non_homogeneous_layers"] is True
    # One that is missing within a kind is still named.
    state = {name: read_tensor(tmp_path / "ours", name) for name in read_manifest(tmp_path / "ours").tensors if name.startswith("model.")}
    state |= {name.replace("layers.1.", "layers.2."): value for name, value in state.items() if "layers.1." in name}
    del state["model.layers.2.mlp.experts.down"]
    save(state, tmp_path / "odd")
    with pytest.raises(CheckpointingException, match=r"linear_fc2\.weight: only the layers \[1\] of 3 have it"):
        export_checkpoint_megatron(tmp_path / "odd", tmp_path / "never")


def weights_of(**changes):
    """A checkpoint's state of the smallest latent model."""
    full = complete({**BASE, **changes}, FAMILIES["deepseek3"])
    return {f"model.{site.name}": torch.randn(site.shape) for site in sites(FAMILIES["deepseek3"].rules, measure(full), full)}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"rotary_interleaved=False cannot be exported with latent attention.*only True can"),
        ({"latent_attention": {**LATENT_SIZES, "norm_epsilon": 1e-3}}, r"latent_attention\.norm_epsilon=0\.001 cannot be exported"),
        ({"softmax_scale": 3.0}, r"softmax_scale=3\.0 cannot be exported"),
        ({"position_embedding_type": "none"}, r"position_embedding_type='none' cannot be exported"),
        ({"qk_layernorm_across_heads": True}, r"qk_layernorm_across_heads=True cannot be exported: .* of single heads there"),
    ],
    ids=["halves", "epsilon", "scale", "positions", "norms"],
)
def test_attention_that_is_not_theirs_are_refused_before_anything_is_written(changes, words, tmp_path):
    config = {**BASE, **({"rotary_interleaved": True} if changes else {}), **changes}
    save(weights_of(), tmp_path / "ours", extra={"config": config})
    with pytest.raises(ValueError, match=words):
        export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_without_scaled_positions_their_factor_of_the_scores_is_ours(tmp_path):
    save(weights_of(), tmp_path / "ours", extra={"config": {**BASE, "rotary_interleaved": True}})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    again = read_manifest(tmp_path / "again").extra
    assert again["family"] == "deepseek3" and "softmax_scale" not in again["config"]
    assert all(torch.equal(read_tensor(tmp_path / "again", name), read_tensor(tmp_path / "ours", name)) for name in weights_of())
    changes = {"rope_type": "rope", "rotary_scaling_factor": 40, "mscale_all_dim": 1.0}
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "scaled", config=changes)
    scale = read_manifest(tmp_path / "scaled").extra["config"]["softmax_scale"]
    assert scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(6))


def mixture_state():
    """Our weights of a dense layer and one with biased, shared and routed experts, and the config that says so."""
    config = {
        "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 24, "vocab_size": 32,
        "num_moe_experts": 4, "moe_router_topk": 4, "moe_ffn_hidden_size": 12, "moe_layer_freq": [0, 1], "norm_epsilon": 1e-6,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_num_groups": 2,
        "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 24,
        "latent_attention": LATENT_SIZES, "rotary_interleaved": True,
    }  # fmt: skip
    latent = {name: value for name, value in config.items() if name != "num_query_groups"}
    full = complete(latent, FAMILIES["deepseek3"])
    state = {f"model.{site.name}": torch.randn(site.shape) for site in sites(FAMILIES["deepseek3"].rules, measure(full), full)}
    return latent, state


@pytest.mark.parametrize("format", ["torch_dist", "fsdp_dtensor"])
def test_biases_of_experts_and_shared_experts_go_out_and_come_in(format, tmp_path):
    config, state = mixture_state()
    save(state, tmp_path / "ours", extra={"config": config})
    assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs", format=format) == []
    names = read_manifest(tmp_path / "theirs").tensors
    if format == "torch_dist":
        shapes = {
            "router.weight": (4, 16), "router.expert_bias": (4,), "shared_experts.linear_fc1.weight": (48, 16),
            "shared_experts.linear_fc2.weight": (16, 24), "experts.experts.linear_fc1.weight": (4, 24, 16),
        }  # fmt: skip
        assert {key: names[f"decoder.layers.1.mlp.{key}"].shape for key in shapes} == shapes
        args = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)["args"]
        assert args.moe_router_score_function == "sigmoid" and args.moe_shared_expert_intermediate_size == 24
        assert args.moe_router_num_groups == 2 and args.moe_router_topk_scaling_factor == 2.5 and args.moe_layer_freq == [0, 1]
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    again = read_manifest(tmp_path / "again")
    assert set(again.tensors) == set(state)
    assert all(torch.equal(read_tensor(tmp_path / "again", name), value) for name, value in state.items())
    assert again.tensors["model.layers.1.mlp.router.expert_bias"].dtype == "F32"
    assert again.extra["family"] == "deepseek3"
    kept = again.extra["config"]
    assert {name: kept[name] for name in config if name.startswith("moe_")} == {n: v for n, v in config.items() if n.startswith("moe_")}
    export_checkpoint_hf(tmp_path / "again", tmp_path / "hf", family="deepseek3", config=kept, prefix="model.")
    assert all(torch.equal(value, state[f"model.{name}"]) for name, value in import_hf(tmp_path / "hf").tensors)


def test_projections_to_narrower_experts_go_out_and_come_in(tmp_path):
    config, state = mixture_state()
    config, mlp = config | {"moe_latent_size": 8}, "model.layers.1.mlp."
    state |= {f"{mlp}experts.up": torch.randn(4, 2, 12, 8), f"{mlp}experts.down": torch.randn(4, 8, 12)}
    state |= {f"{mlp}latent_down.weight": torch.randn(8, 16), f"{mlp}latent_up.weight": torch.randn(16, 8)}
    save(state, tmp_path / "ours", extra={"config": config})
    assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs") == []
    names = read_manifest(tmp_path / "theirs").tensors
    shapes = {"fc1_latent_proj.weight": (8, 16), "fc2_latent_proj.weight": (16, 8), "experts.experts.linear_fc2.weight": (4, 8, 12)}
    assert {key: names[f"decoder.layers.1.mlp.{key}"].shape for key in shapes} == shapes
    assert torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)["args"].moe_latent_size == 8
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    again = read_manifest(tmp_path / "again")
    assert set(again.tensors) == set(state) and again.extra["config"]["moe_latent_size"] == 8 and again.extra.get("family") is None
    assert all(torch.equal(read_tensor(tmp_path / "again", name), value) for name, value in state.items())
    with pytest.raises(ValueError, match="moe_latent_size"):
        export_checkpoint_hf(tmp_path / "again", tmp_path / "hf", family="deepseek3", config=again.extra["config"], prefix="model.")


def test_sizes_and_norms_of_latents_that_are_missing_are_named(tmp_path):
    folder = unpack("0.19_latent", tmp_path)
    with pytest.raises(CheckpointingException, match=r"num_attention_heads=5 does not divide its 24 rows"):
        import_checkpoint_megatron(folder, tmp_path / "ours", config={"num_attention_heads": 5})
    with pytest.raises(CheckpointingException, match=r"q_layernorm\.weight is missing: latents without norms"):
        import_checkpoint_megatron(folder, tmp_path / "ours", drop=("*q_layernorm*",))
    with pytest.raises(CheckpointingException, match=r"does not say v_head_dim, rope_type; give it in the config"):
        unsaid = {"v_head_dim": None, "rope_type": None, "multi_latent_attention": None}
        import_checkpoint_megatron(folder, tmp_path / "ours", config=unsaid)
    assert not (tmp_path / "ours").exists()


def test_latent_attention_whose_args_name_no_positions_has_yarn(tmp_path):
    """The default of the arg is None, which leaves that of the config there: yarn."""
    folder = unpack("0.19_latent", tmp_path)
    import_checkpoint_megatron(folder, tmp_path / "said")
    import_checkpoint_megatron(folder, tmp_path / "ours", config={"rope_type": None, "multi_latent_attention": True})
    config = read_manifest(tmp_path / "ours").extra["config"]
    assert config["position_embedding_type"] == "yarn" and config["yarn"]["factor"] == 4.0
    assert config == read_manifest(tmp_path / "said").extra["config"]


def test_a_latent_model_goes_on_to_hugging_face(tmp_path):
    from mcore_ckpt.cli import main

    save(weights_of(), tmp_path / "ours", extra={"config": {**BASE, "rotary_interleaved": True}})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    assert main(["import-megatron", str(tmp_path / "theirs"), str(tmp_path / "again")]) == 0
    assert main(["export-hf", str(tmp_path / "again"), str(tmp_path / "hf")]) == 0
    model = import_hf(tmp_path / "hf")
    assert model.family == "deepseek3"
    assert all(torch.equal(value, read_tensor(tmp_path / "ours", f"model.{name}")) for name, value in model.tensors)
