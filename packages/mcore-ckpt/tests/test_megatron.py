# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints that the megatron-core wheel wrote, in both generations and the older form; `fixtures/make_megatron.py` says how."""

import functools
import json
import os
import pickle
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointingException, read_tensor, save
from mcore_ckpt.assets import read_asset
from mcore_ckpt.cli import main
from mcore_ckpt.foreign import read_torch
from mcore_ckpt.hf import import_hf
from mcore_ckpt.inspect import diff
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.megatron import EXPORT_FORMATS, export_checkpoint_megatron, import_checkpoint_megatron

FIXTURES = Path(__file__).parent / "fixtures"
DENSE = {
    "input_norm.weight": ("self_attention.linear_qkv.layer_norm_weight", (16,)),
    "attention.qkv.weight": ("self_attention.linear_qkv.weight", (32, 16)),
    "attention.out.weight": ("self_attention.linear_proj.weight", (16, 16)),
    "attention.q_norm.weight": ("self_attention.q_layernorm.weight", (4,)),
    "attention.k_norm.weight": ("self_attention.k_layernorm.weight", (4,)),
    "ffn_norm.weight": ("mlp.linear_fc1.layer_norm_weight", (16,)),
    "mlp.up.weight": ("mlp.linear_fc1.weight", (48, 16)),
    "mlp.down.weight": ("mlp.linear_fc2.weight", (16, 24)),
}
EXPERTS = {name: row for name, row in DENSE.items() if not name.startswith("mlp.")} | {
    "mlp.router.weight": ("mlp.router.weight", (4, 16)),
    "mlp.experts.up": ("mlp.experts.experts.linear_fc1.weight", (4, 48, 16)),
    "mlp.experts.down": ("mlp.experts.experts.linear_fc2.weight", (4, 16, 24)),
}
BIASED = EXPERTS | {
    "attention.qkv.bias": ("self_attention.linear_qkv.bias", (32,)),
    "attention.out.bias": ("self_attention.linear_proj.bias", (16,)),
    "mlp.router.bias": ("mlp.router.bias", (4,)),
    "mlp.experts.up_bias": ("mlp.experts.experts.linear_fc1.bias", (4, 48)),
    "mlp.experts.down_bias": ("mlp.experts.experts.linear_fc2.bias", (4, 16)),
}
ENDS = {
    "embedding.weight": ("embedding.word_embeddings.weight", (32, 16)),
    "final_norm.weight": ("decoder.final_layernorm.weight", (16,)),
    "output.weight": ("output_layer.weight", (32, 16)),
}
# name -> (weights of a layer, whether its keys carry the layer's number, whether optimizer state is there)
CASES = {
    "0.16_reshardable": (DENSE, False, True),
    "0.16_buckets": (DENSE, False, True),
    "0.19_layers": (DENSE, True, True),
    "0.19_experts": (EXPERTS, False, True),
    "0.15_model_space": (DENSE, False, True),
    "0.15_model_space_experts": (EXPERTS, True, True),
    "0.15_gathered": (DENSE, False, True),
    "0.15_gathered_experts": (EXPERTS, False, True),
    "0.16_legacy": (DENSE, False, True),
    "0.16_legacy_experts": (EXPERTS, False, False),
    "0.16_legacy_grouped": (EXPERTS, False, False),
    "0.16_biased_experts": (BIASED, False, True),
    "0.16_biased_buckets": (BIASED, False, True),
    "0.16_legacy_biased_experts": (BIASED, False, False),
}


def unpack(name, folder):
    with zipfile.ZipFile(FIXTURES / f"megatron_{name}.zip") as archive:
        archive.extractall(folder / name)
    return folder / name


def values(key, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))


def expected(name, kind=""):
    """Every tensor by our name, float32, from the rule by which the fixtures were filled."""
    layer, numbered, _ = CASES[name]
    tensors = {ours: values(kind + key, shape) for ours, (key, shape) in ENDS.items()}
    for number in range(2):
        for ours, (key, shape) in layer.items():
            if numbered:
                whole = values(f"{kind}decoder.layers.{number}.{key}", shape)
            else:
                whole = values(f"{kind}decoder.layers.{key}", (2, *shape))[number]
            groups = {"attention.qkv.weight": (2, 16, 16), "mlp.up.weight": (2, 24, 16), "mlp.experts.up": (4, 2, 24, 16)}
            groups |= {"attention.qkv.bias": (2, 16), "mlp.experts.up_bias": (4, 2, 24)}
            tensors[f"layers.{number}.{ours}"] = whole.reshape(groups.get(ours, shape))
    return tensors


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The folder of an import of a real checkpoint, made once; for tests that change nothing in it."""

    @functools.cache
    def folder(name):
        path = tmp_path_factory.mktemp(name)
        import_checkpoint_megatron(unpack(name, path), path / "ours")
        return path / "ours"

    return folder


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_of_a_real_checkpoint_is_the_one_that_was_written(name, imported):
    ours = imported(name)
    wanted = {f"model.{key}": value.bfloat16() for key, value in expected(name).items()}
    if CASES[name][2]:
        wanted |= {f"optimizer.master.{key}": value for key, value in expected(name).items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            wanted |= {f"optimizer.{kind}.{key}": value for key, value in expected(name, f"{kind}.").items()}
    manifest = read_manifest(ours)
    assert set(manifest.tensors) == set(wanted)
    for tensor, value in wanted.items():
        assert torch.equal(read_tensor(ours, tensor), value), tensor
    assert manifest.extra["iteration"] == 7 and manifest.extra["config"]["num_query_groups"] == 2
    families = {"experts": "qwen3_moe", "grouped": "qwen3_moe", "biased_experts": None, "biased_buckets": None}
    assert manifest.extra.get("family") == next((family for end, family in reversed(families.items()) if name.endswith(end)), "qwen3")
    if "legacy" not in name:
        assert manifest.extra["optimizer_step"] == 7


@pytest.mark.parametrize("name", ["0.16_reshardable", "0.19_experts"])
def test_a_real_checkpoint_becomes_a_hugging_face_model_by_the_command(name, tmp_path):
    prefix = ["--prefix", "model."] if "experts" in name else []
    assert main(["import-megatron", str(unpack(name, tmp_path)), str(tmp_path / "ours"), "--no-optimizer", *prefix]) == 0
    assert all(name.startswith("model.") == bool(prefix) for name in read_manifest(tmp_path / "ours").tensors)
    # It is found.
    assert main(["export-hf", str(tmp_path / "ours"), str(tmp_path / "hf")]) == 0
    model, wanted = import_hf(tmp_path / "hf"), expected(name)
    tensors = dict(model.tensors)
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[one], wanted[one].bfloat16()) for one in wanted)
    # Rows of the fused product there: for each of 2 groups its 2 query heads, its key, its value, of 4 channels each.
    from mcore_ckpt._storage import SafetensorsFile

    file = SafetensorsFile(tmp_path / "hf" / "model.safetensors")
    fused = values("decoder.layers.self_attention.linear_qkv.weight", (2, 32, 16))[1].bfloat16()
    rows = {"q": [*range(8), *range(16, 24)], "k": [*range(8, 12), *range(24, 28)], "v": [*range(12, 16), *range(28, 32)]}
    for letter, places in rows.items():
        assert torch.equal(file.tensor(f"model.layers.1.self_attn.{letter}_proj.weight"), fused[places]), letter


# What their loader tells groups apart by: of 0.16 and, with the rates, of 0.19.
IDENTITY = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "max_lr", "min_lr")
WRITTEN = {
    "is_expert_parallel": False,
    "default_config": True,
    "lr_mult": 1.0,
    "is_decoupled_lr": False,
    "max_lr": 1e-3,
    "min_lr": None,
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "step": 7,
}


@pytest.mark.parametrize("name", CASES)
def test_parameter_groups_of_a_real_checkpoint_are_kept_and_given_back(name, imported, tmp_path):
    if "legacy" in name:
        # These ranks wrote none.
        left = ["optimizer_param_groups"] if CASES[name][2] else []
        assert export_checkpoint_megatron(imported(name), tmp_path / "theirs") == left
        return
    assert export_checkpoint_megatron(imported(name), tmp_path / "theirs") == []
    optimizer = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)["optimizer"]
    # 0.15 does not say yet which groups have the settings of the run.
    written = {key: value for key, value in WRITTEN.items() if key != "default_config" or "0.15" not in name}
    dense = [{**written, "wd_mult": 1.0}, {**written, "wd_mult": 0.0}]
    entries = [{"optimizer": {"param_groups": dense}, "param_state_sharding_type": "fully_reshardable"}]
    if CASES[name][0] is not DENSE:
        of_experts = [{**group, "is_expert_parallel": True} for group in (dense if CASES[name][0] is BIASED else dense[:1])]
        entries.append({**entries[0], "optimizer": {"param_groups": of_experts}})
    assert optimizer == (entries[0] if len(entries) == 1 else dict(enumerate(entries)))
    real = unpack(name, tmp_path / "again") / "common.pt"
    if real.exists() and "reshardable" in name:
        assert optimizer == torch.load(real, weights_only=False)["optimizer"]


def test_parameter_groups_of_a_run_of_ours_are_made_from_its_settings(tmp_path, capsys):
    state = {"model.layers.0.mlp.down.weight": torch.ones(4, 4).bfloat16(), "model.layers.0.ffn_norm.weight": torch.ones(4).bfloat16()}
    state |= {
        f"optimizer.{kind}.{name.removeprefix('model.')}": torch.ones(value.shape)
        for name, value in state.items()
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    save(state, tmp_path / "ours", extra={"optimizer_step": 9, "trainer": {"step": 12}}, assets={"run.yaml": b"lr: 3.0e-4"})
    assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / "none") == ["optimizer_param_groups"]
    settings = {"lr": 3e-4, "min_lr": 3e-5, "weight_decay": 0.1, "adam_beta2": 0.95, "optimizer": "adam", "clip_grad": 1.0}
    (tmp_path / "adam.json").write_text(json.dumps(settings))
    command = ["export-megatron", str(tmp_path / "ours"), "--optimizer-config", str(tmp_path / "adam.json")]
    assert main([*command, str(tmp_path / "theirs")]) == 0 and "left out" not in capsys.readouterr().err
    common = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert read_asset(tmp_path / "theirs", "run.yaml") == b"lr: 3.0e-4"
    assert common["iteration"] == 12 and [tuple(group[key] for key in IDENTITY) for group in groups] == [
        (1.0, 1.0, False, False, 3e-4, 3e-5),
        (0.0, 1.0, False, False, 3e-4, 3e-5),
    ]
    assert [(group["weight_decay"], group["betas"], group["step"]) for group in groups] == [(0.1, (0.9, 0.95), 9), (0.0, (0.9, 0.95), 9)]
    check_groups_of_a_step_that_says_its_settings(tmp_path, state, settings)
    # The optimizers of torch take them.
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in groups]
    adam = torch.optim.AdamW([{"params": [weight]} for weight in weights], lr=1.0)
    adam.load_state_dict({"state": {}, "param_groups": [{**group, "params": [number]} for number, group in enumerate(groups)]})
    sum(weight.sum() for weight in weights).backward()
    adam.step()
    assert all(torch.isfinite(weight).all() and (weight < 1).all() for weight in weights)
    for wrong, word in (({}, "no lr"), ({**settings, "optimizer": "muon"}, "muon"), ({**settings, "decoupled_lr": 1.0}, "decoupled_lr")):
        with pytest.raises(ValueError, match=word):
            export_checkpoint_megatron(tmp_path / "ours", tmp_path / "wrong", optimizer_config=wrong)
        assert not (tmp_path / "wrong").exists()


def check_groups_of_a_step_that_says_its_settings(folder, state, settings):
    """The same groups, with the rate of the step, and the schedule; they come back; what a loader there cannot match is left out."""
    scheduler = {"max_lr": 3e-4, "min_lr": 3e-5, "num_steps": 36, "lr_decay_style": "cosine"}
    extra = {"optimizer_step": 9, "optimizer_config": settings, "learning_rate": 2e-4, "opt_param_scheduler": scheduler}
    save(state, folder / "said", extra=extra)
    assert export_checkpoint_megatron(folder / "said", folder / "dist") == []
    import_checkpoint_megatron(folder / "dist", folder / "back", config={"num_query_groups": 1})
    back = read_manifest(folder / "back").extra
    groups = [(row["lr"], row["max_lr"], row["wd_mult"], row["step"], row["eps"]) for row in back["optimizer_param_groups"]]
    assert groups == [(2e-4, 3e-4, wd_mult, 9, 1e-8) for wd_mult in (1.0, 0.0)]
    assert back["opt_param_scheduler"] == scheduler and back["optimizer_step"] == 9
    assert export_checkpoint_megatron(folder / "back", folder / "again") == []
    first, second = (torch.load(folder / name / "common.pt", weights_only=False) for name in ("dist", "again"))
    assert first["optimizer"] == second["optimizer"] and first["opt_param_scheduler"] == second["opt_param_scheduler"]
    # A file says more, or other things.
    export_checkpoint_megatron(folder / "said", folder / "other", optimizer_config={"adam_eps": 1e-6})
    (group, _) = torch.load(folder / "other" / "common.pt", weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert (group["lr"], group["eps"], group["betas"]) == (2e-4, 1e-6, (0.9, 0.95))
    save(state, folder / "named", extra={"optimizer_config": {**settings, "param_groups": [["embedding.*"]]}})
    assert export_checkpoint_megatron(folder / "named", folder / "none2") == ["optimizer_param_groups", "opt_param_scheduler"]


@pytest.mark.parametrize("name", ["0.16_buckets", pytest.param("0.19_experts", marks=pytest.mark.journey)])
def test_what_is_exported_comes_back_and_the_optimizer_is_fully_reshardable(name, imported, tmp_path):
    assert export_checkpoint_megatron(imported(name), tmp_path / "theirs") == []
    tensors = read_manifest(tmp_path / "theirs").tensors
    assert tensors["optimizer.state.exp_avg.decoder.layers.self_attention.linear_qkv.weight"].shape == (2, 32, 16)
    assert json.loads((tmp_path / "theirs" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    common = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)
    assert common["args"].num_query_groups == 2 and common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert main(["import-megatron", str(tmp_path / "theirs"), str(tmp_path / "again"), "--prefix", "model."]) == 0
    assert diff(imported(name), tmp_path / "again") == []


def test_layers_that_differ_and_names_without_a_place_are_named(tmp_path):
    save({"model.layers.0.mlp.down.weight": torch.ones(4, 4), "model.layers.1.mlp.up.weight": torch.ones(4, 4)}, tmp_path / "odd")
    with pytest.raises(CheckpointingException, match=r"only the layers \[0\] of 2 have it"):
        export_checkpoint_megatron(tmp_path / "odd", tmp_path / "out")
    save({"weight": torch.ones(2)}, tmp_path / "plain")
    with pytest.raises(CheckpointingException, match=r"holds no layers of a GPT model \(model\.layers\.\*\)"):
        export_checkpoint_megatron(tmp_path / "plain", tmp_path / "out2")


@pytest.mark.parametrize("format", EXPORT_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_values_of_one_byte_whose_scales_would_be_lost_are_refused_before_anything_is_written(tmp_path, format, dtype):
    weights = {f"model.layers.{number}.mlp.down.weight": torch.ones(4, 4) for number in range(2)}
    save({**weights, "model.layers.1.mlp.down.weight": torch.ones(4, 4).to(dtype)}, tmp_path / "rounded")
    with pytest.raises(CheckpointingException, match=rf"model\.layers\.1\.mlp\.down\.weight is in {dtype}, a format whose scales"):
        export_checkpoint_megatron(tmp_path / "rounded", tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()
    save(weights, tmp_path / "plain")
    assert export_checkpoint_megatron(tmp_path / "plain", tmp_path / "out", format=format) == []


def test_the_newest_iteration_is_found_by_its_tracker(tmp_path):
    run = tmp_path / "run"
    unpack("0.16_buckets", run)
    (run / "0.16_buckets").rename(run / "iter_0000007")
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    import_checkpoint_megatron(run, tmp_path / "ours", optimizer=False)
    assert "optimizer_step" not in read_manifest(tmp_path / "ours").extra
    (run / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with pytest.raises(CheckpointingException, match="an iteration or release is expected"):
        import_checkpoint_megatron(run, tmp_path / "more")


def test_a_missing_rank_and_sizes_that_do_not_fit_are_named(tmp_path):
    legacy = unpack("0.16_legacy", tmp_path)
    for file in (legacy / "mp_rank_01_000").iterdir():
        file.unlink()
    (legacy / "mp_rank_01_000").rmdir()
    with pytest.raises(CheckpointingException, match="no directory of tensor-parallel rank 1 of stage 0"):
        import_checkpoint_megatron(legacy, tmp_path / "ours")
    flat = unpack("0.16_buckets", tmp_path)
    with pytest.raises(CheckpointingException, match="fits no known order"):
        import_checkpoint_megatron(flat, tmp_path / "ours", config={"tensor_model_parallel_size": 1})
    with pytest.raises(CheckpointingException, match="num_query_groups=5 does not divide"):
        import_checkpoint_megatron(flat, tmp_path / "ours", config={"num_query_groups": 5})
    assert not (tmp_path / "ours").exists()


def test_nothing_in_common_state_or_a_ranks_file_is_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    folder = unpack("0.16_reshardable", tmp_path)
    common = read_torch(folder / "common.pt")
    plain = {"iteration": 7, "attack": Attack(), "args": {"num_query_groups": 2}}
    assert common["iteration"] == 7
    torch.save(plain, folder / "common.pt", pickle_module=pickle)
    import_checkpoint_megatron(folder, tmp_path / "ours", config={"num_query_groups": 2})
    assert not (tmp_path / "ran").exists() and read_manifest(tmp_path / "ours").extra["iteration"] == 7


def test_zarr_names_torch_dist(tmp_path):
    folder = tmp_path / "iter_0000001"
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with pytest.raises(CheckpointingException, match="torch_dist"):
        import_checkpoint_megatron(folder, tmp_path / "ours")


def test_unknown_tensors_are_named_and_can_be_dropped(tmp_path):
    save(
        {"decoder.layers.0.mlp.linear_fc2.weight": torch.ones(2, 2), "mtp.layers.0.eh_proj.weight": torch.ones(2)},
        tmp_path / "a",
        format="torch_dist",
    )
    with pytest.raises(CheckpointingException, match=r"does not know: mtp\.layers\.0\.eh_proj\.weight"):
        import_checkpoint_megatron(tmp_path / "a", tmp_path / "ours")
    assert import_checkpoint_megatron(tmp_path / "a", tmp_path / "ours", drop=("mtp.*",)) == ["mtp.layers.0.eh_proj.weight"]
    assert set(read_manifest(tmp_path / "ours").tensors) == {"model.layers.0.mlp.down.weight"}
