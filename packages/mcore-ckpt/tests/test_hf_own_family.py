# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Families that this wheel does not know: given by hand, or named by another installed package."""

import json
import math
from dataclasses import replace

import pytest
import torch

from mcore_ckpt import CheckpointingException, read_tensor
from mcore_ckpt._storage import SafetensorsFile
from mcore_ckpt.cli import main
from mcore_ckpt.hf import export_checkpoint_hf, export_hf, families_of, import_checkpoint_hf, import_hf
from mcore_ckpt.hf._config import complete, measure
from mcore_ckpt.hf._families import FAMILIES
from mcore_ckpt.hf.families import LETTERS, Family, Form, HFPart, PartLayout, WeightRule, find_family, rename_weights, renamed, same

LAYER = "decoder.{layer}."
FUSED = WeightRule(
    "layers.{layer}.attention.qkv.weight",
    ("K", "R", "D"),
    (Form((HFPart(LAYER + "attn.wqkv.weight", ("QKV", "D"), ("Q", "C", "C")),), PartLayout.GROUPED, "K"),),
)
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 24, "vocab_size": 48}


def made_up() -> Family:
    """A Llama with other names, fused projections, and another entry for its depth."""
    llama = find_family("llama")
    rules = rename_weights(llama.rules, {"model.layers.{layer}.": LAYER, "model.embed_tokens": "wte", "self_attn": "attn"})
    return replace(
        llama,
        name="parrot",
        model_type="parrot",
        architecture="ParrotForCausalLM",
        codecs=(renamed("num_layers", "depth"), *(codec for codec in llama.codecs if "num_layers" not in codec.ours)),
        rules=(*(rule for rule in rules if rule.name != FUSED.name), FUSED),
    )


def weights(family):
    """Every tensor by our name."""
    full, generator = complete(SIZES, family), torch.Generator().manual_seed(1)
    shapes = {rule.name.format(layer=layer): rule.shape for rule in family.rules if not rule.when for layer in range(2)}
    shapes["output.weight"] = ("V", "D")
    numbers = measure(full)
    return {name: torch.randn([numbers.get(d, d) for d in shape], generator=generator) for name, shape in shapes.items()}


def stored(folder):
    """Their names and tensors."""
    file = SafetensorsFile(folder / "model.safetensors")
    return {name: file.tensor(name).clone() for name in file.slots}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make packages that name objects of this file, as an installer would leave them."""

    def install(package, *lines):
        folder = tmp_path / "site" / f"{package}-1.0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[mcore_ckpt.hf_families]\n" + "\n".join(lines) + "\n")
        (tmp_path / "site" / f"{package}_code.py").write_text(
            "from dataclasses import replace\n"
            "from mcore_ckpt.hf.families import find_family\n"
            "PARROT = replace(find_family('llama'), name='parrot', model_type='parrot', architecture='ParrotForCausalLM')\n"
            "ANOTHER = replace(PARROT, name='another')\n"
            "LLAMA = replace(PARROT, name='llama')\n"
            "NUMBER = 3\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path / "site"))

    return install


def test_a_family_of_ones_own_goes_out_and_in_bit_for_bit(tmp_path):
    family = made_up()
    tensors = weights(family)
    export_hf(tensors, tmp_path / "out", family=family, config=SIZES)
    entries = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (entries["model_type"], entries["depth"], entries["architectures"]) == ("parrot", 2, ["ParrotForCausalLM"])
    read = import_hf(tmp_path / "out", family=family)
    back = dict(read.tensors)
    assert read.family == "parrot" and back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


def test_fused_projections_are_the_three_of_llama_one_after_another(tmp_path):
    tensors = weights(made_up())
    export_hf(tensors, tmp_path / "own", family=made_up(), config=SIZES)
    export_hf(tensors, tmp_path / "llama", family="llama", config=SIZES)
    own, llama = stored(tmp_path / "own"), stored(tmp_path / "llama")
    rows = torch.cat([llama[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(own["decoder.1.attn.wqkv.weight"], rows)
    assert torch.equal(own["decoder.1.attn.o_proj.weight"], llama["model.layers.1.self_attn.o_proj.weight"])
    assert torch.equal(own["wte.weight"], llama["model.embed_tokens.weight"])


def test_a_checkpoint_takes_it_both_ways(tmp_path):
    family = made_up()
    tensors = weights(family)
    export_hf(tensors, tmp_path / "hf", family=family, config=SIZES)
    import_checkpoint_hf(tmp_path / "hf", tmp_path / "step", prefix="model.", family=family)
    assert torch.equal(read_tensor(tmp_path / "step", "model.layers.1.mlp.up.weight"), tensors["layers.1.mlp.up.weight"])
    export_checkpoint_hf(tmp_path / "step", tmp_path / "again", family=family, config=SIZES, prefix="model.")
    again = dict(import_hf(tmp_path / "again", family=family).tensors)
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)


def test_an_installed_package_gives_its_family_to_every_function_and_the_command(installed, tmp_path, capsys):
    installed("birds", "parrot = birds_code:PARROT")
    assert find_family("parrot").architecture == "ParrotForCausalLM"
    assert families_of(SIZES)[0] == "llama" and families_of(SIZES)[-1] == "parrot"
    export_hf(weights(FAMILIES["llama"]), tmp_path / "hf", family="parrot", config=SIZES)
    assert import_hf(tmp_path / "hf").family == "parrot"
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "step")]) == 0
    assert main(["export-hf", str(tmp_path / "step"), str(tmp_path / "again")]) == 0
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "parrot"
    assert main(["export-hf", str(tmp_path / "step"), str(tmp_path / "third"), "--family", "parot"]) != 0
    assert "family='parot' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["llama = {}_code:LLAMA"], "name='llama', which is taken"),
        (["a = {0}_code:PARROT", "b = {0}_code:ANOTHER"], "model_type='parrot', which {} describes"),
        (["a = {}_code:NUMBER"], "is a int; name a mcore_ckpt.hf.families.Family"),
        (["a = {}_code:MISSING"], "does not load: AttributeError"),
    ],
)
def test_a_package_that_cannot_be_honoured_is_named(installed, request, lines, message):
    package = f"birds{abs(hash(request.node.name))}"
    installed(package, *(line.format(package) for line in lines))
    with pytest.raises(CheckpointingException, match=f"of {package}") as caught:
        families_of(SIZES)
    assert message.format(package) in str(caught.value)


def test_an_unfinished_family_is_refused_by_what_it_lacks():
    llama = find_family("llama")
    with pytest.raises(ValueError, match="architecture='' says nothing"):
        replace(llama, architecture="")
    with pytest.raises(ValueError, match="lacks a codec for vocab_size; add renamed"):
        replace(llama, codecs=tuple(codec for codec in llama.codecs if codec.ours != ("vocab_size",)))
    with pytest.raises(ValueError, match=r"has values for num_layer \(did you mean num_layers\?\)"):
        replace(llama, implies={"num_layer": 3})
    with pytest.raises(ValueError, match="lacks a rule for embedding.weight"):
        replace(llama, rules=llama.rules[1:])
    with pytest.raises(ValueError, match="two rules for embedding.weight"):
        replace(llama, rules=(*llama.rules, llama.rules[0]))
    with pytest.raises(ValueError, match="size 'Z' is none of"):
        same("a.weight", "b.weight", "Z")
    with pytest.raises(ValueError, match=r"\['block'\] to fill in"):
        same("a.weight", "b.{block}.weight", "D")
    with pytest.raises(ValueError, match="at least one HFPart"):
        WeightRule("a.weight", ("D",), ())
    with pytest.raises(ValueError, match="new='modle': no name has this part"):
        rename_weights(llama.rules, {"modle": "m"})


def test_a_folder_of_another_kind_is_refused(tmp_path):
    export_hf(weights(FAMILIES["llama"]), tmp_path / "hf", family="llama", config=SIZES)
    with pytest.raises(CheckpointingException, match="model_type='llama' is none of parrot"):
        import_hf(tmp_path / "hf", family=made_up())


def test_letters_are_those_that_are_measured():
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 4, "vocab_size": 8}
    full = {
        **complete({**sizes, "ffn_hidden_size": 8}, FAMILIES["llama"]),
        "latent_attention": {"q_lora_rank": 2, "kv_lora_rank": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2},
        "mamba": {"state_dim": 2, "head_dim": 2, "num_groups": 1, "num_heads": 2, "conv_kernel": 2, "dt_limits": (0.0, math.inf)},
    }
    assert measure(full).keys() == LETTERS
