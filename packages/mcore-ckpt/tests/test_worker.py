# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The process that writes asynchronous saves: it serves again, and whatever ends it or its master is heard of."""

import errno
import os
import select
import signal
import time

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointingException, CheckpointManager, ShardedTensor, load, save
from mcore_ckpt._core._staging import SharedMemory
from mcore_ckpt._core._worker import Worker, WorkerFolder
from mcore_ckpt._storage import file_digest, write_file
from tests.support.commands import run_command

SIZE = 3_000_001
"""Of each tensor, in elements: more than a block, and no multiple of one."""


def state(value=1.0):
    return {"a": torch.arange(SIZE).float() + value, "b": torch.full((3, 5), value), "c": torch.ones(7, dtype=torch.bool)}


def ended(pid, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while os.path.exists(f"/proc/{pid}"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("name", ["native", "torch_dist"])
def test_one_process_writes_save_after_save(tmp_path, name):
    manager, pids = CheckpointManager(tmp_path, keep=None, format=name), set()
    for step in range(3):
        values = state(float(step))
        request = manager.save(step, values, asynchronous=True)
        for value in values.values():
            value.zero_()
        manager.wait()
        pids.add(manager._worker.pid)
        assert request.progress().written_bytes >= request.progress().total_bytes
    assert len(pids) == 1
    for step in range(3):
        back = {key: torch.zeros_like(value) for key, value in state().items()}
        manager.load(back, step)
        assert all(torch.equal(back[key], value) for key, value in state(float(step)).items())
    del manager, request
    assert ended(pids.pop())


def test_a_killed_writer_is_named_and_replaced(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, state(1.0), asynchronous=True)
    manager.wait()
    pid = manager._worker.pid
    os.kill(pid, signal.SIGSTOP)
    manager.save(2, state(2.0), asynchronous=True)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointingException, match=f"failed on rank 0: the writer process {pid} was killed by SIGKILL while it wrote"):
        manager.wait()
    assert os.listdir(tmp_path) == ["step_00000001"]
    manager.save(3, state(3.0), asynchronous=True)
    manager.wait()
    assert manager.steps() == [1, 3] and manager._worker.pid != pid


def test_a_writer_that_hangs_is_killed_and_the_memory_serves_again(tmp_path):
    manager = CheckpointManager(tmp_path, stalled_s=0.3)
    manager._worker.start()
    os.kill(manager._worker.pid, signal.SIGSTOP)
    request = manager.save(1, state(), asynchronous=True)
    with pytest.raises(CheckpointingException, match="the writer moved nothing"):
        manager.wait()
    request._thread.join(10)
    assert not request._thread.is_alive()
    # The next writer has its time to start, and the disk to write.
    manager._stalled_s = None
    manager.save(2, state(2.0), asynchronous=True)
    manager.wait()
    assert manager.steps() == [2] and os.listdir(tmp_path) == ["step_00000002"]


def test_a_cancelled_save_leaves_no_file_and_the_process_goes_on(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager._worker.start()
    pid = manager._worker.pid
    os.kill(pid, signal.SIGSTOP)
    request = manager.save(1, state(), asynchronous=True)
    request.cancel()
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(CheckpointingException, match="the save was cancelled"):
        manager.wait()
    assert os.listdir(tmp_path) == []
    manager.save(2, state(), asynchronous=True)
    manager.wait()
    assert manager.steps() == [2] and manager._worker.pid == pid


def test_what_the_disk_says_comes_back_as_it_was_said(tmp_path):
    worker = Worker()
    worker.start()
    memory = SharedMemory(2**20)
    memory.content[:4] = b"abcd"
    folder = WorkerFolder(tmp_path, worker, memory)
    inside = memoryview(memory.content)[:4]
    assert folder.write_hashed("x", [inside, b"efgh"]) == file_digest(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"abcdefgh"
    with pytest.raises(FileExistsError, match="x"):
        folder.write_hashed("x", [inside])
    with pytest.raises(FileNotFoundError, match="lost"):
        WorkerFolder(tmp_path / "lost", worker, memory).write_hashed("y", [inside])
    pid = worker.pid
    worker.close()
    assert ended(pid)


def test_an_error_is_told_even_where_it_comes_before_the_first_piece_is_sent(tmp_path, monkeypatch):
    worker, memory = Worker(), SharedMemory(2**20)
    worker.start()
    folder = WorkerFolder(tmp_path / "lost", worker, memory)
    request = worker.request

    def late(*arguments):
        connection = request(*arguments)
        # Until the process has answered and closed its side.
        hung_up = select.poll()
        hung_up.register(connection, select.POLLHUP)
        assert hung_up.poll(20_000)
        return connection

    monkeypatch.setattr(worker, "request", late)
    with pytest.raises(FileNotFoundError, match="lost"):
        folder.write_hashed("y", [bytes(100)])
    worker.close()


def save_and_die(words):
    manager = CheckpointManager(words[0])
    manager._worker.start()
    os.kill(manager._worker.pid, signal.SIGSTOP)
    manager.save(1, {"a": torch.ones(3_000_000)}, asynchronous=True)
    print(manager._worker.pid, flush=True)
    os.kill(manager._worker.pid, signal.SIGCONT)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.journey
def test_the_process_ends_with_a_killed_trainer(tmp_path):
    code, output, errors = run_command(save_and_die, [str(tmp_path)])
    assert code == -signal.SIGKILL and ended(int(output)), errors
    assert CheckpointManager(tmp_path).latest() is None
    manager = CheckpointManager(tmp_path)
    manager.save(2, {"a": torch.ones(3)})
    assert os.listdir(tmp_path) == ["step_00000002"]


def check_a_killed_writer_is_everybodys(folder):
    rank = dist.get_rank()
    mine = {"w": ShardedTensor(torch.full((4,), float(rank)), (8,), (4 * rank,))}
    manager = CheckpointManager(folder)
    manager._worker.start()
    if rank == 1:
        os.kill(manager._worker.pid, signal.SIGKILL)
        manager._worker._process.poll = lambda: None
    manager.save(1, mine, asynchronous=True)
    try:
        manager.wait()
    except CheckpointingException as error:
        return str(error)
    return None


@pytest.mark.world(2)
def test_a_writer_killed_on_one_rank_raises_on_all(world, tmp_path):
    one, two = world(check_a_killed_writer_is_everybodys, folder=str(tmp_path / "c"))
    assert one == two and "failed on rank 1: the writer process" in one and "was killed by SIGKILL" in one


@pytest.mark.parametrize("length", [0, 5, 2**22 - 1, 2**22, 2**22 + 1, 3 * 2**22 + 4096, 5 * 2**22 + 7])
def test_files_of_any_length_hold_their_bytes(tmp_path, length):
    content = bytes(bytearray(range(251)) * (length // 251 + 1))[:length]
    cuts = [content[: length // 3], content[length // 3 : length // 2], content[length // 2 :]]
    assert write_file(tmp_path / "x", cuts) == file_digest(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == content


def test_a_disk_that_takes_no_aligned_blocks_gets_them_through_its_cache(tmp_path, monkeypatch):
    import fcntl

    real, refused = os.write, []

    def write(handle, data):
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(handle, data[:1_000_001])

    monkeypatch.setattr(os, "write", write)
    content = bytes(range(256)) * 40_000
    save({"a": torch.frombuffer(bytearray(content), dtype=torch.uint8)}, tmp_path / "c")
    monkeypatch.undo()
    target = torch.zeros(len(content), dtype=torch.uint8)
    load({"a": target}, tmp_path / "c")
    assert bytes(target.numpy()) == content and len(refused) <= 1
