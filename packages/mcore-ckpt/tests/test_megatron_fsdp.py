# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints of Megatron-FSDP: two that the megatron-core wheel wrote (`fixtures/make_megatron_fsdp.py` says how).

For models that these do not have, states with the names that it uses are written by torch's own checkpoint writer.
"""

import argparse
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mcore_ckpt import CheckpointingException, read_tensor, save
from mcore_ckpt._core._read import CheckpointReader
from mcore_ckpt.cli import main
from mcore_ckpt.inspect import diff
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.megatron import export_checkpoint_megatron, import_checkpoint_megatron
from mcore_ckpt.megatron._import import open_megatron

from .test_megatron import unpack, values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HIDDEN, FFN, VOCAB, EXPERTS, LAYERS = 8, 12, 16, 3, 2
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
    "self_attention.linear_qkv.weight": (2 * (2 + 1 + 1) * 2, HIDDEN),
    "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
}
DENSE = {"mlp.linear_fc1.layer_norm_weight": (HIDDEN,), "mlp.linear_fc1.weight": (2 * FFN, HIDDEN), "mlp.linear_fc2.weight": (HIDDEN, FFN)}
ARGS = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
    "fp16": False,
}
GROUP = {"lr": 1e-3, "max_lr": 1e-3, "min_lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "wd_mult": 1.0, "step": 7}
GROUP |= {"is_expert_parallel": False, "is_decoupled_lr": False}


def shapes_of(*, experts="", tied=False, fc1=2 * FFN):
    """The parameters of a model by their names in it; experts are "grouped", "local" or none."""
    layer = ATTENTION | DENSE | {"mlp.linear_fc1.weight": (fc1, HIDDEN)}
    if experts:
        layer = {**ATTENTION, "pre_mlp_layernorm.weight": (HIDDEN,), "mlp.router.weight": (EXPERTS, HIDDEN)}
        pattern = {"grouped": "mlp.experts.{0}.weight{1}", "local": "mlp.experts.local_experts.{1}.{0}.weight"}[experts]
        for number in range(EXPERTS):
            layer |= {pattern.format("linear_fc1", number): (fc1, HIDDEN), pattern.format("linear_fc2", number): (HIDDEN, FFN)}
    names = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN), "decoder.final_layernorm.weight": (HIDDEN,)}
    names |= {} if tied else {"output_layer.weight": (VOCAB, HIDDEN)}
    return names | {f"decoder.layers.{n}.{part}": shape for n in range(LAYERS) for part, shape in layer.items()}


def split(name, value, *, gated=True):
    """Rows of the gate and rows of the values of a first product, as that system names them."""
    if not gated or ".linear_fc1.weight" not in name:
        return {name: value}
    return {f"{name}_w": value.chunk(2)[0].clone(), f"{name}_v": value.chunk(2)[1].clone()}


def write(folder, shapes, *, args=ARGS, gated=True, change=None):
    """A checkpoint of parameters of those shapes; returns each value by kind and parameter."""
    generator = torch.Generator().manual_seed(3)
    kinds = {
        kind: {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} for kind in ("", "exp_avg", "exp_avg_sq")
    }
    state = {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 70, "model": {}}
    optimizer = {"state": {}, "param_to_group_meta": {}}
    for name, shape in shapes.items():
        state["model"] |= {f"module.{key}": part for key, part in split(name, kinds[""][name], gated=gated).items()}
        moments = {kind: split(name, kinds[kind][name], gated=gated) for kind in ("exp_avg", "exp_avg_sq")}
        for key in moments["exp_avg"]:
            optimizer["state"][f"module.module.module.{key}"] = {kind: parts[key] for kind, parts in moments.items()}
        group = GROUP if len(shape) > 1 else {**GROUP, "wd_mult": 0.0, "weight_decay": 0.0}
        optimizer["param_to_group_meta"][f"module.module.module.{name}"] = group
    state |= {"optimizer": optimizer, "opt_param_scheduler": {"num_steps": 140, "lr_decay_style": "cosine", "start_wd": 0.1}}
    state["rng_state"] = {"(0, 0)": [{"torch_rng_state": torch.zeros(8, dtype=torch.uint8)}]}
    if change is not None:
        change(state)
    dcp.save(state, checkpoint_id=str(folder), no_dist=True)
    return kinds


ENDS = {"embedding.weight": "embedding.word_embeddings.weight", "final_norm.weight": "decoder.final_layernorm.weight"}
KEYS = {
    "input_norm.weight": ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
    "attention.qkv.weight": ("self_attention.linear_qkv.weight",),
    "attention.out.weight": ("self_attention.linear_proj.weight",),
    "attention.q_norm.weight": ("self_attention.q_layernorm.weight",),
    "attention.k_norm.weight": ("self_attention.k_layernorm.weight",),
    "ffn_norm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
    "mlp.up.weight": ("mlp.linear_fc1.weight",),
    "mlp.down.weight": ("mlp.linear_fc2.weight",),
    "mlp.router.weight": ("mlp.router.weight",),
}


def whole(parameters, name, shape):
    """The value of one of our tensors, ``layers.1.mlp.up.weight``, from theirs by the names in the model."""
    if not name.startswith("layers."):
        return parameters[ENDS.get(name, "output_layer.weight")]
    _, number, part = name.split(".", 2)
    layer = {key.removeprefix(f"decoder.layers.{number}."): value for key, value in parameters.items() if f".{number}." in key[:18]}
    if part.startswith("mlp.experts."):
        product = {"up": "linear_fc1", "down": "linear_fc2"}[part.rpartition(".")[2]]
        return torch.stack([value for key, value in layer.items() if ".experts." in key and product in key]).reshape(shape)
    return next(layer[key] for key in KEYS[part] if key in layer).reshape(shape)


def check_tensors(ours, kinds):
    """Weights, masters and moments are those of the parameters, bit for bit."""
    tensors = read_manifest(ours).tensors
    for stored, record in tensors.items():
        name = stored.removeprefix("model.")
        if stored.startswith("model."):
            assert torch.equal(read_tensor(ours, stored), whole(kinds[""], name, record.shape).bfloat16()), name
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                moment = read_tensor(ours, f"optimizer.{kind}.{name}")
                assert torch.equal(moment, whole(kinds[kind.replace("master", "")], name, record.shape)), (kind, name)


MODELS = {"dense": {}, "tied": {"tied": True}, "grouped": {"experts": "grouped"}, "local": {"experts": "local"}}


@pytest.mark.parametrize("model", MODELS)
def test_weights_masters_and_moments_of_an_import_are_those_that_were_written(model, tmp_path):
    args = ARGS | {"untie_embeddings_and_output_weights": model != "tied"}
    kinds = write(tmp_path / "theirs", shapes_of(**MODELS[model]), args=args)
    left = import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours")
    assert left == ["rng_state.(0, 0).0.torch_rng_state"]
    manifest = read_manifest(tmp_path / "ours")
    weights = [name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")]
    parts = 7 if "experts" in MODELS[model] else 6
    assert len(weights) == LAYERS * parts + (2 if model == "tied" else 3) and len(manifest.tensors) == 4 * len(weights)
    check_tensors(tmp_path / "ours", kinds)
    extra = manifest.extra
    assert extra["optimizer_step"] == 7 and extra["iteration"] == 70
    assert extra["opt_param_scheduler"] == {"num_steps": 140, "lr_decay_style": "cosine", "start_wd": 0.1}
    assert len(extra["optimizer_param_groups"]) == 2
    assert extra["config"]["num_query_groups"] == 2 and extra["config"]["share_embeddings_and_output_weights"] == (model == "tied")
    assert extra["family"] == ("mixtral" if "experts" in MODELS[model] else "llama")


@pytest.mark.parametrize("model", MODELS)
def test_what_is_exported_is_what_was_written_and_comes_back(model, tmp_path):
    args = ARGS | {"untie_embeddings_and_output_weights": model != "tied"}
    write(tmp_path / "first", shapes_of(**MODELS[model]), args=args)
    assert main(["import-megatron", str(tmp_path / "first"), str(tmp_path / "ours")]) == 0
    assert main(["export-megatron", str(tmp_path / "ours"), str(tmp_path / "second"), "--format", "fsdp_dtensor"]) == 0
    assert not (tmp_path / "second" / "metadata.json").exists()
    assert main(["import-megatron", str(tmp_path / "second"), str(tmp_path / "again")]) == 0
    assert diff(tmp_path / "ours", tmp_path / "again") == []
    if model == "local":
        return
    # What torch's own reader finds there, by the state that was written.
    first, second = ({}, {})
    for folder, tensors in (("first", first), ("second", second)):
        metadata = dcp.FileSystemReader(str(tmp_path / folder)).read_metadata().state_dict_metadata
        for name, entry in metadata.items():
            if not name.startswith(("args", "rng_state", "optimizer.state.step")) and not name.endswith(".step"):
                tensors[name] = torch.zeros(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        tensors["args"] = None
        dcp.load(tensors, checkpoint_id=str(tmp_path / folder), no_dist=True)
    assert first.keys() == second.keys()
    assert first.pop("args").num_query_groups == second.pop("args").num_query_groups == 2
    for name, value in first.items():
        assert torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name], name


@pytest.mark.journey
@pytest.mark.parametrize("name", ["0.19_fsdp", "0.19_fsdp_experts"])
def test_a_real_checkpoint_of_sharded_ranks_is_read_and_comes_back(name, tmp_path):
    # Layers of the host, which the wheel makes without a GPU: norms are modules, experts are one by one; 2 query heads a group.
    hidden, ffn, experts = 16, 24, 4 if "experts" in name else 0
    layer = {"input_layernorm.weight": (hidden,), "self_attention.linear_qkv.weight": (32, hidden), "pre_mlp_layernorm.weight": (hidden,)}
    layer |= {"self_attention.linear_proj.weight": (hidden, hidden)}
    layer |= {f"self_attention.{one}_layernorm.weight": (4,) for one in "qk"} | ({"mlp.router.weight": (4, hidden)} if experts else {})
    for before in [f"mlp.experts.local_experts.{number}" for number in range(experts)] or ["mlp"]:
        layer |= {f"{before}.linear_fc1.weight": (2 * ffn, hidden), f"{before}.linear_fc2.weight": (hidden, ffn)}
    shapes = {
        "embedding.word_embeddings.weight": (32, hidden),
        "decoder.final_layernorm.weight": (hidden,),
        "output_layer.weight": (32, hidden),
    }
    shapes |= {f"decoder.layers.{number}.{part}": shape for number in range(2) for part, shape in layer.items()}
    kinds = {
        kind: {key: values(f"{kind}.{key}" if kind else key, shape) for key, shape in shapes.items()}
        for kind in ("", "exp_avg", "exp_avg_sq")
    }
    assert import_checkpoint_megatron(unpack(name, tmp_path), tmp_path / "ours") == []
    check_tensors(tmp_path / "ours", kinds)
    manifest = read_manifest(tmp_path / "ours")
    assert (
        len(manifest.tensors) == 4 * (3 + 2 * (9 if experts else 8))
        and manifest.extra["iteration"] == manifest.extra["optimizer_step"] == 7
    )
    assert manifest.extra["family"] == ("qwen3_moe" if experts else "qwen3")
    assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs", format="fsdp_dtensor") == []
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    assert diff(tmp_path / "ours", tmp_path / "again") == []
    assert read_manifest(tmp_path / "again").extra == manifest.extra


@pytest.mark.journey
@pytest.mark.parametrize("name", ["0.16_buckets", "0.19_experts"])
def test_a_real_torch_dist_checkpoint_goes_there_and_back(name, tmp_path):
    import_checkpoint_megatron(unpack(name, tmp_path), tmp_path / "ours")
    assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs", format="fsdp_dtensor") == []
    tensors = read_manifest(tmp_path / "theirs").tensors
    fc1 = "mlp.experts.linear_fc1.weight3" if "experts" in name else "mlp.linear_fc1.weight"
    assert tensors[f"model.module.decoder.layers.1.{fc1}_v"].shape == (24, 16)
    assert tensors[f"optimizer.state.module.module.module.decoder.layers.0.{fc1}_w.exp_avg_sq"].dtype == "F32"
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    # A sharded parameter of an expert is of the group of other weights.
    assert [one.name for one in diff(tmp_path / "ours", tmp_path / "again")] == ["extra.optimizer_param_groups"] * ("experts" in name)
    first, second = (read_manifest(tmp_path / folder).extra for folder in ("ours", "again"))
    groups = [group for group in first["optimizer_param_groups"] if not group["is_expert_parallel"]]
    assert second["optimizer_param_groups"] == groups


@pytest.mark.journey
def test_no_more_is_read_at_a_time_than_a_part_of_one_tensor(tmp_path, monkeypatch):
    kinds = write(tmp_path / "theirs", shapes_of(experts="grouped"))
    counts, read = [], CheckpointReader.read

    def counted(self, name, box=None):
        tensor = read(self, name, box)
        counts.append(tensor.numel())
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", counted)
    open_megatron(tmp_path / "theirs", {})
    assert counts == []
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours")
    largest = max(ATTENTION["self_attention.linear_qkv.weight"][0], VOCAB) * HIDDEN
    assert max(counts) == largest and max(value.numel() for value in kinds[""].values()) > FFN * HIDDEN
    del counts[:]
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "back", format="fsdp_dtensor")
    assert max(counts) == largest


def test_the_state_of_a_resuming_run_loads_by_torchs_strict_reader(tmp_path):
    write(tmp_path / "first", shapes_of())
    import_checkpoint_megatron(tmp_path / "first", tmp_path / "ours")
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs", format="fsdp_dtensor")
    weight = "decoder.layers.1.mlp.linear_fc1.weight"
    state = {
        "iteration": 1,
        "model": {f"module.{weight}_w": torch.zeros(FFN, HIDDEN)},
        "optimizer": {
            "state": {f"module.module.module.{weight}_w": {"exp_avg": torch.zeros(FFN, HIDDEN), "step": torch.zeros(())}},
            "param_to_group_meta": {f"module.module.module.{weight}": {"lr": 0.0, "betas": None, "step": 0}},
        },
        "opt_param_scheduler": {"num_steps": 0},
    }
    dcp.load(state, checkpoint_id=str(tmp_path / "theirs"), no_dist=True)
    (moments,) = state["optimizer"]["state"].values()
    assert state["optimizer"]["param_to_group_meta"][f"module.module.module.{weight}"] == {"lr": 1e-3, "betas": (0.9, 0.95), "step": 7}
    assert moments["step"] == 7 and state["iteration"] == 70 and state["opt_param_scheduler"] == {"num_steps": 140}
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "stacked")
    common = torch.load(tmp_path / "stacked" / "common.pt", weights_only=False)
    assert common["opt_param_scheduler"] == {"num_steps": 140, "lr_decay_style": "cosine", "start_wd": 0.1}
    gate = read_tensor(tmp_path / "ours", "optimizer.exp_avg.layers.1.mlp.up.weight")[0]
    master = read_tensor(tmp_path / "ours", "optimizer.master.layers.1.mlp.up.weight")[0]
    assert torch.equal(moments["exp_avg"], gate) and torch.equal(state["model"][f"module.{weight}_w"], master)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("decoder.final_layernorm.weight", r"lacks model\.module\.decoder\.final_layernorm\.weight;"),
        ("output_layer.weight", r"lacks model\.module\.output_layer\.weight;"),
        ("decoder.layers.1.mlp.linear_fc1.layer_norm_weight", r"lacks .*layers\.1\.mlp\.linear_fc1\.layer_norm_weight"),
        ("decoder.layers.0.mlp.linear_fc1.weight_v", r"lacks model\.module\.decoder\.layers\.0\.mlp\.linear_fc1\.weight_v;"),
        ("decoder.layers.1.", r"lacks .*layers\.1\.mlp\.linear_fc2\.weight"),
    ],
)
def test_a_missing_weight_is_named(gone, message, tmp_path):
    def remove(state):
        state["model"] = {name: value for name, value in state["model"].items() if not name.startswith(f"module.{gone}")}
        assert len(state["model"]) < len(shapes_of()) + LAYERS

    write(tmp_path / "theirs", shapes_of(), change=remove)
    for optimizer in (True, False):
        with pytest.raises(CheckpointingException, match=message):
            import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours", optimizer=optimizer)
    assert not (tmp_path / "ours").exists()


def test_a_missing_expert_a_moment_and_half_of_one_are_named(tmp_path):
    def remove(state):
        del state["model"]["module.decoder.layers.1.mlp.experts.linear_fc2.weight2"]
        moments = state["optimizer"]["state"]
        del moments["module.module.module.decoder.layers.0.mlp.experts.linear_fc1.weight0_w"]["exp_avg_sq"]
        del moments["module.module.module.output_layer.weight"]["exp_avg"]

    write(tmp_path / "theirs", shapes_of(experts="grouped"), args={**ARGS, "num_experts": EXPERTS}, change=remove)
    with pytest.raises(
        CheckpointingException,
        match=r"layers\.1\.mlp\.experts\.linear_fc2\.weight2, .*layers\.0.*weight0_w\.exp_avg_sq, .*output_layer.weight.exp_avg;",
    ):
        import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours")


def test_states_of_fp8_modules_are_left_out_and_other_tensors_are_named(tmp_path):
    def add(state):
        state["model"]["module.decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(4, dtype=torch.uint8)
        state["model"]["module.mtp.layers.0.eh_proj.weight"] = torch.ones(2)

    write(tmp_path / "theirs", shapes_of(), change=add)
    with pytest.raises(CheckpointingException, match=r"does not know: mtp\.layers\.0\.eh_proj\.weight"):
        import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours")
    left = import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours", drop=("mtp.*",))
    assert "model.module.decoder.layers.0.mlp.linear_fc1._extra_state" in left and "mtp.layers.0.eh_proj.weight" in left


def test_a_run_in_32_bits_without_a_gate_has_no_masters(tmp_path):
    args = {**ARGS, "bf16": False, "swiglu": False}
    kinds = write(tmp_path / "theirs", shapes_of(fc1=FFN), args=args, gated=False)
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "ours")
    tensors = read_manifest(tmp_path / "ours").tensors
    assert tensors["model.layers.0.mlp.up.weight"].shape == (FFN, HIDDEN) and not any(".master." in name for name in tensors)
    assert torch.equal(read_tensor(tmp_path / "ours", "model.layers.1.mlp.up.weight"), kinds[""]["decoder.layers.1.mlp.linear_fc1.weight"])
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "back", format="fsdp_dtensor")
    import_checkpoint_megatron(tmp_path / "back", tmp_path / "again")
    assert diff(tmp_path / "ours", tmp_path / "again") == []
    # The same file as the state of a run in 16 bits.
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "narrow", config={"fp16": True}, optimizer=False)
    assert {record.dtype for record in read_manifest(tmp_path / "narrow").tensors.values()} == {"F16"}


def test_groups_that_fit_no_weight_and_state_without_a_weight_are_refused(tmp_path):
    weights = {"model.layers.0.mlp.down.weight": torch.ones(4, 4)}
    moments = {f"optimizer.{kind}.layers.0.mlp.down.weight": torch.ones(4, 4) for kind in ("exp_avg", "exp_avg_sq")}
    groups = [{"lr": 1e-3, "wd_mult": 1.0}, {"lr": 2e-3, "wd_mult": 1.0}]
    save(weights | moments, tmp_path / "two", extra={"optimizer_param_groups": groups, "optimizer_step": 1})
    with pytest.raises(
        CheckpointingException, match=r"2 of 2 groups fit decoder\.layers\.0\.mlp\.linear_fc2\.weight; give optimizer_config"
    ):
        export_checkpoint_megatron(tmp_path / "two", tmp_path / "out", format="fsdp_dtensor")
    (tmp_path / "adam.json").write_text(json.dumps({"lr": 1e-3}))
    command = ["export-megatron", str(tmp_path / "two"), str(tmp_path / "made"), "--format", "fsdp_dtensor"]
    assert main([*command, "--optimizer-config", str(tmp_path / "adam.json")]) == 0
    save(weights | {"optimizer.exp_avg.layers.0.ffn_norm.weight": torch.ones(4)}, tmp_path / "odd")
    with pytest.raises(CheckpointingException, match=r"exp_avg\.layers\.0\.ffn_norm\.weight is there and its weight is not"):
        export_checkpoint_megatron(tmp_path / "odd", tmp_path / "out", format="fsdp_dtensor")
    with pytest.raises(ValueError, match="format='zarr' is not written; the formats of an export are: torch_dist, fsdp_dtensor"):
        export_checkpoint_megatron(tmp_path / "odd", tmp_path / "out", format="zarr")
    assert not (tmp_path / "out").exists()
