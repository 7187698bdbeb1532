# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Saves that go on while training does: how far, how many, given up, stuck."""

import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointingException, CheckpointManager, load, save
from mcore_ckpt._core._sharded import DeferredTensor, ShardedTensor
from mcore_ckpt._core._staging import Staging
from mcore_ckpt.storage import LocalFolder, MemoryFolder


class GatedFolder(MemoryFolder):
    """Files go in when ``gate`` opens; ``begun`` says that one waits."""

    def __init__(self, name="gated", gate=None, begun=None):
        super().__init__(name)
        self.gate, self.begun = gate or threading.Event(), begun or threading.Event()

    def child(self, name):
        return self._folders.setdefault(name, GatedFolder(f"{self._name}/{name}", self.gate, self.begun))

    def write(self, name, parts):
        def gated():
            for part in parts:
                self.begun.set()
                assert self.gate.wait(20)
                yield part

        super().write(name, gated())


def state(value=1.0):
    return {"a": torch.full((1000,), value), "b": torch.full((3, 5), value)}


def holds(folder, value):
    back = state(0.0)
    load(back, folder)
    return all(bool((tensor == value).all()) for tensor in back.values())


def test_progress_counts_what_was_written():
    folder = GatedFolder()
    request = save(state(), folder, asynchronous=True)
    assert folder.begun.wait(20)
    before = request.progress()
    assert before.written_bytes == 0 and before.total_bytes == 4060 and before.idle_s > 0 and not request.done()
    folder.gate.set()
    request.wait()
    after = request.progress()
    assert after.written_bytes >= after.total_bytes == 4060 and after.idle_s == 0
    assert holds(folder, 1.0)


def test_a_cancelled_save_leaves_nothing_and_the_next_goes_through(tmp_path):
    folder = GatedFolder()
    request = save(state(), folder, asynchronous=True)
    assert folder.begun.wait(20)
    request.cancel()
    folder.gate.set()
    with pytest.raises(CheckpointingException, match="writing .* failed on rank 0: the save was cancelled"):
        request.wait()
    assert folder.names() == []
    request.wait()
    save(state(2.0), folder)
    assert holds(folder, 2.0)


def test_a_writer_that_hangs_is_given_up_in_time_and_stops_when_the_storage_answers():
    folder = GatedFolder()
    request = save(state(), folder, asynchronous=True)
    with pytest.raises(CheckpointingException, match=r"moved nothing for \d+ s after 0 of 4060 bytes"):
        request.wait(stalled_s=0.3)
    folder.gate.set()
    request._thread.join(20)
    assert request.done() and folder.names() == []


def test_as_many_saves_are_pending_as_the_manager_allows_and_commit_in_order():
    folder = GatedFolder()
    manager = CheckpointManager(folder, keep=None, max_pending=2)
    values = state(1.0)
    manager.save(1, values, asynchronous=True)
    for value in values.values():
        value.fill_(2.0)
    manager.save(2, values, asynchronous=True)
    assert manager.steps() == []
    opener = threading.Timer(0.2, folder.gate.set)
    opener.start()
    for value in values.values():
        value.fill_(3.0)
    manager.save(3, values, asynchronous=True)
    opener.join()
    assert manager.steps() == [1]
    manager.wait()
    assert manager.steps() == [1, 2, 3] and all(holds(manager.folder(step), step) for step in (1, 2, 3))


def test_retention_leaves_steps_that_are_being_written(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, max_pending=2)
    manager.save(10, state(10.0), asynchronous=True)
    manager.save(5, state(5.0), asynchronous=True)
    manager.save(11, state(11.0), asynchronous=True)
    manager.wait()
    assert manager.steps() == [11] and holds(manager.folder(11), 11.0)


def test_the_failure_of_one_pending_save_does_not_lose_the_other(tmp_path):
    manager = CheckpointManager(tmp_path, max_pending=2)
    first = manager.save(1, state(1.0), asynchronous=True)
    first._thread.join()
    for path in manager.path(1).iterdir():
        path.unlink()
    manager.save(2, state(2.0), asynchronous=True)
    with pytest.raises(CheckpointingException, match="step_00000001"):
        manager.wait()
    assert manager.steps() == [2] and holds(manager.folder(2), 2.0)


@pytest.mark.parametrize(("field", "value"), [("max_pending", 0), ("stalled_s", 0.0), ("stalled_s", float("nan"))])
def test_bad_bounds_are_named(tmp_path, field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        CheckpointManager(tmp_path, **{field: value})


def test_staging_serves_again_and_grows():
    staging = Staging()
    part = ShardedTensor(torch.arange(6.0).reshape(2, 3).T, (3, 2), (0, 0))
    first = staging.copy({"a": part, "b": ShardedTensor(torch.tensor(True), (), ())})
    assert torch.equal(first.shards["a"].data, part.data) and bool(first.shards["b"].data) and staging.num_bytes == 0
    place = first.shards["a"].data.data_ptr()
    first.release()
    again = staging.copy({"a": part})
    assert again.shards["a"].data.data_ptr() == place and again.memory is first.memory and staging.num_bytes == 0
    again.release()
    larger = staging.copy({"a": ShardedTensor(torch.ones(1000), (1000,), (0,))})
    larger.release()
    assert staging.num_bytes >= 4000 and bool(larger.shards["a"].data.all())


class StuckOnce(LocalFolder):
    """The files of rank 1 never get through."""

    def write(self, name, parts):
        if "-r00001-" in name:
            threading.Event().wait(1.5)
            parts = list(parts)
        super().write(name, parts)


def check_a_stall_is_everybodys(folder):
    rank = dist.get_rank()
    mine = {"w": ShardedTensor(torch.full((4,), float(rank)), (8,), (4 * rank,))}
    request = save(mine, StuckOnce(folder), asynchronous=True)
    try:
        # Only one writer hangs, however slow the disk is.
        request.wait(stalled_s=0.4 if rank == 1 else 20.0)
    except CheckpointingException as error:
        request._thread.join()
        return str(error)
    return None


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_writer_that_hangs_on_one_rank_raises_on_all(world, tmp_path):
    one, two = world(check_a_stall_is_everybodys, folder=str(tmp_path / "c"))
    assert one == two and "failed on rank 1: the writer moved nothing" in one
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_many_files_at_a_time_hold_what_one_would(tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_ckpt._core._save._MIN_FILE_BYTES", 1000)
    monkeypatch.setattr("mcore_ckpt._core._control.num_cores", lambda: 4)
    values = {f"w{i}": torch.full((250,), float(i)) for i in range(8)}
    save(values, tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 4
    back = {name: torch.zeros(250) for name in values}
    load(back, tmp_path / "c")
    assert all(torch.equal(back[name], values[name]) for name in values)


def test_tensors_that_are_made_in_turn_are_made_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_ckpt._core._save._MIN_FILE_BYTES", 1000)
    monkeypatch.setattr("mcore_ckpt._core._control.num_cores", lambda: 4)
    alive = []

    def make():
        assert threading.current_thread() is threading.main_thread()
        assert sum(one() is not None for one in alive) <= 1
        value = torch.ones(250)
        alive.append(weakref.ref(value))
        return value

    save({f"w{i}": DeferredTensor(torch.float32, (250,), make) for i in range(8)}, tmp_path / "c")
    assert len(alive) == 8


def test_one_of_many_files_that_fails_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("mcore_ckpt._core._save._MIN_FILE_BYTES", 1000)
    monkeypatch.setattr("mcore_ckpt._core._control.num_cores", lambda: 4)

    class Full(LocalFolder):
        def write(self, name, parts):
            if "-002" in name:
                raise OSError(28, "No space left on device", name)
            super().write(name, parts)

    with pytest.raises(CheckpointingException, match="failed on rank 0: OSError: .*No space left"):
        save({f"w{i}": torch.full((250,), float(i)) for i in range(8)}, Full(tmp_path / "c"))
    assert not (tmp_path / "c").exists()
