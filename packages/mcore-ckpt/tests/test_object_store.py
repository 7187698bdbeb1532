# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Against an S3 server that the test starts, where moto's is installed (`pip install moto[server]`)."""

import gc
import shutil
import socket
import subprocess
import time

import pytest
import torch

from mcore_ckpt import CheckpointManager, ShardedTensor, load
from mcore_ckpt.assets import read_asset
from mcore_ckpt.inspect import verify
from mcore_ckpt.storage import ObjectFolder


@pytest.fixture
def bucket(monkeypatch):
    pytest.importorskip("s3fs")
    server = shutil.which("moto_server")
    if server is None:
        pytest.skip("no moto_server here")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([server, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the S3 server does not answer"
                time.sleep(0.1)
        folder = ObjectFolder("s3://bucket/run", endpoint_url=f"http://127.0.0.1:{port}")
        folder._system.mkdir("bucket")
        yield folder
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.filterwarnings("ignore")
def test_steps_come_and_go_on_s3(bucket):
    weight = torch.arange(3_000_000.0).reshape(1000, 3000)
    manager = CheckpointManager(bucket, keep=2, assets={"tokenizer/vocab.json": b"{}", "empty": b""})
    for step in (1, 2, 3):
        manager.save(step, {"w": weight * step, "s": torch.tensor(step)}, {"step": step}, asynchronous=step == 2)
    assert manager.steps() == [2, 3] and bucket.names() == ["step_00000002", "step_00000003"]
    part = torch.zeros(10, 5)
    assert load({"w": ShardedTensor(part, (1000, 3000), (7, 3))}, manager.folder(3), strict=False) == {"step": 3}
    assert torch.equal(part, 3 * weight[7:17, 3:8]) and verify(bucket) == []
    assert read_asset(manager.folder(3), "tokenizer/vocab.json") == b"{}" and read_asset(manager.folder(2), "empty") == b""
    other = CheckpointManager(bucket.child("other"), format="torch_dist")
    other.save(1, {"w": weight})
    target = torch.zeros_like(weight)
    other.load({"w": target})
    assert torch.equal(target, weight)


@pytest.mark.journey
@pytest.mark.filterwarnings("ignore")
def test_an_upload_that_fails_shows_nothing(bucket):
    def parts():
        # More than one block, so that an upload has begun.
        yield memoryview(bytes(20 * 2**20))
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        bucket.write("half", parts())
    gc.collect()
    assert bucket.size("half") is None and bucket.names() == []
