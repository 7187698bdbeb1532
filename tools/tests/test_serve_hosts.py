# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two hosts serve one model: engines on both behind one address, encrypted between them, and one goes on when the network is cut."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcore_inference import SamplingParams
from mcore_tools.serving import open_engine
from tests.support.checkpoints import tiny_checkpoint
from tests.support.hosts import ADDRESSES, INTERFACE, Hosts, two_hosts

TEXT = "two hosts serve one model behind one address. "
# In namespaces of the test's own.
URL = f"http://{ADDRESSES[0]}:8731"
SERVE = [sys.executable, "-m", "mcore_tools", "serve"]
ASK = f"""
import concurrent.futures, json, sys, urllib.request
def ask(number):
    body = {{"prompt": f"host {{number}}", "max_tokens": 8, "temperature": 0}}
    headers = {{"Authorization": "Bearer secret", "Content-Type": "application/json"}}
    request = urllib.request.Request("{URL}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(json.dumps(list(pool.map(ask, range(int(sys.argv[1]))))))
"""
NUM_ENGINES = f"""
import urllib.request
request = urllib.request.Request("{URL}/metrics", headers={{"Authorization": "Bearer secret"}})
with urllib.request.urlopen(request, timeout=10) as answer:
    lines = answer.read().decode().splitlines()
print([line for line in lines if line.startswith("mcore_inference_engines ")][0].split()[1])
"""
STRANGER = """
import json, sys
import zmq
address = json.load(open(sys.argv[1]))["address"]
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(address)
socket.send(b"plain text")
print(socket.poll(2000))
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, TEXT)


class Programs:
    """Programs on two hosts, each with a file of its output."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self._folder = hosts, folder
        self.started: list[subprocess.Popen[bytes]] = []
        self._environment = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
        self._environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}

    def start(self, host: int, command: list[str], name: str) -> "subprocess.Popen[bytes]":
        with (self._folder / name).open("wb") as output:
            self.started.append(self.hosts.start(host, command, output, self._folder, self._environment))
        return self.started[-1]

    def read(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")

    def run(self, host: int, program: str, *words: str) -> str:
        """The output of a short program."""
        process = self.start(host, [sys.executable, "-c", program, *words], "short.txt")
        code = process.wait(60)
        text = self.read("short.txt")
        assert code == 0, text
        return text.strip().splitlines()[-1]

    def until(self, name: str, words: str, process: "subprocess.Popen[bytes]", limit_s: float = 90.0) -> None:
        deadline = time.monotonic() + limit_s
        while words not in (text := self.read(name)):
            assert process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    (tmp_path / "token").write_text("secret")
    with two_hosts() as hosts:
        programs = Programs(hosts, tmp_path)
        yield programs
    for process in programs.started:
        process.wait(10)


def expected(checkpoint: Path) -> list[str]:
    """What one engine of this process says."""
    settings = SamplingParams(temperature=0, num_tokens_to_generate=8)
    records = open_engine(checkpoint, "cpu", cache_gb=0.01).generate([f"host {number}" for number in range(16)], settings)
    return [record.generated_text for record in records]


def address(host: int) -> list[str]:
    return ["--host", ADDRESSES[host], "--port", "8731", "--token-file", "token"]


@pytest.mark.journey
@pytest.mark.timeout(240)
def test_engines_of_two_hosts_answer_at_one_address_and_one_goes_on_alone(checkpoint: Path, tmp_path: Path, programs: Programs) -> None:
    wanted = expected(checkpoint)
    words = [*address(0), "--coordinator-host", ADDRESSES[0], "--job-file", "job"]
    server = programs.start(0, [*SERVE, str(checkpoint), *words], "server.txt")
    programs.until("server.txt", "serving ", server)
    job = tmp_path / "job"
    assert job.stat().st_mode & 0o777 == 0o600 and json.loads(job.read_text())["address"].startswith(f"tcp://{ADDRESSES[0]}:")
    assert programs.run(1, NUM_ENGINES) == "1.0" and json.loads(programs.run(1, ASK, "16")) == wanted
    far = programs.start(1, [*SERVE, str(checkpoint), "--join", "job", "--name", "far"], "far.txt")
    deadline = time.monotonic() + 90
    while programs.run(1, NUM_ENGINES) != "2.0":
        assert far.poll() is None and time.monotonic() < deadline, programs.read("far.txt") + programs.read("server.txt")
    # Whoever has no key hears nothing, and joins nothing.
    assert programs.run(1, STRANGER, "job") == "0" and programs.run(1, NUM_ENGINES) == "2.0"
    assert json.loads(programs.run(1, ASK, "16")) == wanted
    programs.hosts.cut()
    deadline = time.monotonic() + 30
    while programs.run(0, NUM_ENGINES) != "1.0":
        assert time.monotonic() < deadline, programs.read("server.txt")
    assert json.loads(programs.run(0, ASK, "16")) == wanted


@pytest.mark.journey
@pytest.mark.timeout(240)
def test_stages_on_two_hosts_say_what_one_process_says(checkpoint: Path, programs: Programs) -> None:
    wanted = expected(checkpoint)
    servers = []
    for host in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
        torchrun += ["--rdzv-id", "serve", "--rdzv-endpoint", f"{ADDRESSES[0]}:29500", "--rdzv-conf", f"is_host={host == 0}"]
        torchrun += ["--local-addr", ADDRESSES[host]]
        command = [*torchrun, *SERVE[1:], str(checkpoint), "--pp", "2", *address(0)]
        servers.append(programs.start(host, command, f"stage{host}.txt"))
    programs.until("stage0.txt", "serving ", servers[0])
    assert json.loads(programs.run(1, ASK, "16")) == wanted and servers[1].poll() is None
