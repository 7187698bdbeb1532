# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""TRL gets a model of the shape that is measured here, and the same prompts; where it is installed a step of it runs on the CPU."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tools.bench.rl import SIZES, EvenShare
from tools.bench.rl_trl import main, vllm_share, write_model
from tools.bench.serve import MODELS


def test_the_written_model_has_the_shape_and_reads_prompts_as_ids(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, work = MODELS["tiny"], SIZES["tiny"]
    write_model(config, tmp_path, torch.device("cpu"), work.inputs + work.outputs)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.get_input_embeddings().weight.shape == (config.vocab_size, config.hidden_size)
    assert (model.config.num_hidden_layers, model.config.num_key_value_heads) == (config.num_layers, config.kv_heads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = EvenShare(config.vocab_size - 2, work.inputs).problem(3).prompt
    ids = tokenizer(prompt)["input_ids"]
    assert (
        ids == [int(word) for word in prompt.split()]
        and tokenizer.decode([*ids, config.vocab_size - 1], skip_special_tokens=True) == prompt
    )
    # 128 bytes a token and layer, keys and values of 2 heads of 16 in bfloat16; 8 answers of 24 tokens over 2 layers.
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert vllm_share(config, tmp_path, work, 2**34) == pytest.approx((stored + 1.1 * 8 * 24 * 2 * 128 + 6 * 2**30) / 2**34)


def test_a_step_of_trl_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(sys, "argv", ["rl_trl", "--model", "tiny", "--size", "tiny", "--device", "cpu"])
    main()
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"'))
    assert (first["step"], second["step"]) == (1, 2) and second["generated"] == 2 * 4 * 16 and second["grad_norm"] > 0 < second["whole_s"]
