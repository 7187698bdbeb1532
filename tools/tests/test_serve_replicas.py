# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines in processes of their own that die, and what becomes of the server over them. The processes only speak as engines do."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_inference import (
    CoordinatorError,
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineDeadError,
    InferenceConfig,
    PagedAttention,
)
from mcore_inference.coordinator import (
    CoordinatedRunner,
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
)
from mcore_inference.coordinator._core import CoordinatorCore
from mcore_inference.coordinator._messages import PROTOCOL
from mcore_inference.server import ServerLimits, serve_runner
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_tools.serving import EngineLayout, Job, _replicas, coordinated, work_for
from mcore_tools.serving._replicas import Replicas

ONE = EngineLayout(tp=1, pp=1, num_sharing=1)
ENGINE = f"""
import os, pathlib, sys, time
import msgspec, zmq
folder, address, name = pathlib.Path(sys.argv[1]), sys.argv[3], sys.argv[5]
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.linger = 0
    if key := os.environ.get("MCORE_COORDINATOR_KEY"):
        dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
        dealer.curve_serverkey = key.encode()
    dealer.connect(address)
    registration = msgspec.msgpack.encode([17, {PROTOCOL}, os.environ["MCORE_COORDINATOR_SECRET"], name, "running", 64])
    dealer.send(registration)
    while not (folder / name).exists():
        if dealer.poll(50) and msgspec.msgpack.decode(dealer.recv())[0] == 19:
            dealer.send(registration)
        while (folder / f"{{name}} is silent").exists():
            time.sleep(0.02)
        dealer.send(msgspec.msgpack.encode([25, True, None, {{"generated_tokens": 5.0}}]))
os._exit(9)
"""


def command(folder: Path) -> list[str]:
    """Of a process that works for a coordinator until the folder has a file of its name."""
    return [sys.executable, "-c", ENGINE, str(folder)]


def until(holds: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.journey
def test_a_server_ends_when_all_of_its_engines_were_given_up_and_not_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with coordinated(command(tmp_path), count=2, layout=ONE) as run:
        assert run is not None
        runners: list[CoordinatedRunner] = []

        def made() -> CoordinatedRunner:
            runners.append(run())
            return runners[-1]

        with serve_runner(made, ByteTokenizer()) as server, caplog.at_level(logging.ERROR, "mcore_tools.serving"):
            runner = runners[0]
            (tmp_path / "dp-0").touch()
            until(lambda: "dp-0 ended with exit code 9, 3 times" in caplog.text, "the first is given up")
            until(lambda: runner.stats()["engines"] == 1, "one is left")
            time.sleep(0.5)
            assert runner.failure is None and runner.health().alive
            (tmp_path / "dp-1").touch()
            with pytest.raises(EngineDeadError, match="all engines are given up; the reasons stand above"):
                server.wait()
            assert runner.stats()["generated_tokens"] >= 10
        # One that is made later fails as well.
        assert isinstance(run().failure, EngineDeadError)


def test_a_server_ends_with_its_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with coordinated(command(tmp_path), count=1, layout=ONE) as run:
        assert run is not None
        with serve_runner(run, ByteTokenizer()) as server:
            monkeypatch.setattr(CoordinatorCore, "tick", broken)
            with pytest.raises(EngineDeadError, match="the coordinator ended: ZeroDivisionError: a bug"):
                server.wait()
    loading = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(RuntimeError, match="the coordinator ended"), coordinated(loading, count=1, layout=ONE):
        pytest.fail("it has no engine")


def test_engines_have_no_key_of_another_job(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(address="tcp://127.0.0.1:9", security=CoordinatorSecurity(secret="own"))
    monkeypatch.setenv("MCORE_COORDINATOR_KEY", "0" * 40)
    for name, value in job.environment().items():
        monkeypatch.setenv(name, value)
    assert Job.named(job.address) == job


@pytest.mark.journey
def test_an_engine_of_another_host_keeps_the_server_alone(tmp_path: Path) -> None:
    ends: list[str] = []
    security = CoordinatorSecurity(secret="job")
    with DataParallelInferenceCoordinator(CoordinatorConfig(security=security)) as coordinator:
        job = Job(address=coordinator.address, security=security)
        (tmp_path / "dp-0").touch()
        other = Replicas(command(tmp_path / "elsewhere"), count=1, coordinator=coordinator, job=job, layout=ONE)
        # Of the other host, which numbers its engines differently.
        other._worlds[0].first = 7
        own = Replicas(command(tmp_path), count=1, coordinator=coordinator, job=job, layout=ONE, on_end=ends.append)
        with other:
            coordinator.wait_for_engines(1)
            with own:
                until(lambda: own.num_given_up == 1, "its own was given up")
                time.sleep(0.5)
                assert not ends and coordinator.num_engines == 1
                other.__exit__()
                until(lambda: len(ends) == 1, "none is left", 10)
                time.sleep(0.5)
    assert len(ends) == 1 and ends[0].startswith("all engines are given up")


@pytest.mark.parametrize("code", [1, 2])
def test_what_is_refused_at_the_first_start_is_not_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int) -> None:
    starts = f"pathlib.Path({str(tmp_path)!r}, 'starts').open('a').write('x')"
    words = [sys.executable, "-c", f"import pathlib; {starts}; raise SystemExit({code})"]
    with pytest.raises(ValueError, match="an engine ended at its start"), coordinated(words, count=1, layout=ONE):
        raise AssertionError("it has no engine")
    assert (tmp_path / "starts").read_text() == "x"
    assert f"dp-0 ended with exit code {code} at its first start, and is given up" in caplog.text


def test_what_ends_while_it_loads_is_given_up_however_long_that_took(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_replicas, "_EARLY_S", 0.01)
    words = [sys.executable, "-c", "import time; time.sleep(0.3); raise SystemExit(9)"]
    with pytest.raises(ValueError, match="an engine ended at its start"), coordinated(words, count=1, layout=ONE):
        raise AssertionError("it has no engine")
    assert "dp-0 ended with exit code 9, 3 times before it took requests for a minute, and is given up" in caplog.text


@pytest.mark.journey
@pytest.mark.parametrize("obeys", [True, False])
def test_an_engine_that_hangs_is_ended_and_started_again(
    obeys: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_replicas, "_HUNG_S", 0.5)
    monkeypatch.setattr(_replicas, "_TERMINATE_S", 60.0 if obeys else 0.5)
    security = CoordinatorSecurity(secret="job")
    config = CoordinatorConfig(security=security, heartbeat_s=0.2, engine_timeout_s=1.0)
    with DataParallelInferenceCoordinator(config) as coordinator, caplog.at_level(logging.ERROR, "mcore_tools.serving"):
        job = Job(address=coordinator.address, security=security)
        with Replicas(command(tmp_path), count=2, coordinator=coordinator, job=job, layout=ONE) as replicas:
            coordinator.wait_for_engines(2)
            until(lambda: all(world.up_since is not None for world in replicas._worlds), "both are up")
            hung, other = (world.processes[0] for world in replicas._worlds)
            if obeys:
                # Silent, and it ends at SIGTERM: nobody waits for a minute to kill it.
                (tmp_path / "dp-0 is silent").touch()
            else:
                os.kill(hung.pid, signal.SIGSTOP)
            until(lambda: "dp-0 did not come back within 0.5 s of being lost" in caplog.text, "it was ended")
            assert hung.returncode == (-signal.SIGTERM if obeys else -signal.SIGKILL)
            (tmp_path / "dp-0 is silent").unlink(missing_ok=True)
            until(lambda: replicas._worlds[0].up_since is not None and coordinator.num_engines == 2, "another took its place")
            assert [world.early_ends for world in replicas._worlds] == [1, 0] and other.poll() is None
            assert replicas._worlds[0].processes[0].pid != hung.pid and replicas.num_given_up == 0


@pytest.mark.journey
def test_an_engine_that_comes_back_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_replicas, "_HUNG_S", 2.0)
    security = CoordinatorSecurity(secret="job")
    config = CoordinatorConfig(security=security, heartbeat_s=0.2, engine_timeout_s=1.0)
    with DataParallelInferenceCoordinator(config) as coordinator:
        job = Job(address=coordinator.address, security=security)
        with Replicas(command(tmp_path), count=1, coordinator=coordinator, job=job, layout=ONE) as replicas:
            (world,) = replicas._worlds
            until(lambda: world.up_since is not None, "it is up")
            silent = tmp_path / "dp-0 is silent"
            for _ in range(2):
                silent.touch()
                until(lambda: world.missing_since is not None, "it is lost")
                silent.unlink()
                until(lambda: world.missing_since is None, "it is back")
            time.sleep(2.5)
            assert world.processes[0].poll() is None and world.num_starts == 1 and world.early_ends == 0


def test_engines_of_other_hosts_get_no_secret_to_control_others(tmp_path: Path) -> None:
    file = tmp_path / "job"
    with coordinated(command(tmp_path), count=1, layout=ONE, job_file=file) as run:
        assert run is not None
        assert set(json.loads(file.read_text())) == {"address", "secret", "public_key"}
        with run() as runner:
            security = runner._client._security
            assert security.control_secret is not None and security.control_secret not in (file.read_text(), security.secret)
            assert security.control_secret not in str(Job.named(str(file)).environment())
            assert Job.named(str(file)).security == CoordinatorSecurity(secret=security.secret, public_key=security.public_key)
        # What the file has is enough to send requests, and not to stop others' engines.

        async def ask() -> None:
            job = Job.named(str(file))
            async with InferenceClient(job.address, security=job.security) as client:
                assert len((await client.status()).engines) == 1
                with pytest.raises(CoordinatorError, match="stop needs control_secret"):
                    await client.stop_engines()

        asyncio.run(asyncio.wait_for(ask(), 20))


@pytest.mark.parametrize(("fails", "code"), [(True, 75), (False, 0)])
def test_a_worker_that_fails_ends_its_process_as_a_failed_engine_does(
    fails: bool, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By exit code 75, for whoever starts it again; a stop of all engines is no failure."""
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=64)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), seed=0)
    sizes = InferenceConfig(max_sequence_length=16, num_blocks=4, block_size_tokens=8)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))

    async def stop(address: str) -> None:
        async with InferenceClient(address) as client:
            with contextlib.suppress(CoordinatorError):
                await client.stop_engines()

    async def fail(self: EngineWorker, signal: object) -> None:
        raise RuntimeError("no such signal")

    if fails:
        monkeypatch.setattr(EngineWorker, "_obey", fail)
    with DataParallelInferenceCoordinator() as coordinator:

        def drive() -> None:
            coordinator.wait_for_engines(1)
            asyncio.run(stop(coordinator.address))

        with ThreadPoolExecutor(1) as pool:
            driven = pool.submit(drive)
            assert work_for(engine, Job.named(coordinator.address), "dp-0", ServerLimits()) == code
            driven.result(timeout=30)
    assert ("worker dp-0 ended" in caplog.text) == fails
