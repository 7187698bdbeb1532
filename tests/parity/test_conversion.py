# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every family there and back, by the commands of the table: the same bits, the same config, and transformers computes the same."""

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from mcore_ckpt.cli import main
from mcore_ckpt.hf import import_hf
from tests.parity.references import REFERENCES, apply, build, draw_batch
from tests.parity.table import commands


def stored(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return apply(model, draw_batch(""))["logits"]


@pytest.mark.parametrize("name", REFERENCES)
def test_in_and_out_again_is_bit_equal_and_computes_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    reference, model = REFERENCES[name], build(name)
    source = reference.published or name
    theirs, ours = Path(source), Path(f"{source}-out")
    model.save_pretrained(theirs)
    for command in commands(source, reference.ignored):
        program, *arguments = shlex.split(command)
        assert (program, main(arguments)) == ("mcore-ckpt", 0)
    before, after = stored(theirs), stored(ours)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    family, config, _ = import_hf(theirs)
    assert family == reference.family and import_hf(ours).config == config
    again = type(model).from_pretrained(ours, attn_implementation="eager").eval()
    assert torch.equal(logits(again), logits(model))
