# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The command, as a user meets it."""

import json
import runpy
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager, load, save
from mcore_ckpt.cli import main
from mcore_ckpt.hf import import_hf
from mcore_ckpt.hf._config import complete, measure
from mcore_ckpt.hf._families import FAMILIES
from mcore_ckpt.hf._rules import sites

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def run_folder(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    manager.save(3, {"a.weight": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, {"loss": 0.5})
    manager.save(7, {"a.weight": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, {"loss": 0.25})
    return tmp_path / "run"


def test_inspect_shows_the_newest_step_as_a_table(run_folder, capsys):
    assert main(["inspect", str(run_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["a.weight", "F32", "[2,", "3]", "1", "24"]
    assert lines[-2].startswith("2 tensors, 10 elements, 1 files, ")
    assert lines[-1] == "extra: loss"


def test_inspect_as_json_has_everything(run_folder, capsys):
    assert main(["inspect", str(run_folder / "step_00000003"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["extra"] == {"loss": 0.5} and shown["num_elements"] == 10
    assert shown["tensors"]["b"] == {"dtype": "BF16", "shape": [4], "num_chunks": 1, "num_bytes": 8}


def test_verify_names_every_damaged_file_and_exits_1(run_folder, capsys):
    assert main(["verify", str(run_folder)]) == 0
    assert capsys.readouterr().out.endswith("step_00000007: sound\n")
    (shard,) = (run_folder / "step_00000007").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 128
    shard.write_bytes(content)
    assert main(["verify", str(run_folder)]) == 1
    assert shard.name in capsys.readouterr().out
    assert main(["verify", str(run_folder / "step_00000003")]) == 0


def test_what_cannot_be_done_exits_2_with_one_line(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "is not a checkpoint" in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as caught:
        main(["no-such-command"])
    assert caught.value.code == 2


def test_a_model_goes_out_to_hugging_face_and_back(tmp_path, capsys):
    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    full = complete(config, FAMILIES["llama"])
    state = {f"model.{site.name}": torch.randn(site.shape) for site in sites(FAMILIES["llama"].rules, measure(full), full)}
    save(state, tmp_path / "c")
    (tmp_path / "sizes.json").write_text(json.dumps(config))
    arguments = ["--family", "llama", "--config", str(tmp_path / "sizes.json"), "--prefix", "model."]
    assert main(["export-hf", str(tmp_path / "c"), str(tmp_path / "hf"), *arguments]) == 0
    assert import_hf(tmp_path / "hf").config["hidden_size"] == 8
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "back"), "--prefix", "model."]) == 0
    back = {name: torch.zeros_like(value) for name, value in state.items()}
    assert load(back, tmp_path / "back")["family"] == "llama"
    theirs = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"attention_dropout": 0.1}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(theirs))
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "none")]) == 2
    assert "attention_dropout=0.1 is not supported" in capsys.readouterr().err and not (tmp_path / "none").exists()
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "without"), "--ignore", "attention_dropout"]) == 0
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert main(["export-hf", str(tmp_path / "c"), str(tmp_path / "hf"), *arguments]) == 2
    assert "not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "sizes.json: No such file"), ("{", "sizes.json is no JSON"), ("[]", "sizes.json holds a list"), ("{}", "num_layers")],
)
def test_a_bad_file_of_sizes_is_named_and_nothing_is_written(tmp_path, capsys, content, words):
    save({"a": torch.zeros(2)}, tmp_path / "c")
    if content is not None:
        (tmp_path / "sizes.json").write_text(content)
    arguments = ["--family", "llama", "--config", str(tmp_path / "sizes.json")]
    assert main(["export-hf", str(tmp_path / "c"), str(tmp_path / "hf"), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not (tmp_path / "hf").exists()


def test_the_first_example_of_the_readme_runs_in_an_empty_folder(tmp_path, monkeypatch, capsys):
    code = README.read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "example.py").write_text(code)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    assert capsys.readouterr().out
