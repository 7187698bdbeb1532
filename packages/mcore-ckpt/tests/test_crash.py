# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A process killed at any write, sync or rename of a save leaves the last committed step loadable."""

import json
import os

import pytest
import torch

from mcore_ckpt import save
from tests.support.commands import run_script

SCRIPT = """
import json, os, signal, sys, tempfile
import torch
from mcore_ckpt import CheckpointManager
from mcore_ckpt.assets import read_asset
from mcore_ckpt.inspect import verify
from mcore_ckpt.storage import LocalFolder
from tests.support.kills import die_at

class Here(LocalFolder):
    # Written by a thread of this process, which can then be killed at each operation.
    def child(self, name):
        return Here(self.path / name)

torch.set_num_threads(1)
# A killed process loses nothing it wrote: what syncing is for shows in another test.
os.fsync = lambda handle: None
root = sys.argv[1]
OPERATIONS = ("open", "write", "fsync", "replace", "unlink", "rmdir", "mkdir")

def child(folder, kill_at, mode):
    die_at(kill_at, OPERATIONS)
    manager = CheckpointManager(Here(folder) if mode == "thread" else folder, keep=1, assets={"run/notes": b"step two"})
    request = manager.save(2, {"w": torch.full((64,), 2.0), "v": torch.full((8,), 2.0)}, {"step": 2}, asynchronous=mode != "sync")
    if request:
        request.wait()
    os._exit(0)

def survives(kill_at, mode):
    folder = tempfile.mkdtemp(dir=root)
    manager = CheckpointManager(folder, keep=1)
    state = {"w": torch.full((64,), 1.0), "v": torch.full((8,), 1.0)}
    manager.save(1, state, {"step": 1})
    pid = os.fork()
    if pid == 0:
        child(folder, kill_at, mode)
    status = os.waitpid(pid, 0)[1]
    for value in state.values():
        value.zero_()
    step, extra = manager.load(state)
    assert verify(folder) == [] and (step == 1 or read_asset(manager.path(2), "run/notes") == b"step two")
    assert extra == {"step": step} and all((value == step).all() for value in state.values()), (kill_at, step)
    # Whatever was left behind, the next save works and tidies up.
    manager.save(3, state)
    assert manager.steps() == [3] and os.listdir(folder) == ["step_00000003"], (kill_at, os.listdir(folder))
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, status
    return step, status == 0

found = {}
for mode in ("sync", "thread", "process"):
    found[mode], unhurt = [], False
    while not unhurt:
        step, unhurt = survives(len(found[mode]), mode)
        found[mode].append(step)
print(json.dumps(found))
"""


LOST_RANK = """
import os, signal, sys
import torch
import torch.distributed as dist
from mcore_ckpt import CheckpointingException, CheckpointManager, ShardedTensor

torch.set_num_threads(1)
root = sys.argv[1]

def main(rank):
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    manager = CheckpointManager(f"{root}/run", keep=1)
    state = {"w": ShardedTensor(torch.full((2,), 1.0 + rank), (4,), (2 * rank,))}
    manager.save(1, state)
    if rank == 1:
        real = os.write
        def write(handle, data):
            real(handle, data[:5])
            os.kill(os.getpid(), signal.SIGKILL)
        os.write = write
    try:
        manager.save(2, state)
    except CheckpointingException as error:
        assert "rank 0 lost contact" in str(error), error
        assert manager.steps() == [1]
        os._exit(0)
    os._exit(1)

ranks = []
for rank in (0, 1):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        main(rank)
statuses = [os.waitpid(pid, 0)[1] for pid in ranks]
assert statuses == [0, signal.SIGKILL], statuses
whole = torch.zeros(4)
assert CheckpointManager(f"{root}/run").load({"w": whole})[0] == 1
assert whole.tolist() == [1, 1, 2, 2]
print("[]")
"""


def run(script, folder):
    code, output, errors = run_script(script, str(folder))
    assert code == 0, errors
    return json.loads(output)


@pytest.mark.journey
def test_every_kill_point_of_a_save_leaves_a_loadable_step(tmp_path):
    for mode, steps in run(SCRIPT, tmp_path).items():
        # The step changes once, at the rename of the manifest, and there are points on both sides of it. The writer process has some.
        assert steps == sorted(steps) and set(steps) == {1, 2} and len(steps) >= (10 if mode == "process" else 15), (mode, steps)


def test_when_a_rank_is_killed_the_others_hear_of_it_and_the_last_step_loads(tmp_path):
    assert run(LOST_RANK, tmp_path) == []


def test_everything_is_on_the_disk_before_the_manifest_gets_its_name(tmp_path, monkeypatch):
    calls, names = [], {}
    real_open, real_fsync, real_replace = os.open, os.fsync, os.replace

    def open_(path, *args, **kwargs):
        handle = real_open(path, *args, **kwargs)
        names[handle] = os.path.basename(path)
        return handle

    def fsync(handle):
        calls.append(names[handle])
        real_fsync(handle)

    def replace(source, target):
        calls.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save({"a": torch.ones(9), "b": torch.ones(9)}, tmp_path / "c", max_file_bytes=1)
    monkeypatch.undo()
    before, after = calls[: calls.index("rename")], calls[calls.index("rename") + 1 :]
    shards = sorted(path.name for path in (tmp_path / "c").glob("*.safetensors"))
    # The files are written side by side where there are cores.
    assert len(shards) == 2 and [before[0], *sorted(before[1:3]), *before[3:]] == [tmp_path.name, *shards, "c", "manifest.json.partial"]
    assert after == ["c"]
