# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Folders in MXFP4 and in fp8 with scales: what their weights mean, whole and in parts, and what is refused."""

import gc
import itertools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from mcore_ckpt import CheckpointingException, ShardedTensor, read_tensor  # noqa: E402
from mcore_ckpt.cli import main  # noqa: E402
from mcore_ckpt.hf import _import as importing  # noqa: E402
from mcore_ckpt.hf import export_hf, import_checkpoint_hf, import_hf, load_hf  # noqa: E402
from mcore_ckpt.hf._quantized import dequantize_fp8, dequantize_mxfp4  # noqa: E402
from mcore_ckpt.manifest import read_manifest  # noqa: E402
from tests.support.quantized_folders import to_fp8, write_folder, write_quantized  # noqa: E402

SIZES = {"vocab_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.3}
# Blocks of 128 are cut short everywhere, and groups of 32 are cut by slices below.
MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "gpt_oss": (
        "GptOss",
        {
            "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2,
            "head_dim": 16,
        },
        "mxfp4",
        {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
    ),
    "deepseek3": (
        "DeepseekV3",
        {
            "hidden_size": 160, "intermediate_size": 264, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 130,
            "qk_nope_head_dim": 40, "qk_rope_head_dim": 4, "v_head_dim": 36, "first_k_dense_replace": 1, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 136,
        },
        "fp8",
        {"scale_fmt": "ue8m0"},
    ),
    "qwen3": ("Qwen3", {"hidden_size": 160, "intermediate_size": 264, "num_key_value_heads": 2, "head_dim": 36}, "fp8", {}),
    "qwen3_tensor": (
        "Qwen3", {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}, "fp8", {"weight_block_size": None},
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write(request.param, tmp_path_factory.mktemp(request.param))


def write(name: str, place: Path, dtype: torch.dtype = torch.float32, **changes: int) -> tuple[Path, Path]:
    """A random model: its quantised folder, and that of the dequantised weights."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    kind, sizes, method, entries = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **{**sizes, **changes})
    getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).save_pretrained(place / "source")
    write_quantized(place / "source", place / "quantized", place / "twin", method, **entries)
    return place / "quantized", place / "twin"


def check_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


def test_every_pair_of_bytes_means_what_transformers_takes_it_for() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    # Every byte under every scale but NaN's: [1, 255, 16, 16].
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    for dtype, bits in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32)):
        ours = dequantize_mxfp4(blocks, scales, dtype).transpose(1, 2).contiguous()
        theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert torch.equal(ours.view(bits), theirs.view(bits))
    assert dequantize_mxfp4(blocks[:, :1], torch.full((1, 1, 16), 255, dtype=torch.uint8), torch.float32).isnan().all()
    half = dequantize_mxfp4(blocks[:, :1], torch.full((1, 1, 16), 120, dtype=torch.uint8), torch.float16)
    wanted = convert_moe_packed_tensors(blocks[:, :1], torch.full((1, 1, 16), 120, dtype=torch.uint8), dtype=torch.float32).transpose(1, 2)
    assert torch.equal(half.float(), wanted)


def test_blocks_in_fp8_mean_what_transformers_takes_them_for() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    torch.manual_seed(0)
    narrow, scales, _ = to_fp8(torch.randn(256, 384), (128, 128))
    # Every byte, NaN too.
    narrow[0, :256] = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in (torch.bfloat16, torch.float32):
        wanted = Fp8Dequantize(None)._dequantize_one(narrow, scales, dtype)
        torch.testing.assert_close(dequantize_fp8(narrow, scales, (128, 128), dtype), wanted, rtol=0, atol=0, equal_nan=True)
        rows = dequantize_fp8(narrow[100:140], scales, (128, 128), dtype, first_row=100)
        assert torch.equal(rows, wanted[100:140])


def test_an_import_is_that_of_the_dequantised_folder(folders: tuple[Path, Path], tmp_path: Path) -> None:
    quantized, twin = folders
    read, wanted = import_hf(quantized), import_hf(twin)
    assert (read.family, read.config) == (wanted.family, wanted.config)
    check_same(dict(read.tensors), dict(wanted.tensors))
    for dtype in (None, torch.bfloat16):
        checkpoints = [tmp_path / f"{folder.name}-{dtype}" for folder in folders]
        for folder, checkpoint in zip(folders, checkpoints, strict=True):
            import_checkpoint_hf(folder, checkpoint, dtype=dtype)
        names = read_manifest(checkpoints[1]).tensors
        check_same(*({name: read_tensor(checkpoint, name) for name in names} for checkpoint in checkpoints))


def test_transformers_reads_the_same_out_of_the_folder(tmp_path: Path) -> None:
    quantized, _ = write("gpt_oss", tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        quantized, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
    )
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    write_folder(tmp_path / "theirs", theirs.state_dict(), config)
    check_same(dict(import_hf(quantized).tensors), dict(import_hf(tmp_path / "theirs").tensors))


def test_weights_come_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    quantized, twin = write("gpt_oss", tmp_path, torch.bfloat16)
    check_same(dict(import_hf(quantized).tensors), dict(import_hf(twin).tensors))
    assert {tensor.dtype for _, tensor in import_hf(quantized).tensors} == {torch.bfloat16}
    edit(quantized, lambda config: [config.pop(name, None) for name in ("dtype", "torch_dtype")])
    assert {tensor.dtype for _, tensor in import_hf(quantized).tensors} == {torch.bfloat16}


@pytest.mark.parametrize("kind", ["bf16", "e8m0", "bytes"])
def test_scales_are_read_in_the_dtypes_that_are_published(kind: str, tmp_path: Path) -> None:
    quantized, twin = write("deepseek3", tmp_path)

    def narrow(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            exponents = tensors[name].to(torch.float8_e8m0fnu)
            tensors[name] = {"bf16": tensors[name].bfloat16(), "e8m0": exponents, "bytes": exponents.view(torch.uint8)}[kind]

    rewrite(quantized, narrow)
    check_same(dict(import_hf(quantized).tensors), dict(import_hf(twin).tensors))


def test_one_scale_a_tensor_may_be_called_weight_scale(tmp_path: Path) -> None:
    quantized, twin = write("qwen3_tensor", tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name).reshape(1)
            tensors[name.replace("weight_scale_inv", "input_scale")] = torch.ones(())

    rewrite(quantized, rename)
    edit(quantized, lambda config: config["quantization_config"].pop("weight_block_size"))
    check_same(dict(import_hf(quantized).tensors), dict(import_hf(twin).tensors))


def test_experts_in_one_tensor_have_blocks_of_their_own(tmp_path: Path) -> None:
    """As the modules of transformers hold them."""
    quantized, twin = write("deepseek3", tmp_path)

    def stack(tensors: dict[str, Tensor]) -> None:
        for layer in {name.partition(".mlp.experts.")[0] for name in tensors if ".mlp.experts." in name}:
            for name in ("down_proj",):
                for end in ("", "_scale_inv"):
                    parts = [tensors.pop(f"{layer}.mlp.experts.{expert}.{name}.weight{end}") for expert in range(4)]
                    tensors[f"{layer}.mlp.experts.{name}{end}"] = torch.stack(parts)

    rewrite(quantized, stack)
    check_same(dict(import_hf(quantized).tensors), dict(import_hf(twin).tensors))


def test_parts_are_those_of_the_whole_wherever_they_are_cut(folders: tuple[Path, Path]) -> None:
    wanted = dict(import_hf(folders[1]).tensors)
    for folder, dim, rank in itertools.product(folders, range(4), range(3)):
        state: dict[str, list[ShardedTensor]] = {}
        for name, whole in wanted.items():
            if dim < whole.dim():
                begin, end = (whole.shape[dim] * number // 3 for number in (rank, rank + 1))
                middle = (begin + end) // 2
                # Two boxes a tensor.
                state[name] = [box(whole, dim, begin, middle), box(whole, dim, middle, end)]
        assert load_hf(folder, {**state, "other": torch.zeros(3)}) == {"other"}
        for name, boxes in state.items():
            for one in boxes:
                source = wanted[name].narrow(dim, one.offset[dim], one.data.shape[dim])
                assert torch.equal(one.data, source), (folder.name, name, dim, rank)


def box(whole: Tensor, dim: int, begin: int, end: int) -> ShardedTensor:
    offset = [0] * whole.dim()
    offset[dim] = begin
    shape = [*whole.shape]
    shape[dim] = end - begin
    return ShardedTensor(torch.full(shape, math.nan), tuple(whole.shape), tuple(offset))


def test_fp8_without_a_word_of_its_scales_is_refused(tmp_path: Path) -> None:
    quantized, _ = write("qwen3", tmp_path)
    edit(quantized, lambda config: config.pop("quantization_config"))
    with pytest.raises(CheckpointingException, match=r"\.weight.* are in fp8, and config\.json has no quantization_config that says"):
        import_hf(quantized)


def test_no_columns_are_dequantised_to_none() -> None:
    empty = torch.empty(4, 0, dtype=torch.float8_e4m3fn)
    assert dequantize_fp8(empty, torch.ones(1, 0), (128, 128), torch.float32).shape == (4, 0)


def test_a_rank_reads_its_experts_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[int, ...]] = []

    def watched(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        reads.append(tuple(blocks.shape))
        return dequantize_mxfp4(blocks, scales, dtype)

    quantized, twin = write("gpt_oss", tmp_path)
    monkeypatch.setattr("mcore_ckpt.hf._quantized.dequantize_mxfp4", watched)
    name = "layers.1.mlp.experts.up"
    whole = dict(import_hf(twin).tensors)[name]
    part = box(whole, 0, 1, 3)
    assert load_hf(quantized, {name: part}) == frozenset()
    assert torch.equal(part.data, whole[1:3])
    assert reads == [(1, 192, 2, 16)] * 2
    apart = [box(whole, 0, 0, 1), box(whole, 0, 3, 4)]
    assert load_hf(quantized, {name: apart}) == frozenset()
    assert torch.equal(torch.cat([part.data for part in apart]), whole[[0, 3]])
    assert reads == [(1, 192, 2, 16)] * 4
    with pytest.raises(CheckpointingException, match=r"experts\.up has shape \[4, 2, 96, 64\], this model's \[8, 2, 96, 64\]; make model"):
        load_hf(quantized, {name: ShardedTensor(torch.zeros(2, 2, 96, 64), (8, 2, 96, 64), (0, 0, 0, 0))})


@pytest.mark.journey
@pytest.mark.parametrize(("name", "count"), [("gpt_oss", "num_local_experts"), ("deepseek3", "n_routed_experts")])
def test_beside_the_tensor_only_copies_of_one_expert_are_in_memory(name: str, count: str, tmp_path: Path) -> None:
    experts = 32
    quantized, _ = write(name, tmp_path, **{count: experts})
    opened = importing._open(quantized, (), None)
    site, form = next(pair for pair in opened.chosen if pair[0].name == "layers.1.mlp.experts.up")
    for dtype in (torch.float32, torch.bfloat16):
        # What is freed meanwhile counts, also garbage of before.
        gc.collect()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            tensor = opened.read(site, form, dtype)
        live = peak = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        one = tensor.nbytes // experts
        assert tensor.nbytes <= peak <= tensor.nbytes + 4 * one, (peak / one, experts)


REFUSED: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "no scales": (
        "gpt_oss",
        lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_scales"),
        r"model\.layers\.1\.mlp\.experts\.down_proj_blocks lacks its scale model\.layers\.1\.mlp\.experts\.down_proj_scales; fetch the",
    ),
    "no blocks": (
        "gpt_oss",
        lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_blocks"),
        r"down_proj_scales is the scale of model\.layers\.1\.mlp\.experts\.down_proj_blocks, which is missing",
    ),
    "blocks of floats": (
        "gpt_oss",
        lambda tensors: tensors.update({(name := "model.layers.0.mlp.experts.down_proj_blocks"): tensors[name].float()}),
        r"down_proj_blocks is F32 \[4, 64, 3, 16\], mxfp4 means U8 \[E, O, G, 16\]",
    ),
    "scales of another shape": (
        "gpt_oss",
        lambda tensors: tensors.update({(name := "model.layers.0.mlp.experts.down_proj_scales"): tensors[name][:, :-1]}),
        r"down_proj_scales is U8 \[4, 63, 3\], its blocks mean U8 \[4, 64, 3\]",
    ),
    "stored twice": (
        "gpt_oss",
        lambda tensors: tensors.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 96, 64)}),
        r"down_proj is stored twice, quantised and not; remove",
    ),
    "another number of experts": (
        "gpt_oss",
        lambda tensors: tensors.update(
            {name: tensors[name][:3] for name in tensors if name.startswith("model.layers.0.mlp.experts.down_proj_")}
        ),
        r"model\.layers\.0\.mlp\.experts\.down_proj has shape \[3, 96, 64\], config\.json means \[4, 96, 64\]",
    ),
    "no scale": (
        "qwen3",
        lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight_scale_inv"),
        r"model\.layers\.0\.mlp\.up_proj\.weight lacks its scale model\.layers\.0\.mlp\.up_proj\.weight_scale_inv",
    ),
    "no weight": (
        "qwen3",
        lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.weight"),
        r"up_proj\.weight_scale_inv is the scale of model\.layers\.0\.mlp\.up_proj\.weight, which is missing",
    ),
    "a weight that is wide": (
        "qwen3",
        lambda tensors: tensors.update({(name := "model.layers.0.mlp.up_proj.weight"): tensors[name].bfloat16()}),
        r"up_proj\.weight_scale_inv is the scale of model\.layers\.0\.mlp\.up_proj\.weight, which is BF16, not F8_E4M3",
    ),
    "blocks of another size": (
        "qwen3",
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(5, 3)}),
        r"weight_scale_inv has shape \[5, 3\], weight_block_size=\[128, 128\] means \[3, 2\] for model\.layers\.0\.mlp\.up_proj",
    ),
    "two scales": (
        "qwen3",
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(3, 2)}),
        r"up_proj\.weight has two scales, .*weight_scale_inv and .*weight_scale;",
    ),
    "bytes that are no exponents": (
        "qwen3",
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 2, dtype=torch.uint8)}),
        r"weight_scale_inv is U8, fp8 means one of F32, BF16, F16, F8_E8M0",
    ),
    "a norm in fp8": (
        "qwen3",
        lambda tensors: tensors.update(
            {"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn), "model.norm.weight_scale_inv": torch.ones(2)}
        ),
        r"model\.norm\.weight has shape \[160\], fp8 means at least two dims",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scales_and_weights_that_do_not_belong_together_are_named(case: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    name, change, words = REFUSED[case]
    quantized, _ = write(name, tmp_path)
    rewrite(quantized, change)
    for attempt in (import_hf, lambda folder: import_checkpoint_hf(folder, tmp_path / "out"), lambda folder: load_hf(folder, {})):
        with pytest.raises(CheckpointingException, match=words):
            attempt(quantized)
    assert not (tmp_path / "out").exists()


ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    **{
        method: ({"quant_method": method}, rf"quantization_config\.quant_method='{method}' is not read; 'mxfp4' and 'fp8' are")
        for method in ("gptq", "awq", "bitsandbytes", "compressed-tensors")
    },
    "none": ({"quant_method": None, "load_in_4bit": True}, r"quantization_config\.quant_method=None is not read"),
    "block": (
        {"weight_block_size": [128]},
        r"weight_block_size=\[128\] is no size of blocks; only two positive ints, such as \[128, 128\]",
    ),
    "nothing": ({"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\] is no size"),
    "other": ({"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\] means \["),
    "fmt": ({"fmt": "e5m2"}, r"quantization_config\.fmt='e5m2' is not read; only 'e4m3' is"),
    "scales": ({"scale_fmt": "log"}, r"quantization_config\.scale_fmt='log' is not read; only 'float' and 'ue8m0' is"),
    "experts": ({"expert_dtype": "fp4"}, r"quantization_config\.expert_dtype='fp4' is not read"),
    "unknown": ({"rotation": "hadamard"}, r"quantization_config\.rotation='hadamard' is not known; remove it"),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_another_quantisation_is_refused_by_name(case: str, tmp_path: Path) -> None:
    changes, words = ENTRIES[case]
    quantized, _ = write("qwen3", tmp_path)
    edit(quantized, lambda config: config["quantization_config"].update(changes))
    with pytest.raises(CheckpointingException, match=words):
        import_checkpoint_hf(quantized, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    edit(quantized, lambda config: config.update(quantization_config=["fp8"]))
    with pytest.raises(CheckpointingException, match=r"quantization_config=\['fp8'\] must be a group of entries"):
        import_hf(quantized)


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    """DeepSeek-V3 stores them behind its last layer."""
    quantized, twin = write("deepseek3", tmp_path)

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.1.")]:
            tensors[name.replace(".1.", ".2.", 1)] = tensors[name].clone()
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(160, 320)

    rewrite(quantized, add)
    edit(quantized, lambda config: config.update(num_nextn_predict_layers=1))
    check_same(dict(import_hf(quantized).tensors), dict(import_hf(twin).tensors))
    edit(quantized, lambda config: config.pop("num_nextn_predict_layers"))
    with pytest.raises(CheckpointingException, match=r"weights this model does not have: model\.layers\.2\."):
        import_hf(quantized)


def test_the_commands_import_and_export_without_a_quantisation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantized, twin = write("gpt_oss", tmp_path, torch.bfloat16)
    assert main(["import-hf", str(quantized), str(tmp_path / "step")]) == 0
    assert main(["export-hf", str(tmp_path / "step"), str(tmp_path / "out")]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    check_same(load_file(tmp_path / "out" / "model.safetensors"), load_file(twin / "model.safetensors"))
    family, config, tensors = import_hf(quantized)
    export_hf(tensors, tmp_path / "again", family=family, config=config)
    check_same(load_file(tmp_path / "again" / "model.safetensors"), load_file(twin / "model.safetensors"))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
