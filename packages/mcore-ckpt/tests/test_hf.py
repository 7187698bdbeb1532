# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hugging Face in and out, judged by transformers itself."""

import json
import os
import shutil
import weakref

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from mcore_ckpt import CheckpointingException, ShardedTensor, read_tensor, save  # noqa: E402
from mcore_ckpt._storage import SafetensorsFile  # noqa: E402
from mcore_ckpt.hf import _import as importing  # noqa: E402
from mcore_ckpt.hf import export_checkpoint_hf, export_hf, import_checkpoint_hf, import_hf, tokenizer_files  # noqa: E402
from mcore_ckpt.hf._config import complete, measure  # noqa: E402
from mcore_ckpt.hf._families import FAMILIES  # noqa: E402
from mcore_ckpt.hf._rules import join, sites  # noqa: E402
from mcore_ckpt.manifest import read_manifest  # noqa: E402
from mcore_ckpt.rewrite import Rewrite, rewrite  # noqa: E402

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
MODELS = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_mha": ("Llama", {"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="module", params=MODELS)
def source(request, tmp_path_factory):
    """A random model of each kind as transformers writes it: (folder, model)."""
    kind, changes = MODELS[request.param]
    torch.manual_seed(len(request.param))
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def read_all(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with SafetensorsFile(path) as file:
            tensors |= {name: file.tensor(name).clone() for name in file.slots}
    return tensors


def logits(model):
    tokens = torch.arange(2 * 9).reshape(2, 9) * 5 % SIZES["vocab_size"]
    with torch.no_grad():
        return model(tokens).logits


def test_there_and_back_is_bit_equal_and_transformers_computes_the_same_logits(source, tmp_path):
    folder, model = source
    family, config, tensors = import_hf(folder)
    export_hf(tensors, tmp_path / "out", family=family, config=config, max_shard_bytes=4000, hf_config={"max_position_embeddings": 32})
    before, after = read_all(folder), read_all(tmp_path / "out")
    if config["share_embeddings_and_output_weights"]:
        before.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded), logits(model))
    assert import_hf(tmp_path / "out").config == config


def test_our_shapes_and_names_are_the_global_ones(source):
    family, config, tensors = import_hf(source[0])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors if not name.startswith("layers.1.")}
    groups = config["num_query_groups"]
    want = {
        "embedding.weight": (48, 16),
        "final_norm.weight": (16,),
        "output.weight": (48, 16),
        "layers.0.input_norm.weight": (16,),
        "layers.0.attention.qkv.weight": (groups, (4 // groups + 2) * 6, 16),
        "layers.0.attention.out.weight": (16, 24),
        "layers.0.ffn_norm.weight": (16,),
    }
    if family == "mixtral":
        want |= {"layers.0.mlp.router.weight": (4, 16), "layers.0.mlp.experts.up": (4, 2, 20, 16), "layers.0.mlp.experts.down": (4, 16, 20)}
    else:
        want |= {"layers.0.mlp.up.weight": (2, 20, 16), "layers.0.mlp.down.weight": (16, 20)}
    if config["share_embeddings_and_output_weights"]:
        del want["output.weight"]
    assert shapes == want


def test_rows_of_a_group_are_its_queries_then_key_then_value_and_the_gate_comes_first(llama):
    theirs, ours = read_all(llama), dict(import_hf(llama).tensors)
    layer = "model.layers.1."
    q, k, v = (theirs[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv")
    second_group = ours["layers.1.attention.qkv.weight"][1]
    assert torch.equal(second_group, torch.cat((q[12:24], k[6:12], v[6:12])))
    assert torch.equal(ours["layers.1.mlp.up.weight"][0], theirs[layer + "mlp.gate_proj.weight"])
    assert torch.equal(ours["layers.1.mlp.up.weight"][1], theirs[layer + "mlp.up_proj.weight"])


def test_experts_are_read_from_stacked_tensors_too(tmp_path):
    config = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config))
    model.save_pretrained(tmp_path / "files")
    memory = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if "model.layers.0.mlp.experts.gate_up_proj" not in memory:
        pytest.skip("this transformers holds experts one by one")
    import safetensors.torch

    (tmp_path / "memory").mkdir()
    safetensors.torch.save_file(memory, tmp_path / "memory" / "model.safetensors")
    (tmp_path / "memory" / "config.json").write_bytes((tmp_path / "files" / "config.json").read_bytes())
    one, other = dict(import_hf(tmp_path / "files").tensors), dict(import_hf(tmp_path / "memory").tensors)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_exports_whatever_else_it_holds(llama, tmp_path):
    family, config, tensors = import_hf(llama)
    state = {f"model.{name}": tensor for name, tensor in tensors} | {"optimizer.step": torch.tensor(3)}
    save(state, tmp_path / "c", max_file_bytes=3000)
    export_checkpoint_hf(tmp_path / "c", tmp_path / "out", family=family, config=config, prefix="model.", dtype=torch.bfloat16)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    theirs, stored = read_all(llama), read_all(tmp_path / "out")
    assert all(torch.equal(stored[name], theirs[name].bfloat16()) for name in theirs)
    with pytest.raises(CheckpointingException, match=r"lacks .*embedding\.weight.*is prefix='' right"):
        export_checkpoint_hf(tmp_path / "c", tmp_path / "no", family=family, config=config)
    with pytest.raises(CheckpointingException, match=r"weights this model does not have: model\.layers\.1\.attention"):
        export_checkpoint_hf(tmp_path / "c", tmp_path / "no", family=family, config={**config, "num_layers": 1}, prefix="model.")
    assert not (tmp_path / "no").exists()


def test_wrong_weights_are_named_and_leave_no_folder(llama, tmp_path):
    family, config, tensors = import_hf(llama)
    good = dict(tensors)

    def refusal(weights, error=CheckpointingException, **changes):
        with pytest.raises(error) as caught:
            export_hf(weights, tmp_path / "out", **{"family": family, "config": config, **changes})
        assert list(tmp_path.iterdir()) == []
        return str(caught.value)

    renamed = {("layers.0.mlp.downn.weight" if name == "layers.0.mlp.down.weight" else name): value for name, value in good.items()}
    text = refusal(renamed)
    assert "missing weights: layers.0.mlp.down.weight (did you mean layers.0.mlp.downn.weight?)" in text
    assert "does not have: layers.0.mlp.downn.weight" in text
    shaped = {**good, "final_norm.weight": torch.ones(17)}
    assert "final_norm.weight has shape [17], family llama with this config has [16]" in refusal(shaped)
    assert "final_norm.weight given twice" in refusal([*good.items(), ("final_norm.weight", torch.ones(16))])
    part = {**good, "final_norm.weight": ShardedTensor(torch.ones(8), (16,), (8,))}
    assert "only a part" in refusal(part)
    # Stored values of a weight in eight bits, which convert to anything.
    rounded = {**good, "layers.0.mlp.down.weight": good["layers.0.mlp.down.weight"].to(torch.float8_e4m3fn)}
    for dtype in (None, torch.bfloat16):
        assert "layers.0.mlp.down.weight is in torch.float8_e4m3fn, a format whose scales" in refusal(rounded, dtype=dtype)
    assert "the families are bamba, " in refusal(good, ValueError, family="gpt5")
    assert "family llama does not express: mup_width (did you mean" in refusal(good, ValueError, config={**config, "mup_width": 3})
    assert "config lacks num_layers" in refusal(good, ValueError, config={k: v for k, v in config.items() if k != "num_layers"})
    assert "does not have: output.weight" in refusal(good, config={**config, "share_embeddings_and_output_weights": True})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    with pytest.raises(ValueError, match="not an empty folder"):
        export_hf(good, tmp_path / "out", family=family, config=config)


def test_a_short_config_means_what_it_leaves_out(llama, tmp_path):
    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16, "share_embeddings_and_output_weights": True}
    full = complete(config, FAMILIES["llama"])
    tensors = {site.name: torch.zeros(site.shape) for site in sites(FAMILIES["llama"].rules, measure(full), full)}
    (tmp_path / "out").mkdir()
    export_hf(tensors, tmp_path / "out", family="llama", config={**config, "num_query_groups": None, "ffn_hidden_size": None})
    read = import_hf(tmp_path / "out")
    assert read.config == {
        **config,
        "num_query_groups": 2,
        "ffn_hidden_size": 32,
        "kv_channels": 4,
        "norm_epsilon": 1e-5,
        "rotary_base": 10_000.0,
        "init_method_std": 0.02,
    }
    assert dict(read.tensors).keys() == tensors.keys()


CONFIG_CHANGES = {
    "lacks factor": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
    "rope_type='dynamic'": {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2}},
    "attention_bias=True": {"attention_bias": True},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "quantization_config": {"quantization_config": {"bits": 4}},
    "model_type='gpt2' is none of ": {"model_type": "gpt2"},
    "lacks hidden_size": {"hidden_size": ...},
    "num_hidden_layers": {"num_hidden_layers": "2"},
}


@pytest.mark.parametrize("words", CONFIG_CHANGES)
def test_a_model_we_do_not_describe_is_refused_by_field(llama, tmp_path, words):
    copy = clone(llama, tmp_path)
    edit(copy, CONFIG_CHANGES[words])
    with pytest.raises(CheckpointingException) as caught:
        import_hf(copy)
    assert words.replace("num_hidden_layers", "num_layers='2'") in str(caught.value)


def test_an_older_spelling_of_the_rotary_base_is_understood(llama, tmp_path):
    copy = clone(llama, tmp_path)
    edit(copy, {"rope_parameters": ..., "rope_theta": 250.0})
    assert import_hf(copy).config["rotary_base"] == 250.0


def test_weights_that_do_not_match_the_config_are_listed(llama, tmp_path):
    copy = clone(llama, tmp_path)
    edit(copy, {"num_hidden_layers": 3, "intermediate_size": 21})
    with pytest.raises(CheckpointingException) as caught:
        import_hf(copy)
    assert "missing weights: model.layers.2." in str(caught.value)
    assert "model.layers.0.mlp.down_proj.weight has shape [16, 20], config.json means [16, 21]" in str(caught.value)
    with pytest.raises(CheckpointingException, match="missing weights"):
        import_checkpoint_hf(copy, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    edit(copy, {"num_hidden_layers": 1, "intermediate_size": 20})
    with pytest.raises(CheckpointingException, match=r"weights this model does not have: model\.layers\.1\."):
        import_hf(copy)


def test_memory_holds_one_tensor_at_a_time(llama, tmp_path, monkeypatch):
    alive = weakref.WeakSet()
    most = 0

    def watched(*arguments):
        nonlocal most
        most = max(most, len(alive))
        tensor = join(*arguments)
        alive.add(tensor)
        return tensor

    monkeypatch.setattr(importing, "join", watched)
    import_checkpoint_hf(llama, tmp_path / "c")
    assert most <= 1
    family, config, tensors = import_hf(llama)
    export_hf(tensors, tmp_path / "out", family=family, config=config, max_shard_bytes=100)
    assert most <= 1
    assert read_all(llama).keys() == read_all(tmp_path / "out").keys()


def test_a_sentence_pair_head_that_is_stored_is_there_whatever_the_class_is_called(tmp_path):
    sizes = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    transformers.BertForPreTraining(transformers.BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    edit(tmp_path / "bert", {"architectures": ["BertForMaskedLM"]})
    read = import_hf(tmp_path / "bert", ignore=("hidden_dropout_prob", "attention_probs_dropout_prob"))
    assert read.config["add_binary_head"] is True
    assert "binary_head.weight" in dict(read.tensors)


def test_an_output_layer_of_its_own_in_a_tied_model_is_refused(llama, tmp_path):
    copy = clone(llama, tmp_path)
    edit(copy, {"tie_word_embeddings": True})
    with pytest.raises(CheckpointingException, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        import_hf(copy)


def test_an_index_that_points_outside_or_nowhere_is_refused(llama, tmp_path):
    copy = clone(llama, tmp_path)
    index = copy / "model.safetensors.index.json"
    for file, words in (
        ("../x.safetensors", "does not stay inside"),
        ("gone.safetensors", "is missing"),
        ("model.safetensors", "do not hold them"),
    ):
        index.write_text(json.dumps({"weight_map": {"nothing": file}}))
        with pytest.raises(CheckpointingException, match=words):
            import_hf(copy)
    index.write_text("[]")
    with pytest.raises(CheckpointingException, match="not a JSON object"):
        import_hf(copy)
    index.unlink()
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointingException, match=r"neither model\.safetensors\.index\.json nor"):
        import_hf(copy)


def clone(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def edit(folder, changes):
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def test_the_tokenizer_goes_in_and_out_with_the_weights(llama, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    texts = {
        "tokenizer.json": "{}",
        "tokenizer_config.json": "[]",
        "special_tokens_map.json": "1",
        "merges.txt": "a b",
        "generation_config.json": "{}",
    }
    for name, text in {**texts, "README.md": "no", "training_args.bin": "no"}.items():
        (source / name).write_text(text)
    import_checkpoint_hf(source, tmp_path / "ours", prefix="model.")
    assert set(read_manifest(tmp_path / "ours").assets) == {f"tokenizer/{name}" for name in texts}
    config = read_manifest(tmp_path / "ours").extra["config"]
    export_checkpoint_hf(tmp_path / "ours", tmp_path / "out", family="llama", config=config, prefix="model.")
    assert {name: (tmp_path / "out" / name).read_text() for name in texts} == texts
    # What the export itself writes is not replaced.
    more = {"tokenizer/config.json": b"{}", "tokenizer/extra/chat.jinja": b"hi", "run.yaml": b""}
    rewrite(tmp_path / "ours", tmp_path / "bare", Rewrite(rename=lambda name: name.removeprefix("model.")))
    tensors = {name: read_tensor(tmp_path / "bare", name) for name in read_manifest(tmp_path / "bare").tensors}
    save(tensors, tmp_path / "more", assets=more)
    export_checkpoint_hf(tmp_path / "more", tmp_path / "out2", family="llama", config=config)
    assert json.loads((tmp_path / "out2" / "config.json").read_text())["model_type"] == "llama"
    assert (tmp_path / "out2" / "extra" / "chat.jinja").read_text() == "hi" and not (tmp_path / "out2" / "run.yaml").exists()


def test_a_tokenizer_is_a_folder_or_a_file(tmp_path):
    (tmp_path / "mine.json").write_text("{}")
    assert tokenizer_files(tmp_path / "mine.json") == {"tokenizer/tokenizer.json": tmp_path / "mine.json"}
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert set(tokenizer_files(tmp_path / "mine.json")) == {"tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"}
    assert set(tokenizer_files(tmp_path)) == {"tokenizer/tokenizer_config.json"}
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        tokenizer_files(tmp_path / "none")


def test_a_missing_model_is_named_without_an_error_of_the_system(tmp_path):
    with pytest.raises(CheckpointingException, match=rf"^there is no folder {tmp_path}/gone; name the folder of a Hugging Face model$"):
        import_hf(tmp_path / "gone")
    with pytest.raises(CheckpointingException, match=rf"^{tmp_path} has no config.json; name the folder"):
        import_checkpoint_hf(tmp_path, tmp_path / "out")
