# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The verbs begin with a folder as it is published, in fp8: they generate, tune and export what its dequantised twin gives."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mcore_ckpt.hf import import_hf
from mcore_inference import SamplingParams
from mcore_tools.cli import main
from mcore_tools.serving import open_engine
from mcore_tools.training import find_origin
from tests.support.published import write_chat, write_published
from tests.support.quantized_folders import write_quantized

pytest.importorskip("transformers")

PROMPTS = [[5, 9, 2, 17], [7], list(range(3, 80, 2))]


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``quantized`` and its ``twin``, each beside a tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write_published(tmp_path / "source", hidden_size=160, intermediate_size=264, initializer_range=0.2)
    write_quantized(tmp_path / "source", tmp_path / "quantized", tmp_path / "twin", "fp8")
    for name in ("quantized", "twin"):
        for path in (tmp_path / "source").iterdir():
            if not (tmp_path / name / path.name).exists():
                shutil.copy(path, tmp_path / name)
    return tmp_path


def test_an_engine_gives_the_tokens_of_the_dequantised_folder(published: Path) -> None:
    params = SamplingParams(temperature=0, num_tokens_to_generate=12, ignore_eos=True, return_log_probs=True)
    ours, wanted = (
        [
            (record.generated_tokens, record.generated_log_probs)
            for record in open_engine(published / name, "cpu", max_length=128, cache_gb=0.01).generate(PROMPTS, params)
        ]
        for name in ("quantized", "twin")
    )
    assert ours == wanted


def test_a_run_of_one_that_says_no_dtype_is_in_that_of_its_weights(published: Path) -> None:
    """As gpt-oss is published."""
    path = published / "quantized" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}))
    assert {tensor.dtype for _, tensor in import_hf(published / "quantized").tensors} >= {torch.bfloat16}
    assert find_origin(str(published / "quantized")).dtype == "bfloat16"


@pytest.mark.journey
def test_the_verbs_begin_with_it_and_write_none(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    still = [word for field in ("train.steps=1", "train.seq_len=64", "optimizer.lr=0", "optimizer.min_lr=0") for word in ("--set", field)]
    quiet = ["--set", "log.tensorboard=false", "--set", "log.html=false"]
    write_chat(published / "chat.jsonl")
    assert main(["sft", "quantized", "--data", "chat.jsonl", "--output", "tuned", *still, *quiet]) == 0
    exported = published / "tuned" / "hf"
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    tuned, wanted = dict(import_hf(exported).tensors), dict(import_hf(published / "twin").tensors)
    assert tuned.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(tuned[name].float(), tensor, rtol=0, atol=0)
    capsys.readouterr()
    texts = []
    for name in ("quantized", "twin"):
        assert main(["generate", name, "--prompt", "which fruit", "--max-tokens", "4", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    config = json.loads((published / "quantized" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (published / "quantized" / "config.json").write_text(json.dumps(config))
    for verb in (["generate", "quantized", "--prompt", "which"], ["convert", "import-hf", "quantized", "start"]):
        assert main(verb) != 0
        assert "quantization_config.quant_method='gptq' is not read; 'mxfp4' and 'fp8' are" in capsys.readouterr().err
    assert not (published / "start").exists()
