# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Saving and loading in one process: what comes back, and what is refused before anything is touched."""

import gc
import os
import random
import re
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from mcore_ckpt import CheckpointingException, ShardedTensor, load, read_tensor, save
from mcore_ckpt._core._staging import Staging
from mcore_ckpt.manifest import is_checkpoint, read_manifest


def tree(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_kind_of_value_comes_back_into_its_own_storage(tmp_path):
    parameter = torch.nn.Parameter(torch.randn(4, 3))
    state = {
        "parameter": parameter,
        "part": ShardedTensor(torch.randn(4, 3), (4, 3), (0, 0)),
        "like": SimpleNamespace(data=torch.randn(2), global_shape=(2,), offset=(0,), replica=0),
        "scalar": torch.tensor(7),
        "bf16": torch.randn(3, 5, dtype=torch.bfloat16),
        "view": torch.randn(6, 6)[1:5:2, ::3],
        "empty": torch.zeros(0, 2),
        "flags": torch.tensor([True, False]),
    }
    want = {name: (value if isinstance(value, torch.Tensor) else value.data).detach().clone() for name, value in state.items()}
    assert save(state, tmp_path / "c", extra={"step": 1}) is None
    with torch.no_grad():
        for value in state.values():
            (value if isinstance(value, torch.Tensor) else value.data).zero_()
    assert load(state, tmp_path / "c") == {"step": 1}
    for name, value in state.items():
        assert torch.equal(value if isinstance(value, torch.Tensor) else value.data, want[name]), name
    assert parameter.requires_grad and parameter.grad_fn is None
    assert torch.equal(read_tensor(tmp_path / "c", "view"), want["view"])


def test_parts_of_one_process_load_from_a_whole_and_shards_stay_in_bounds(tmp_path):
    whole = torch.arange(30).reshape(5, 6)
    save({"w": whole, "v": whole.double()}, tmp_path / "c", max_file_bytes=1)
    manifest = read_manifest(tmp_path / "c")
    assert len(manifest.files) == 2
    part = torch.zeros(2, 3, dtype=torch.long)
    load({"w": ShardedTensor(part, (5, 6), (2, 1))}, tmp_path / "c", strict=False)
    assert torch.equal(part, whole[2:4, 1:4])


def test_nothing_is_written_when_the_state_does_not_fit(tmp_path):
    save({"layers.0.weight": torch.ones(2, 3), "bias": torch.ones(3)}, tmp_path / "c")
    target = {"layers.0.wieght": torch.zeros(2, 3), "bias": torch.zeros(4)}
    with pytest.raises(CheckpointingException) as caught:
        load(target, tmp_path / "c")
    assert "layers.0.wieght (did you mean layers.0.weight?)" in str(caught.value)
    assert "bias (stored [3], asked [4])" in str(caught.value)
    assert all(not value.any() for value in target.values())
    with pytest.raises(CheckpointingException, match=r"bias \(stored F32, asked F64\)"):
        load({"bias": torch.zeros(3, dtype=torch.float64)}, tmp_path / "c", strict=False)


def test_a_stored_tensor_nobody_asks_for_needs_strict_off_and_a_missing_one_is_always_an_error(tmp_path):
    save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "c")
    target = torch.zeros(2)
    with pytest.raises(CheckpointingException, match="nobody asks for: b; pass strict=False"):
        load({"a": target}, tmp_path / "c")
    assert not target.any()
    load({"a": target}, tmp_path / "c", strict=False)
    assert target.all()
    with pytest.raises(CheckpointingException, match="missing from the checkpoint: z"):
        load({"a": target, "z": torch.zeros(1)}, tmp_path / "c", strict=False)


@pytest.mark.parametrize("verify", [True, "first"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "remove", "swap"])
def test_a_damaged_file_is_named(tmp_path, damage, verify):
    save({"a": torch.ones(64), "b": torch.ones(64)}, tmp_path / "c", max_file_bytes=1)
    first, second = sorted((tmp_path / "c").glob("*.safetensors"))
    content = bytearray(first.read_bytes())
    if damage == "flip":
        content[random.Random(6).randrange(len(content))] ^= 16
        first.write_bytes(content)
    elif damage == "truncate":
        first.write_bytes(content[:-1])
    elif damage == "extend":
        first.write_bytes(content + b"\0")
    elif damage == "remove":
        first.unlink()
    else:
        first.write_bytes(second.read_bytes())
    state = {"a": torch.zeros(64), "b": torch.zeros(64)}
    message = {"flip": "SHA-256", "swap": "SHA-256", "truncate": "bytes instead of", "extend": "bytes instead of", "remove": "missing"}[
        damage
    ]
    with pytest.raises(CheckpointingException, match=f"{re.escape(first.name)}: .*{message}"):
        load(state, tmp_path / "c", verify=verify)
    # What only the digest tells is known when the file was read through.
    if message != "SHA-256" or verify == "first":
        assert not state["a"].any() and not state["b"].any()
    with pytest.raises(ValueError, match="verify='last' must be"):
        load(state, tmp_path / "c", verify="last")


def test_lengths_are_compared_even_without_verification(tmp_path):
    save({"a": torch.ones(64)}, tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointingException, match="bytes instead of"):
        load({"a": torch.zeros(64)}, tmp_path / "c", verify=False)


def test_a_committed_checkpoint_is_never_overwritten(tmp_path):
    save({"a": torch.ones(2)}, tmp_path / "c")
    before = tree(tmp_path / "c")
    with pytest.raises(CheckpointingException, match="already holds a checkpoint"):
        save({"a": torch.zeros(2)}, tmp_path / "c")
    assert tree(tmp_path / "c") == before


def test_what_an_unfinished_save_left_is_cleared_and_other_files_stay(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    for name in ("0123abcd-r00003-001.safetensors", "manifest.json.partial", "notes.txt"):
        (folder / name).write_text("x")
    save({"a": torch.ones(2)}, folder)
    assert sorted(name for name in tree(folder) if "r00000" not in name) == ["manifest.json", "notes.txt"]


def test_a_save_that_fails_leaves_no_files(tmp_path):
    (tmp_path / "c").mkdir()
    value = torch.ones(4)
    with pytest.raises(CheckpointingException, match=r"c64 is complex; give a tensor"):
        save({"a": value, "c64": 1j}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match=r"b: dtype|cannot be stored"):
        save({"b": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "c")
    assert tree(tmp_path / "c") == {} and not is_checkpoint(tmp_path / "c")


def test_a_full_disk_is_a_typed_error_and_leaves_no_files(tmp_path, monkeypatch):
    import os

    writes = iter(range(1000))
    real = os.write

    def write(handle, data):
        if next(writes) >= 2:
            raise OSError(28, "No space left on device")
        return real(handle, data[: max(1, len(data) // 2)])

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(CheckpointingException, match=r"rank 0: OSError.*No space left"):
        save({"a": torch.ones(1000)}, tmp_path / "c")
    monkeypatch.undo()
    assert not (tmp_path / "c").exists()
    save({"a": torch.ones(1000)}, tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "words"),
    [("zarr", "torch_dist"), ("torch", "not available.*native, torch_dist, fsdp_dtensor"), ("x", "the formats of this release")],
)
def test_other_formats_say_where_to_go(tmp_path, name, words):
    with pytest.raises(ValueError, match=words):
        save({"a": torch.ones(1)}, tmp_path / "c", format=name)
    assert not (tmp_path / "c").exists()


@pytest.mark.journey
def test_an_asynchronous_save_holds_the_values_of_the_call(tmp_path):
    rng = random.Random(7)
    for trial in range(20):
        state = {f"w{i}": torch.randn(rng.randrange(1, 3000)) for i in range(5)}
        want = {name: value.clone() for name, value in state.items()}
        request = save(state, tmp_path / str(trial), extra={"trial": trial}, asynchronous=True)
        for value in state.values():
            value.fill_(-1)
        assert not is_checkpoint(tmp_path / str(trial))
        request.wait()
        assert request.done()
        request.wait()
        assert load(state, tmp_path / str(trial)) == {"trial": trial}
        assert all(torch.equal(state[name], want[name]) for name in state)


def test_a_finished_request_keeps_no_copy_of_the_state(tmp_path, monkeypatch):
    copies, real = [], Staging.copy

    def copy(self, shards):
        staged = real(self, shards)
        copies.extend([*(weakref.ref(part.data) for part in staged.shards.values()), weakref.ref(staged.memory)])
        return staged

    monkeypatch.setattr(Staging, "copy", copy)
    request = save({"a": torch.ones(4)}, tmp_path / "c", asynchronous=True)
    assert copies and copies[0]() is not None
    request.wait()
    gc.collect()
    assert request.done() and all(copy() is None for copy in copies)


def test_an_asynchronous_save_that_fails_says_so_in_wait(tmp_path):
    request = save({"a": torch.ones(4)}, tmp_path / "gone" / "c", asynchronous=True)
    request._thread.join()
    for path in (tmp_path / "gone" / "c").iterdir():
        path.unlink()
    with pytest.raises(CheckpointingException, match=r"committing .* failed on rank 0"):
        request.wait()
    assert not is_checkpoint(tmp_path / "gone" / "c")


def test_a_small_part_of_a_large_tensor_is_read_without_the_rest(tmp_path):
    import resource

    save({"w": torch.zeros(48 * 2**20, dtype=torch.uint8)}, tmp_path / "c")
    part = torch.ones(8, dtype=torch.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load({"w": ShardedTensor(part, (48 * 2**20,), (2**20,))}, tmp_path / "c")
    assert not part.any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 2**10


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="no folder that nobody may write to")
def test_a_place_without_permission_is_named():
    # Nobody makes folders there, whatever the rights of the process.
    for place in ("/sys/kernel/run", "/proc/self/run"):
        with pytest.raises(CheckpointingException, match=f"preparing to save {place} failed on rank 0: .*{place}"):
            save({"w": torch.ones(2)}, place)


def test_a_state_that_is_none_is_named_before_anything_is_written(tmp_path):
    save({"a": torch.ones(3), "b": torch.ones(3, 2)}, tmp_path / "sound")
    for state, words in (
        (torch.nn.Linear(2, 2), r"the state is Linear; give names and tensors, such as model\.state_dict\(\)"),
        ([torch.ones(2)], "the state is list"),
        ({3: torch.ones(2)}, "an entry called 3, which is int; names are strings"),
        ({"model": torch.nn.Linear(2, 2)}, r"model is Linear; give .* as its state_dict\(\)"),
    ):
        with pytest.raises(CheckpointingException, match=words):
            save(state, tmp_path / "c")
        with pytest.raises(CheckpointingException, match=words):
            load(state, tmp_path / "sound")
    assert not (tmp_path / "c").exists()
    wanted = {"a": torch.zeros(3), "b": torch.zeros(3, 1).expand(3, 2)}
    with pytest.raises(CheckpointingException, match="b: its elements share memory"):
        load(wanted, tmp_path / "sound")
    assert not wanted["a"].any()


def test_an_address_whose_library_is_missing_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r's3://bucket/run cannot be reached: .*; pip install "mcore-ckpt\[s3\]"'):
        save({"a": torch.ones(2)}, "s3://bucket/run")
