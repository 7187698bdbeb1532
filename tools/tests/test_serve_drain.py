# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A signal to one engine of `mcore serve --join`: it leaves when its requests are over, and at once at a second signal."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mcore_inference import SamplingParams
from mcore_inference.coordinator import CoordinatorConfig, CoordinatorSecurity, DataParallelInferenceCoordinator, InferenceClient
from mcore_tools.serve import main
from mcore_tools.serving import Job
from tests.support.checkpoints import tiny_checkpoint

PARAMS = SamplingParams(num_tokens_to_generate=16, ignore_eos=True, temperature=0)
SECURITY = CoordinatorSecurity(secret="of the job")


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[DataParallelInferenceCoordinator, list["subprocess.Popen[bytes]"]]]:
    """A coordinator, and two processes that joined it."""
    checkpoint = tiny_checkpoint(tmp_path, "an engine ends what it has begun. ")
    with ExitStack() as stack:
        coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(security=SECURITY)))
        job = Job(address=coordinator.address, security=SECURITY)
        environment = {**os.environ, **job.environment(), "OMP_NUM_THREADS": "1", "USE_COORDINATOR": "0"}
        processes = []
        for number in range(2):
            words = [str(checkpoint), "--join", coordinator.address, "--name", f"dp-{number}", "--drain-seconds", "60"]
            processes.append(subprocess.Popen([sys.executable, "-m", "mcore_tools", "serve", *words], env=environment))
            stack.callback(processes[-1].wait)
            stack.callback(processes[-1].kill)
        coordinator.wait_for_engines(2, timeout_s=90.0)
        yield coordinator, processes


async def draining(client: InferenceClient, name: str) -> int:
    """Open requests of an engine, once it drains."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        for engine in (await client.status()).engines:
            if (engine.name, engine.state) == (name, "draining"):
                return engine.open_requests
        await asyncio.sleep(0.02)
    raise AssertionError(f"{name} does not drain")


async def until(process: "subprocess.Popen[bytes]", limit_s: float) -> int:
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        assert time.monotonic() < deadline, "the process ends"
        await asyncio.sleep(0.02)
    return process.returncode


@pytest.mark.journey
@pytest.mark.timeout(180)
def test_an_engine_that_gets_a_signal_ends_its_streams_and_the_process(
    engines: tuple[DataParallelInferenceCoordinator, list["subprocess.Popen[bytes]"]],
) -> None:
    coordinator, processes = engines

    async def ask() -> None:
        async with InferenceClient(coordinator.address, security=SECURITY) as client:
            # What is open stays so until the engine has heard of the signal.
            await client.pause_engines()
            streams = [await client.submit("an engine", PARAMS) for _ in range(6)]
            processes[0].send_signal(signal.SIGTERM)
            assert await draining(client, "dp-0") == 3 and processes[0].poll() is None
            await client.unpause_engines()
            assert [len((await stream.record()).generated_tokens) for stream in streams] == [16] * 6
            assert await until(processes[0], 20.0) == 0
            assert [engine.name for engine in (await client.status()).engines] == ["dp-1"]
            # A second signal gives the rest up; nobody is left to retry them.
            await client.pause_engines()
            streams = [await client.submit("an engine", PARAMS) for _ in range(2)]
            processes[1].send_signal(signal.SIGTERM)
            assert await draining(client, "dp-1") == 2
            await asyncio.sleep(0.5)
            assert processes[1].poll() is None
            processes[1].send_signal(signal.SIGTERM)
            assert await until(processes[1], 20.0) == 0
            state = await client.status()
            assert not state.engines and state.waiting_requests == 2
            assert (state.past["drained_engines"], state.past["lost_engines"]) == (1, 1)

    asyncio.run(ask())


def test_the_time_to_drain_is_of_servers_and_engines_that_join(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main([str(tmp_path), "--prompt", "x", "--drain-seconds", "3"]) == 2
    assert "--drain-seconds is of a server over HTTP, and --prompt starts none; leave it out" in capsys.readouterr().err
