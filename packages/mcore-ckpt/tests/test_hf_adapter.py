# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters in PEFT's format: out, in, merged, and judged by transformers."""

import json
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from mcore_ckpt import CheckpointingException, save  # noqa: E402
from mcore_ckpt._storage import SafetensorsFile, dtype_code, write_safetensors  # noqa: E402
from mcore_ckpt.cli import main  # noqa: E402
from mcore_ckpt.hf import (  # noqa: E402
    HFAdapterConfig,
    StoredAdapter,
    export_adapter_hf,
    export_hf,
    import_adapter_hf,
    import_checkpoint_hf,
    import_hf,
    merge_adapter,
)
from mcore_ckpt.hf._adapter import adapted_sites  # noqa: E402
from mcore_ckpt.hf.families import find_family  # noqa: E402

CONFIG = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 20, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6,
    "vocab_size": 48,
}  # fmt: skip
ADAPTER = HFAdapterConfig(rank=3, alpha=6.0, dropout=0.1, base_model="base")
PARTS = {"attention.qkv", "attention.out", "mlp.up", "mlp.down"}


def drawn(sites, rank=3, parts=PARTS):
    """An adapter of every layer with such a part; no two numbers are equal."""
    torch.manual_seed(0)
    tensors = {}
    for name, site in sites.items():
        stem = name.removesuffix(".weight")
        if any(stem.endswith(part) for part in parts):
            tensors |= {stem + ".lora.A": torch.randn(rank, site.shape[-1]), stem + ".lora.B": torch.randn(*site.shape[:-1], rank)}
    return tensors


def read_all(folder):
    with SafetensorsFile(folder / "adapter_model.safetensors") as file:
        return {name: file.tensor(name).clone() for name in file.slots}


def write_all(folder, tensors, **changes):
    """A folder as PEFT writes it."""
    folder.mkdir(exist_ok=True)
    entries = [(name, dtype_code(value.dtype), tuple(value.shape), lambda value=value: value) for name, value in tensors.items()]
    (folder / "adapter_model.safetensors").unlink(missing_ok=True)
    write_safetensors(folder / "adapter_model.safetensors", entries)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"} | changes))
    return folder


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "mistral"])
def test_an_adapter_comes_back_with_its_bits(tmp_path, family) -> None:
    changes = {"qwen2": {"add_qkv_bias": True}, "qwen3": {"qk_layernorm": True}}.get(family, {})
    if family == "gemma3":
        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48}
        model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, num_key_value_heads=2, head_dim=6))
        model.save_pretrained(tmp_path / "base")
        config = import_hf(tmp_path / "base").config
    else:
        config = {**CONFIG, **changes}
    tensors = drawn(adapted_sites(find_family(family), config))
    assert len(tensors) == 16
    export_adapter_hf(tensors, tmp_path / "adapter", family=family, config=config, adapter=ADAPTER)
    adapter, back = import_adapter_hf(tmp_path / "adapter", family=family, config=config)
    assert adapter == ADAPTER
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_the_files_have_the_names_and_shapes_of_peft(tmp_path) -> None:
    tensors = drawn(adapted_sites(find_family("llama"), CONFIG))
    export_adapter_hf(tensors, tmp_path / "adapter", family="llama", config=CONFIG, adapter=ADAPTER)
    shapes = {name: tuple(tensor.shape) for name, tensor in read_all(tmp_path / "adapter").items() if ".layers.1." in name}
    outs = {"self_attn.q_proj": 24, "self_attn.k_proj": 12, "self_attn.v_proj": 12, "self_attn.o_proj": 16}
    outs |= {"mlp.gate_proj": 20, "mlp.up_proj": 20, "mlp.down_proj": 16}
    ins = {"self_attn.o_proj": 24, "mlp.down_proj": 20}
    expected = {}
    for module, out in outs.items():
        stem = f"base_model.model.model.layers.1.{module}"
        expected |= {f"{stem}.lora_A.weight": (3, ins.get(module, 16)), f"{stem}.lora_B.weight": (out, 3)}
    assert shapes == expected
    entries = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert entries["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (entries["r"], entries["lora_alpha"], entries["lora_dropout"], entries["base_model_name_or_path"]) == (3, 6, 0.1, "base")


def test_layers_that_share_a_name_with_one_without_adapter_are_named_whole(tmp_path) -> None:
    tensors = {name: value for name, value in drawn(adapted_sites(find_family("llama"), CONFIG)).items() if "layers.0.mlp.down" in name}
    export_adapter_hf(tensors, tmp_path / "adapter", family="llama", config=CONFIG, adapter=ADAPTER)
    entries = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert entries["target_modules"] == ["model.layers.0.mlp.down_proj"]


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 48}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=6, initializer_range=0.3)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted_by_hand(base, theirs, scaling):
    """Their model with the product of each pair added to the weight that it names."""
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    weights = model.state_dict()
    for name in theirs:
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[module + ".weight"] += scaling * theirs[name.replace("lora_A", "lora_B")] @ theirs[name]
    return model


def logits(model):
    with torch.no_grad():
        return model(torch.arange(12)[None] * 5 % 48).logits


def test_merged_weights_are_those_of_their_adapters_added_to_their_weights(tmp_path, base) -> None:
    family, config, tensors = import_hf(base)
    adapter = drawn(adapted_sites(find_family(family), config))
    export_hf(merge_adapter(tensors, adapter, ADAPTER.scaling), tmp_path / "merged", family=family, config=config)
    export_adapter_hf(adapter, tmp_path / "adapter", family=family, config=config, adapter=ADAPTER)
    expected = logits(adapted_by_hand(base, read_all(tmp_path / "adapter"), 2.0))
    found = logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, logits(transformers.LlamaForCausalLM.from_pretrained(base)), atol=0.1)


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_some_projections_with_matrices_of_their_own_come_in(tmp_path, base, rslora) -> None:
    family, config, tensors = import_hf(base)
    torch.manual_seed(3)
    theirs = {}
    for module, out, width in (("self_attn.q_proj", 24, 16), ("self_attn.v_proj", 12, 16), ("mlp.down_proj", 16, 20)):
        stem = f"base_model.model.model.layers.1.{module}"
        theirs |= {f"{stem}.lora_A.weight": torch.randn(3, width), f"{stem}.lora_B.weight": torch.randn(out, 3)}
    folder = write_all(tmp_path / "adapter", theirs, use_rslora=rslora)
    adapter, ours = import_adapter_hf(folder, family=family, config=config)
    scaling = 6 / 3**0.5 if rslora else 2.0
    assert adapter.rank == 6 and adapter.scaling == pytest.approx(scaling)
    assert {name: tuple(value.shape) for name, value in ours.items()} == {
        "layers.1.attention.qkv.lora.A": (6, 16),
        "layers.1.attention.qkv.lora.B": (2, 24, 6),
        "layers.1.mlp.down.lora.A": (6, 20),
        "layers.1.mlp.down.lora.B": (16, 6),
    }
    export_hf(merge_adapter(tensors, ours, adapter.scaling), tmp_path / "merged", family=family, config=config)
    found = logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(found, logits(adapted_by_hand(base, theirs, scaling)), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_peft_computes_the_same(tmp_path, base, targets) -> None:
    peft = pytest.importorskip("peft")
    family, config, tensors = import_hf(base)
    tensors = dict(tensors)
    their_config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(4)
    model = peft.get_peft_model(transformers.LlamaForCausalLM.from_pretrained(base), their_config).eval()
    model.save_pretrained(tmp_path / "theirs")
    adapter, ours = import_adapter_hf(tmp_path / "theirs", family=family, config=config)
    export_hf(merge_adapter(tensors, ours, adapter.scaling), tmp_path / "merged", family=family, config=config)
    merged = logits(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, logits(model), rtol=1e-4, atol=1e-4)
    # And out again.
    export_adapter_hf(ours, tmp_path / "ours", family=family, config=config, adapter=adapter)
    again = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM.from_pretrained(base), tmp_path / "ours").eval()
    torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-4)


A, B = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight", "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
GOOD = {A: torch.zeros(3, 20), B: torch.zeros(16, 3)}


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        (GOOD, {"peft_type": "LOHA"}, "peft_type='LOHA' is not supported; only 'LORA' is"),
        (GOOD, {"use_dora": True}, "use_dora=True is not supported"),
        (GOOD, {"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} is not supported"),
        (GOOD, {"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported"),
        (GOOD, {"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' changes the base weights"),
        (GOOD, {"r": 4}, "says r=4"),
        (GOOD, {"r": 0}, "r=0 and lora_alpha=6"),
        ({A: GOOD[A]}, {}, "lacks base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"),
        ({**GOOD, "base_model.model.lm_head.weight": torch.zeros(2)}, {}, "lm_head.weight, which are no matrices"),
        ({A: torch.zeros(3, 21), B: GOOD[B]}, {}, r"does not fit model.layers.0.mlp.down_proj.weight, .* \[16, 20\]"),
        ({name.replace("mlp", "ffn"): value for name, value in GOOD.items()}, {}, "no linear layers model.layers.0.ffn.down_proj"),
        ({}, {}, "holds no adapter"),
    ],
)
def test_what_is_no_plain_adapter_of_the_model_is_refused_by_name(tmp_path, tensors, changes, message) -> None:
    folder = write_all(tmp_path / "adapter", tensors, **changes)
    with pytest.raises(CheckpointingException, match=message):
        import_adapter_hf(folder, family="llama", config=CONFIG)


def test_what_cannot_be_written_or_merged_is_refused_by_name(tmp_path) -> None:
    tensors = drawn(adapted_sites(find_family("llama"), CONFIG))

    def export(given, rank=3):
        adapter = HFAdapterConfig(rank=rank, alpha=1.0)
        export_adapter_hf(given, tmp_path / "adapter", family="llama", config=CONFIG, adapter=adapter)

    with pytest.raises(ValueError, match="tensors holds no adapter"):
        export({})
    with pytest.raises(CheckpointingException, match="has rank 3, adapter says 4"):
        export(tensors, rank=4)
    half = {name: value for name, value in tensors.items() if name != "layers.0.mlp.up.lora.B"}
    with pytest.raises(CheckpointingException, match=r"the adapter of layers\.0\.mlp\.up lacks \.lora\.B"):
        export(half)
    with pytest.raises(CheckpointingException, match=r"no linear layers layers\.5\.mlp\.up\.weight"):
        export({name.replace("layers.0.mlp.up", "layers.5.mlp.up"): value for name, value in tensors.items()})
    with pytest.raises(CheckpointingException, match=r"layers\.0\.mlp\.up\.weight belongs to no adapter"):
        export({**tensors, "layers.0.mlp.up.weight": torch.zeros(2)})
    assert not (tmp_path / "adapter").exists()
    with pytest.raises(CheckpointingException, match=r"adapters of weights this model does not have: layers\.0"):
        dict(merge_adapter({"final_norm.weight": torch.ones(2)}, tensors, 1.0))
    with pytest.raises(CheckpointingException, match="does not fit"):
        dict(merge_adapter({"layers.0.mlp.up.weight": torch.ones(2, 3, 4)}, tensors, 1.0))
    pair = {"up.lora.A": torch.ones(1, 2), "up.lora.B": torch.ones(3, 1)}
    with pytest.raises(CheckpointingException, match=r"up.weight is in torch.float8_e4m3fn and can take no sum; merge into the weights as"):
        dict(merge_adapter({"up.weight": torch.ones(3, 2).to(torch.float8_e4m3fn)}, pair, 1.0))


def test_adapters_of_experts_are_merged_expert_by_expert_and_not_written() -> None:
    torch.manual_seed(6)
    A, B, weight = torch.randn(4, 3, 5), torch.randn(4, 2, 6, 3), torch.randn(4, 2, 6, 5)
    adapter = {"layers.0.mlp.experts.up_lora.A": A, "layers.0.mlp.experts.up_lora.B": B}
    merged = dict(merge_adapter({"layers.0.mlp.experts.up": weight}, adapter, 0.5))["layers.0.mlp.experts.up"]
    for expert in range(4):
        torch.testing.assert_close(merged[expert], weight[expert] + 0.5 * B[expert] @ A[expert])
    with pytest.raises(CheckpointingException, match=r"layers\.0\.mlp\.experts\.up: adapters of experts have no form there"):
        export_adapter_hf(adapter, "nowhere", family="llama", config=CONFIG, adapter=ADAPTER)


@pytest.fixture
def stored(tmp_path, base):
    """A checkpoint of adapters, beside it their optimizer's state; (its folder, the adapters)."""
    family, config, _ = import_hf(base)
    adapter = drawn(adapted_sites(find_family(family), config))
    moments = {f"optimizer.exp_avg.{name}": torch.ones_like(value) for name, value in adapter.items()}
    extra = {"family": family, "config": config, "lora": {"rank": 3, "alpha": 6.0, "dropout": 0.1}, "lora_base": str(base)}
    save({**adapter, **moments}, tmp_path / "step", extra=extra)
    return tmp_path / "step", adapter


def test_the_command_exports_stored_adapters_merged_and_by_themselves_and_merges_those_of_peft(tmp_path, base, stored) -> None:
    folder, adapter = stored
    (base / "tokenizer.json").write_text("{}")
    family, config, tensors = import_hf(base)
    expected = dict(merge_adapter(tensors, adapter, 2.0))
    assert main(["export-hf", str(folder), str(tmp_path / "hf")]) == 0
    assert main(["export-adapter", str(folder), str(tmp_path / "adapter")]) == 0
    assert main(["merge-adapter", str(base), str(tmp_path / "adapter"), str(tmp_path / "merged")]) == 0
    settings, ours = import_adapter_hf(tmp_path / "adapter", family=family, config=config)
    assert settings == HFAdapterConfig(rank=3, alpha=6.0, dropout=0.1, base_model=str(base))
    assert ours.keys() == adapter.keys() and all(torch.equal(ours[name], adapter[name]) for name in adapter)
    for name in ("hf", "merged"):
        found = dict(import_hf(tmp_path / name).tensors)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    theirs, again = (json.loads((one / "config.json").read_text()) for one in (base, tmp_path / "merged"))
    assert again["max_position_embeddings"] == theirs["max_position_embeddings"]


def test_adapters_of_a_checkpoint_are_added_to_it(tmp_path, base, stored) -> None:
    _, adapter = stored
    import_checkpoint_hf(base, tmp_path / "whole")
    save(adapter, tmp_path / "other", extra={"lora": {"rank": 3, "alpha": 6.0}, "lora_base": str(tmp_path / "whole")})
    of_other = StoredAdapter.of(tmp_path / "other")
    expected = dict(merge_adapter(import_hf(base).tensors, adapter, 2.0))
    found = dict(of_other.merged())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert StoredAdapter.of(tmp_path / "whole") is None


def test_adapters_without_their_base_are_one_line(tmp_path, base, stored, capsys) -> None:
    folder, adapter = stored
    assert main(["export-hf", str(folder), str(tmp_path / "hf"), "--prefix", "model."]) == 2
    assert "holds adapters, which have none; leave it out" in capsys.readouterr().err
    base.rename(tmp_path / "away")
    assert main(["export-hf", str(folder), str(tmp_path / "hf")]) == 2
    assert f"holds adapters of {base}, and there is no model; put it back" in capsys.readouterr().err
    import_checkpoint_hf(tmp_path / "away", tmp_path / "whole")
    assert main(["export-adapter", str(tmp_path / "whole"), str(tmp_path / "adapter")]) == 2
    assert "holds a whole model and no adapters; export-hf writes it" in capsys.readouterr().err
    save(adapter, tmp_path / "broken", extra={"lora": {"rank": 3}, "lora_base": ""})
    with pytest.raises(CheckpointingException, match="what extra says of its adapters is not complete: 'alpha'"):
        StoredAdapter.of(tmp_path / "broken")
    assert not (tmp_path / "hf").exists() and not (tmp_path / "adapter").exists()
