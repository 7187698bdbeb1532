# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every storage keeps the same promises: the disk, memory, and what fsspec reaches."""

import secrets

import pytest
import torch

from mcore_ckpt import CheckpointingException, CheckpointManager, ShardedTensor, load, read_tensor, save
from mcore_ckpt.inspect import resolve_checkpoint, summarize, verify
from mcore_ckpt.manifest import is_checkpoint, read_manifest
from mcore_ckpt.storage import Folder, LocalFolder, MemoryFolder, ObjectFolder, open_folder


@pytest.fixture(params=["disk", "memory", "object"])
def place(request, tmp_path):
    if request.param == "disk":
        return LocalFolder(tmp_path / "run")
    if request.param == "memory":
        return MemoryFolder()
    pytest.importorskip("fsspec")
    return ObjectFolder(f"memory://{secrets.token_hex(8)}/run")


def test_a_folder_keeps_what_is_written(place):
    assert isinstance(place, Folder)
    assert place.names() == [] and place.size("f") is None
    place.create()
    place.create()
    place.write("f", iter([memoryview(b"abc"), memoryview(b""), memoryview(b"defg")]))
    with pytest.raises(FileExistsError):
        place.write("f", [memoryview(b"x")])
    place.sync()
    assert place.size("f") == 7 and place.names() == ["f"]
    view = place.read("f", 2, 5)
    assert bytes(view) == b"cde"
    view[0] = 0
    assert bytes(place.read("f", 0, 7)) == b"abcdefg" and len(place.read("f", 3, 3)) == 0
    with pytest.raises(OSError, match="bytes"):
        place.read("f", 5, 9)
    with pytest.raises(OSError):
        place.read("none", 0, 1)
    place.publish("g", b"one")
    place.publish("g", b"two!")
    assert bytes(place.read("g", 0, 4)) == b"two!" and place.names() == ["f", "g"]
    with pytest.raises(OSError):
        place.remove_all(only_empty=True)
    place.remove("f")
    place.remove("f")
    inner = place.child("inner")
    inner.create()
    inner.write("h", [memoryview(b"1")])
    assert "inner" in place.names() and place.size("inner") is None
    assert open_folder(inner) is inner and inner.address != place.address
    place.remove_all()
    assert place.names() == [] and inner.size("h") is None


def test_a_write_that_fails_half_way_leaves_no_file(place):
    def parts():
        yield memoryview(b"half")
        raise OSError(5, "Input/output error")

    place.create()
    with pytest.raises(OSError, match="Input/output"):
        place.write("f", parts())
    assert place.size("f") is None and place.names() == []


def test_checkpoints_come_and_go_on_every_storage(place):
    manager = CheckpointManager(place, keep=2)
    weight, scalar = torch.arange(24.0).reshape(4, 6), torch.tensor(3)
    for step in (1, 2, 3):
        manager.save(step, {"w": weight * step, "s": scalar, "e": torch.zeros(0, 3)}, {"step": step}, asynchronous=step == 2)
    manager.wait()
    assert manager.steps() == [2, 3] and place.names() == ["step_00000002", "step_00000003"]
    part = torch.zeros(2, 2)
    extra = load({"w": ShardedTensor(part, (4, 6), (1, 3))}, manager.folder(3), strict=False)
    assert extra == {"step": 3} and torch.equal(part, 3 * weight[1:3, 3:5])
    assert torch.equal(read_tensor(manager.folder(2), "w"), 2 * weight) and read_tensor(manager.folder(2), "s") == 3
    assert summarize(place).num_elements == 25 and verify(place) == []
    with pytest.raises(CheckpointingException, match="already holds"):
        save({"w": weight}, manager.folder(3))
    (name,) = read_manifest(manager.folder(3)).files
    content = bytearray(manager.folder(3).read(name, 0, manager.folder(3).size(name) or 0))
    content[-1] ^= 1
    manager.folder(3).remove(name)
    manager.folder(3).write(name, [memoryview(content)])
    with pytest.raises(CheckpointingException, match=f"{name}: its SHA-256"):
        manager.load({"w": weight}, strict=False)


def test_what_is_no_checkpoint_is_named_on_every_storage(place):
    place.create()
    assert not is_checkpoint(place)
    with pytest.raises(CheckpointingException, match=r"is not a checkpoint: it has no manifest\.json"):
        read_manifest(place)
    place.publish(".metadata", b"x")
    with pytest.raises(CheckpointingException):
        read_manifest(place)


def test_an_address_is_as_good_as_a_folder(tmp_path):
    pytest.importorskip("fsspec")
    url = f"memory://{secrets.token_hex(8)}/c"
    save({"w": torch.ones(3)}, url)
    assert torch.equal(read_tensor(url, "w"), torch.ones(3))
    with pytest.raises(CheckpointingException, match="not on a disk"):
        resolve_checkpoint(url)
    save({"w": torch.ones(3)}, f"file://{tmp_path}/c")
    assert resolve_checkpoint(tmp_path / "c") == tmp_path / "c"
    # The folder of a run is as good as that of its steps.
    save({"w": torch.ones(3)}, tmp_path / "run" / "checkpoints" / "step_00000003")
    assert resolve_checkpoint(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step_00000003"
    with pytest.raises(ValueError, match="not on a disk"):
        CheckpointManager(MemoryFolder()).path(1)
    with pytest.raises(ValueError, match="give a path"):
        open_folder(3)  # type: ignore[arg-type]
