# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A manifest is believed only when everything in it holds."""

import hashlib
import json
import math

import pytest
import torch

from mcore_ckpt import CheckpointingException, load, save
from mcore_ckpt._core._manifest import FORMAT_VERSION, check_extra
from mcore_ckpt.manifest import Manifest, is_checkpoint, read_manifest


@pytest.fixture
def checkpoint(tmp_path):
    save({"w": torch.arange(6.0), "b": torch.ones(2)}, tmp_path / "c", extra={"step": 3})
    return tmp_path / "c"


def reseal(folder, change):
    """Change the manifest and make its digest right again, as an attacker would."""
    body = json.loads((folder / "manifest.json").read_text())
    change(body)
    body.pop("sha256")
    body["sha256"] = hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(body))


def rename_file(new):
    def change(body):
        body["files"] = {new: next(iter(body["files"].values()))}
        for tensor in body["tensors"].values():
            for chunk in tensor["chunks"]:
                chunk[0] = new

    return change


@pytest.mark.parametrize("name", ["../c2/x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", ".hidden.safetensors", "x.bin", ""])
def test_a_file_name_that_leaves_the_folder_is_refused(checkpoint, name):
    reseal(checkpoint, rename_file(name))
    with pytest.raises(CheckpointingException, match="does not stay inside the folder"):
        load({"w": torch.zeros(6), "b": torch.zeros(2)}, checkpoint)


def test_a_link_out_of_the_folder_is_refused(checkpoint, tmp_path):
    (shard,) = checkpoint.glob("*.safetensors")
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointingException, match="not a plain file"):
        load({"w": torch.zeros(6), "b": torch.zeros(2)}, checkpoint)


def test_a_newer_format_is_refused_with_the_remedy(checkpoint):
    reseal(checkpoint, lambda body: body.update(version=FORMAT_VERSION + 1))
    with pytest.raises(CheckpointingException, match=r"format version 2; this release reads up to 1, upgrade mcore-ckpt"):
        read_manifest(checkpoint)


def test_unknown_fields_are_left_alone(checkpoint):
    reseal(checkpoint, lambda body: body.update(later={"more": 1}))
    assert read_manifest(checkpoint).extra == {"step": 3}


CHANGES = {
    "a hole": lambda body: body["tensors"]["w"].update(shape=[7]),
    "an overlap": lambda body: body["tensors"]["w"]["chunks"].append(body["tensors"]["w"]["chunks"][0]),
    "an unknown file": lambda body: body["tensors"]["w"]["chunks"][0].__setitem__(0, "other.safetensors"),
    "an unknown dtype": lambda body: body["tensors"]["w"].update(dtype="F1"),
    "a negative size": lambda body: next(iter(body["files"].values())).update(bytes=-1),
    "no tensors": lambda body: body.pop("tensors"),
    "tensors a list": lambda body: body.update(tensors=[]),
    "extra a list": lambda body: body.update(extra=[]),
    "a fractional offset": lambda body: body["tensors"]["w"]["chunks"][0].__setitem__(2, [0.0]),
    "another format": lambda body: body.update(format="other"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_that_contradicts_itself_is_refused(checkpoint, change):
    reseal(checkpoint, change)
    with pytest.raises(CheckpointingException, match=r"manifest\.json"):
        load({"w": torch.zeros(6), "b": torch.zeros(2)}, checkpoint)


def test_every_flipped_bit_of_a_manifest_is_noticed(checkpoint):
    good = (checkpoint / "manifest.json").read_bytes()
    for place in range(0, len(good), 7):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        try:
            decoded = Manifest.decode(bytes(bad))
        except ValueError:
            continue
        # White space between tokens carries nothing.
        assert decoded == Manifest.decode(good)


def test_tensors_swapped_inside_a_resealed_manifest_are_noticed_when_read(checkpoint):
    reseal(checkpoint, lambda body: body["tensors"]["w"]["chunks"][0].__setitem__(1, "b"))
    with pytest.raises(CheckpointingException, match="not what the manifest says"):
        load({"w": torch.zeros(6), "b": torch.zeros(2)}, checkpoint)


def test_what_is_no_checkpoint_says_what_it_is(tmp_path):
    def refusal(path):
        assert not is_checkpoint(path)
        with pytest.raises(CheckpointingException) as caught:
            read_manifest(path)
        return str(caught.value)

    assert "no such folder" in refusal(tmp_path / "none")
    assert "has no manifest.json" in refusal(tmp_path)
    (tmp_path / "file").write_text("x")
    assert "it is a file" in refusal(tmp_path / "file")
    for name, word in ((".zarray", "torch_dist"), ("step_00000001", "CheckpointManager")):
        folder = tmp_path / f"with{name}"
        (folder / name).mkdir(parents=True)
        assert word in refusal(folder)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "00000000-r00000-000.safetensors").write_text("x")
    assert "a save that never finished" in refusal(tmp_path / "half")


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": {1: 2}}, "extra.a: key 1"),
        ({"a": [0, {"b": torch.ones(1)}]}, r"extra.a\[1\].b is Tensor"),
        ({"a": b"x"}, "extra.a is bytes"),
        ([("step", 3)], "extra is list; give a dict"),
        (3, "extra is int; give a dict"),
    ],
)
def test_extra_that_json_would_change_is_refused_by_place(tmp_path, value, place):
    with pytest.raises(ValueError, match=place):
        check_extra(value)
    with pytest.raises(CheckpointingException, match=place):
        save({"w": torch.ones(1)}, tmp_path / "c", extra=value)
    assert not is_checkpoint(tmp_path / "c")


def test_extra_comes_back(tmp_path):
    extra = {"loss": math.inf, "none": None, "nested": {"list": [1, 2.5, "x", True], "tuple": (1, 2)}, "text": "caf\u00e9 \U0001f600"}
    save({"w": torch.ones(1)}, tmp_path / "c", extra=extra)
    assert load({"w": torch.zeros(1)}, tmp_path / "c") == {**extra, "nested": {"list": [1, 2.5, "x", True], "tuple": [1, 2]}}
