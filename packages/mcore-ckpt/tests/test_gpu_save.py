# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensors that live on a GPU."""

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointingException, CheckpointManager, LocalCheckpoints, load, save
from tests.support.world import run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("asynchronous", [False, True])
def test_device_tensors_come_back_bit_for_bit(tmp_path: Path, asynchronous: bool) -> None:
    state = {
        "a": torch.randn(257, 33, device="cuda"),
        "b": torch.randn(64, 8, device="cuda").bfloat16(),
        "c": torch.arange(7, device="cuda"),
    }
    before = {name: value.clone() for name, value in state.items()}
    request = save(state, tmp_path / "step", asynchronous=asynchronous)
    for value in state.values():
        value.zero_()
    if request is not None:
        request.wait()
    load(state, tmp_path / "step")
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_copies_of_a_gpu_state_are_page_locked_and_serve_again(tmp_path: Path) -> None:
    state = {"a": torch.randn(1025, 333, device="cuda"), "b": torch.arange(7, device="cuda"), "host": torch.ones(3)}
    manager = CheckpointManager(tmp_path, max_pending=2)
    for step in range(4):
        before = {name: value.clone() for name, value in state.items()}
        manager.save(step, state, asynchronous=True)
        for value in state.values():
            value.zero_()
        manager.wait()
        manager.load(state)
        assert all(torch.equal(state[name], before[name]) for name in state)
    # One buffer for each save that may be pending, of the state's bytes and the alignment of its three tensors.
    sizes = [staging.num_bytes for staging in manager._staging]
    assert all(1025 * 333 * 4 < size < 1025 * 333 * 4 + 4 * 64 for size in sizes) and all(staging._locked for staging in manager._staging)


def test_files_written_on_threads_hold_what_another_stream_wrote_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_ckpt._core._save._MIN_FILE_BYTES", 2**20)
    monkeypatch.setattr("mcore_ckpt._core._control.num_cores", lambda: 4)
    state = {f"w{i}": torch.zeros(2**20, device="cuda") for i in range(8)}
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            matrix = matrix @ matrix / 64
        for number, value in enumerate(state.values()):
            value.fill_(float(number + 1))
        save(state, tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 4
    back = {name: torch.zeros(2**20) for name in state}
    load(back, tmp_path / "c")
    assert all(bool((value == number + 1).all()) for number, value in enumerate(back.values()))


def test_files_read_on_threads_fill_tensors_after_what_their_stream_has_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_ckpt._core._control.num_cores", lambda: 4)
    # Longer than the blocks in which files are read, and of rows longer than those.
    state = {f"w{i}": torch.randn(3, 2**20 + 7 * i) for i in range(4)}
    save(state, tmp_path / "c", max_file_bytes=2**24)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 4
    back = {name: torch.empty_like(value, device="cuda") for name, value in state.items()}
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50):
            matrix = matrix @ matrix / 64
        for value in back.values():
            value.zero_()
        load(back, tmp_path / "c")
        assert all(torch.equal(back[name].cpu(), state[name]) for name in state)


def test_the_writer_process_reads_page_locked_memory_and_a_killed_one_is_replaced(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(2**20 + i, device="cuda") for i in range(16)}
    manager, pids, held = CheckpointManager(tmp_path, keep=None), set(), []
    for step in range(4):
        before = {name: value.clone() for name, value in state.items()}
        manager.save(step, state, asynchronous=True)
        for value in state.values():
            value.mul_(2)
        manager.wait()
        pids.add(manager._worker.pid)
        back = {name: torch.empty_like(value) for name, value in state.items()}
        manager.load(back, step)
        assert all(torch.equal(back[name], before[name]) for name in state)
        del before, back
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert len(pids) == 1 and len(set(held)) == 1
    pid = manager._worker.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    manager.save(4, state, asynchronous=True)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointingException, match=f"the writer process {pid} was killed by SIGKILL"):
        manager.wait()
    manager.save(5, state, asynchronous=True)
    manager.wait()
    assert manager.steps() == [0, 1, 2, 3, 5]


def test_an_asynchronous_step_on_the_node_waits_for_the_copy_only(tmp_path: Path) -> None:
    place = Path("/dev/shm") if Path("/dev/shm").is_dir() else tmp_path
    folder = Path(tempfile.mkdtemp(dir=place))
    try:
        nodes = LocalCheckpoints(folder, copies=1)
        state = {"w": torch.randn(2**28, device="cuda"), "b": torch.arange(7, device="cuda")}
        blocked = []
        for step in range(4):
            before = {name: value.clone() for name, value in state.items()}
            torch.cuda.synchronize()
            begin = time.perf_counter()
            nodes.save(step, state, {"step": step}, asynchronous=True)
            blocked.append(time.perf_counter() - begin)
            for value in state.values():
                value.zero_()
            nodes.wait()
            assert nodes.load(state) == (step, {"step": step})
            assert all(torch.equal(state[name], before[name]) for name in state)
        # 1 GiB; the first save also locks the memory, which serves again.
        assert nodes._staging._locked and min(blocked[1:]) < 0.25, blocked
    finally:
        shutil.rmtree(folder)


def check_partners(folder: str) -> bool:
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    own = Path(folder) / f"node{rank}"

    def opened() -> LocalCheckpoints:
        return LocalCheckpoints(own, node=own.name, copies=2, timeout_s=20.0)

    # Longer than a piece, so that both send and receive several times.
    state = {f"w{rank}": torch.full((2**23 + 7,), float(rank + 1), device="cuda"), "same": torch.arange(7, device="cuda")}
    opened().save(1, state, {"rank": rank})
    dist.barrier()
    if rank == 1:
        shutil.rmtree(own)
    dist.barrier()
    before = {name: value.clone() for name, value in state.items()}
    for value in state.values():
        value.zero_()
    return opened().load(state) == (1, {"rank": rank}) and all(torch.equal(state[name], before[name]) for name in state)


def test_two_nodes_with_nccl_alone_exchange_their_copies(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    assert run(check_partners, 2, backend="nccl", timeout_s=60.0, folder=str(tmp_path)) == [True, True]
