# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every operation of a save fails once, in every way that disks fail; and every power cut leaves a step that loads."""

import os
import random
import shutil
import threading
import time

import pytest
import torch

from mcore_ckpt import CheckpointingException, CheckpointManager, load, save
from mcore_ckpt._core._control import Control, LostContact
from mcore_ckpt.assets import read_asset
from mcore_ckpt.foreign import read_torch
from mcore_ckpt.inspect import summarize
from mcore_ckpt.manifest import is_checkpoint, read_manifest
from mcore_ckpt.storage import LocalFolder, MemoryFolder
from tests.support.faulty_disk import FaultyDisk, after_power_cut

ERRORS = {
    "full": (OSError(28, "No space left on device"), True),
    "eio": (OSError(5, "Input/output error"), False),
    "quota": (OSError(122, "Disk quota exceeded"), True),
    "stuck": (None, True),
}


class Here(LocalFolder):
    """Written by a thread of this process, whose operations are seen and may fail."""

    def child(self, name):
        return Here(self.path / name)


def state(value):
    return {"w": torch.full((40,), float(value)), "v": torch.full((3, 2), value)}


def values(folder, step):
    """The one value that all elements of a step have."""
    target = state(-1)
    extra = CheckpointManager(folder).load(target, step)[1]
    distinct = {float(x) for tensor in target.values() for x in tensor.flatten()}
    assert extra == {"step": step}
    place = CheckpointManager(folder).path(step)
    assert all(read_asset(place, name) == b"kept" for name in read_manifest(place).assets)
    return distinct


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def attempt(folder, step, disk, *, asynchronous, keep=1):
    with disk:
        manager = CheckpointManager(Here(folder), keep=keep, assets={"run/notes": b"kept"})
        request = manager.save(step, state(step), {"step": step}, asynchronous=asynchronous)
        if request:
            request.wait()


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.journey), True])
def test_a_power_cut_after_any_operation_of_a_save_leaves_a_step_that_loads(tmp_path, asynchronous):
    CheckpointManager(tmp_path / "run").save(1, state(1), {"step": 1})
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    disk = FaultyDisk(tmp_path / "run")
    attempt(tmp_path / "run", 2, disk, asynchronous=asynchronous)
    # Open, writes and sync of file, folder and manifest, a rename, and the removal of step 1.
    kinds = [operation.kind for operation in disk.operations]
    assert len(kinds) >= 20 and {"create", "write", "fsync", "replace", "unlink", "mkdir", "rmdir"} <= set(kinds)
    rng, seen = random.Random(1), []
    committed = kinds.index("replace") + 2
    for done in range(len(kinds) + 1):
        for number, (choice, lose) in enumerate([(None, True), (None, False), *[(rng, True)] * (1 if asynchronous else 4)]):
            folder = tmp_path / f"{done}-{number}"
            after_power_cut(tmp_path / "before", disk.operations[:done], folder, choice, lose=lose)
            step = CheckpointManager(folder).latest()
            assert step is not None and values(folder, step) == {float(step)}, (done, number)
            # Once the sync after the rename is through, the new step is there whatever else is lost.
            assert step == 2 or done <= committed, (done, number)
            seen.append(step)
            shutil.rmtree(folder)
    assert set(seen) == {1, 2}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", ERRORS)
def test_a_disk_that_fails_at_any_operation_is_a_typed_error_and_leaves_nothing(tmp_path, error, asynchronous):
    reason, persistent = ERRORS[error]
    CheckpointManager(tmp_path).save(1, state(1), {"step": 1})
    before = tree(tmp_path)
    refused = 0
    for number in range(200):
        disk = FaultyDisk(tmp_path, fail_at=number, error=reason, persistent=persistent)
        start = time.monotonic()
        try:
            attempt(tmp_path, 2, disk, asynchronous=asynchronous, keep=None)
        except CheckpointingException as problem:
            refused += 1
            assert time.monotonic() - start < 5 and (reason is None or str(reason.strerror) in str(problem))
            if CheckpointManager(tmp_path).steps() == [1]:
                assert tree(tmp_path) == before, number
            else:
                # Renamed, but the sync that would confirm it failed: a checkpoint, and a whole one.
                assert values(tmp_path, 2) == {2.0}
        shutil.rmtree(tmp_path / "step_00000002", ignore_errors=True)
        if all(not operation.kind.startswith("failed") for operation in disk.operations):
            break
    else:
        pytest.fail("the save never got through")
    assert refused >= 5
    # Training goes on, and the next save works.
    attempt(tmp_path, 3, FaultyDisk(tmp_path), asynchronous=asynchronous)
    assert values(tmp_path, 3) == {3.0} and os.listdir(tmp_path) == ["step_00000003"]


class FailingFolder(MemoryFolder):
    """Memory whose ``fail_at``-th change fails."""

    fail_at, changes = -1, 0

    def _count(self):
        self.changes += 1
        if self.changes == self.fail_at:
            raise OSError(5, "Input/output error")

    def create(self):
        self._count()

    def write(self, name, parts):
        self._count()
        super().write(name, parts)

    def sync(self):
        self._count()

    def publish(self, name, content):
        self._count()
        super().publish(name, content)


def test_any_folder_that_fails_is_the_same_typed_error(tmp_path):
    for number in range(1, 5):
        folder = FailingFolder()
        folder.fail_at = number
        with pytest.raises(CheckpointingException, match="Input/output error"):
            save(state(1), folder)
        assert folder.names() == [] and not is_checkpoint(folder)
        save(state(2), folder)
        target = state(0)
        load(target, folder)
        assert target["v"].tolist() == [[2, 2]] * 3


def test_a_rank_that_loses_the_others_while_they_commit_keeps_its_files(tmp_path, monkeypatch):
    real = Control._exchange

    def exchange(self, what, message):
        if what.startswith("committing"):
            # What the first rank does goes through; that it did is never heard.
            raise LostContact(f"{what}: lost contact")
        return real(self, what, message)

    monkeypatch.setattr(Control, "_exchange", exchange)
    with pytest.raises(LostContact):
        save(state(1), tmp_path / "whole")
    target = state(0)
    load(target, tmp_path / "whole")
    assert target["w"].tolist() == [1.0] * 40
    # Another rank gets no further than this before it hears nothing more; the manifest may appear any moment.
    monkeypatch.setattr(MemoryFolder, "publish", lambda *_: None)
    folder = MemoryFolder()
    with pytest.raises(LostContact):
        save(state(1), folder)
    assert len(folder.names()) == 1 and not is_checkpoint(folder)
    monkeypatch.undo()
    save(state(2), folder)
    assert len(folder.names()) == 2


@pytest.mark.journey
def test_a_reader_that_polls_while_steps_come_and_go_never_meets_half_a_step(tmp_path):
    manager, over, seen, problems = CheckpointManager(tmp_path, keep=2), threading.Event(), set(), []
    with FaultyDisk(tmp_path):
        manager.save(0, state(0), {"step": 0})

        def poll():
            reader = CheckpointManager(tmp_path)
            while not over.is_set():
                step = reader.latest()
                try:
                    if step is None:
                        problems.append("no step")
                    elif values(tmp_path, step) != {float(step)}:
                        problems.append(f"step {step} is mixed")
                    seen.add(step)
                except CheckpointingException as error:
                    # Only a step that retention took away meanwhile may fail to load, and by then there is a newer one.
                    if is_checkpoint(reader.path(step)) or (reader.latest() or 0) <= step:
                        problems.append(f"step {step}: {error}")

        thread = threading.Thread(target=poll)
        thread.start()
        for step in range(1, 200):
            manager.save(step, state(step), {"step": step}, asynchronous=step % 2 == 0)
        manager.wait()
        over.set()
        thread.join()
    assert not problems and len(seen) > 3 and read_manifest(manager.path(199)).extra == {"step": 199}


def test_folders_whose_names_could_not_be_synced_go_again(tmp_path, monkeypatch):
    def refuse(handle):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(CheckpointingException, match="Input/output error"):
        patch.setattr("os.fsync", refuse)
        save({"w": torch.ones(1)}, tmp_path / "a" / "b" / "c")
    assert not list(tmp_path.iterdir())


def test_links_that_lead_to_themselves_are_the_one_error_and_stay_alone(tmp_path):
    for name in ("loop", "file.pt"):
        (tmp_path / name).symlink_to(name)
    for attempt_one in (
        lambda: save({"w": torch.ones(1)}, tmp_path / "loop"),
        lambda: save({"w": torch.ones(1)}, tmp_path / "loop" / "step"),
        lambda: load({"w": torch.ones(1)}, tmp_path / "loop"),
        lambda: read_manifest(tmp_path / "loop" / "step"),
        lambda: summarize(tmp_path / "loop"),
        lambda: CheckpointManager(tmp_path / "loop").load({"w": torch.ones(1)}),
        lambda: read_torch(tmp_path / "file.pt"),
    ):
        with pytest.raises(CheckpointingException, match=r"loop|file\.pt"):
            attempt_one()
    assert sorted(os.listdir(tmp_path)) == ["file.pt", "loop"]
    assert CheckpointManager(tmp_path / "loop").steps() == []
