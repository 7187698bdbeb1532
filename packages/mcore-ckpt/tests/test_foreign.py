# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files of torch.save and entries of its checkpoints that are no tensors, read without running what they hold."""

import argparse
import collections
import os
import pathlib
import random

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from mcore_ckpt import CheckpointingException, load
from mcore_ckpt.cli import main
from mcore_ckpt.foreign import Foreign, import_torch, read_entry, read_torch
from mcore_ckpt.manifest import read_manifest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.fixture
def legacy(tmp_path):
    weight = torch.arange(12.0).reshape(3, 4)
    content = {
        "args": argparse.Namespace(hidden_size=4, betas=[0.9, 0.95], where=pathlib.PurePosixPath("x")),
        "iteration": 100,
        "checkpoint_version": 3.0,
        "model": collections.OrderedDict(weight=weight, view=weight.t()[1:], half=weight[0].bfloat16()),
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3, 4), "step": torch.tensor(5)}}, "param_groups": [{"lr": 0.5, "params": [0]}]},
        "rng_state": [{"random": random.Random(1).getstate()[:1], "cpu": torch.get_rng_state()}],
        "evil": Evil(),
    }
    torch.save(content, tmp_path / "model_optim_rng.pt")
    return tmp_path / "model_optim_rng.pt", content


def test_a_file_of_torch_save_comes_as_plain_values_and_tensors_and_runs_nothing(legacy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, content = legacy
    value = read_torch(path)
    assert value["iteration"] == 100 and value["args"]["hidden_size"] == 4 and value["args"]["betas"] == [0.9, 0.95]
    assert isinstance(value["args"]["where"], Foreign) and value["args"]["where"].arguments == ("x",)
    assert all(torch.equal(value["model"][name], content["model"][name]) for name in content["model"])
    assert torch.equal(value["rng_state"][0]["cpu"], content["rng_state"][0]["cpu"])
    assert value["evil"].name.endswith(".system") and value["evil"].arguments == ("touch ran",) and not (tmp_path / "ran").exists()


def test_it_becomes_a_checkpoint_by_the_command(legacy, tmp_path, capsys):
    path, content = legacy
    assert main(["import-torch", str(path), str(tmp_path / "c")]) == 0
    assert capsys.readouterr().err == "left out, because they are neither tensors nor JSON values: args.where, evil\n"
    state = {
        "model.view": torch.zeros(3, 3),
        "optimizer.state.0.exp_avg": torch.zeros(3, 4),
        "rng_state.0.cpu": torch.zeros_like(torch.get_rng_state()),
    }
    extra = load(state, tmp_path / "c", strict=False)
    assert torch.equal(state["model.view"], content["model"]["view"]) and state["optimizer.state.0.exp_avg"].all()
    assert extra["iteration"] == 100 and extra["optimizer.param_groups.0.lr"] == 0.5 and extra["args.betas"] == [0.9, 0.95]
    assert main(["import-torch", str(path), str(tmp_path / "c")]) == 2
    torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, path)
    with pytest.raises(CheckpointingException, match=r"two tensors that would be called m\.a\.b"):
        import_torch(path, tmp_path / "d", prefix="m.")


def test_entries_of_a_checkpoint_of_torch_that_are_no_tensors(tmp_path):
    entries = {"w": torch.ones(2), "note": {"lr": 0.5, "rest": [1, (2, "x")]}, "step": 7, "kinds": {1, 2}}
    state_dict_saver.save(entries, checkpoint_id=tmp_path / "c")
    others = read_manifest(tmp_path / "c").others
    values = {name: read_entry(tmp_path / "c", name) for name in others}
    assert values["step"] == 7 and values["note.lr"] == 0.5 and values["note.rest"] == [1, (2, "x")]
    assert isinstance(values["kinds"], Foreign) and values["kinds"].name.endswith(".set")
    with pytest.raises(CheckpointingException, match="no entry w that is no tensor"):
        read_entry(tmp_path / "c", "w")


def test_200_damaged_files_read_or_raise_the_one_error(legacy, tmp_path):
    path, _ = legacy
    content, rng, refused = path.read_bytes(), random.Random(4), 0
    for _ in range(200):
        broken = bytearray(content)
        for _ in range(rng.randint(1, 3)):
            broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken[: rng.randrange(len(broken))] if rng.random() < 0.2 else broken)
        try:
            read_torch(path)
        except CheckpointingException as error:
            assert path.name in str(error)
            refused += 1
    assert refused > 40


def test_references_stay_shared_and_those_that_would_multiply_are_refused(tmp_path):
    value = [0]
    for _ in range(10):
        value = [value, value]
    torch.save(value, tmp_path / "shared.pt")
    read = read_torch(tmp_path / "shared.pt")
    assert read[0] is read[1] and read == value
    for _ in range(50):
        value = [value, value]
    torch.save(value, tmp_path / "bomb.pt")
    with pytest.raises(CheckpointingException, match=r"bomb\.pt: .*stands for more than \d+ values, by references"):
        read_torch(tmp_path / "bomb.pt")
    loop = []
    loop.append(loop)
    torch.save(loop, tmp_path / "loop.pt")
    with pytest.raises(CheckpointingException, match=r"loop\.pt: not a sound file"):
        read_torch(tmp_path / "loop.pt")
    torch.save([1], tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointingException, match=r"old\.pt: not a sound file"):
        read_torch(tmp_path / "old.pt")


def test_tensors_that_share_memory_stay_shared(tmp_path):
    weight = torch.arange(1000.0)
    torch.save({"embedding": weight, "head": weight, "expanded": weight[:1].expand(3, 4)}, tmp_path / "tied.pt")
    read = read_torch(tmp_path / "tied.pt")
    assert read["embedding"].data_ptr() == read["head"].data_ptr() and torch.equal(read["expanded"], torch.zeros(3, 4))
