# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The published files that deploy a server: what they say is what the command takes, and they work where their programs are."""

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_inference.server import serve
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_tools import serve as command
from tests.support.checkpoints import tiny_checkpoint
from tests.support.programs import lacking

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "launch" / "examples"


def free_port() -> int:
    """One below those that the kernel gives to whoever asks for any: no other process gets it before the server is there."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for port in range(lowest - 1 - os.getpid() % 4096, 1024, -1):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


def until(done: Callable[[], Any], limit_s: float, why: Callable[[], str]) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := done()):
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)
    return value


def test_the_application_and_its_image_bring_what_its_server_answers_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (declared,) = [name for name in project["dependencies"] if name.startswith("mcore-inference")]
    image = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    for text in (declared, image.partition("ls mcore_inference-*.whl)")[2]):
        extras = text.partition("[")[2].partition("]")[0].split(",")
        # HTTP, engines in processes of their own, `response_format` and required calls of tools.
        assert {"server", "coordinator", "structured"} <= set(extras), text[:80]


def test_the_kubernetes_file_says_what_the_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    service, deployment = yaml.safe_load_all((FILES / "serve.yaml").read_text(encoding="utf-8"))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = dict(word.removeprefix("--").split("=") for word in container["args"])
    with pytest.raises(SystemExit):
        command.main(["--help"])
    help_text = capsys.readouterr().out
    assert container["command"][:2] == ["mcore", "serve"] and all(f"--{name} " in help_text for name in options)
    (port,) = container["ports"]
    assert int(options["port"]) == port["containerPort"] and service["spec"]["ports"][0]["targetPort"] == port["name"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]
    probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
    assert all(probe["httpGet"] == {"path": "/health", "port": port["name"]} for probe in probes.values())
    # Out of the service at once, started again later than a step may hang, and ended later than requests may drain.
    ready, alive = (probes[kind]["periodSeconds"] * probes[kind]["failureThreshold"] for kind in ("readiness", "liveness"))
    assert ready <= 5 < alive and "stall-seconds" not in options
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[0] == "sleep" and pod["terminationGracePeriodSeconds"] > float(options["drain-seconds"]) + float(hook[1])
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]} and "/dev/shm" in mounts
    assert str(Path(options["token-file"]).parent) in mounts and str(Path(container["command"][2]).parent) in mounts


SRUN = """#!/bin/bash
# Two tasks of one node, as srun would start them.
shift
for task in 0 1; do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
trap 'kill $(jobs -p)' TERM
wait
wait
"""


@pytest.mark.journey
@pytest.mark.timeout(150)
def test_the_slurm_script_serves_by_all_tasks(tmp_path: Path) -> None:
    checkpoint, port = tiny_checkpoint(tmp_path, "slurm starts a task for each device. "), free_port()
    (tmp_path / "token").write_text("secret")
    for name, text in {"srun": SRUN, "mcore": f'#!/bin/bash\nexec {sys.executable} -m mcore_tools "$@"\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    place = {"CHECKPOINT": str(checkpoint), "TOKEN_FILE": "token", "PORT": str(port), "ADDRESS": "127.0.0.1", "SLURM_JOB_ID": "7"}
    environment = {**os.environ, **place, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", str(FILES / "serve.sbatch")]
    with (tmp_path / "out").open("wb") as out:
        job = subprocess.Popen(script, cwd=tmp_path, env=environment, stdout=out, stderr=out, start_new_session=True)
    headers = {"Authorization": "Bearer secret"}

    def engines() -> bool:
        assert job.poll() is None, (tmp_path / "out").read_text()
        with contextlib.suppress(httpx.TransportError):
            return "mcore_inference_engines 2.0" in httpx.get(f"http://127.0.0.1:{port}/metrics", headers=headers).text
        return False

    try:
        until(engines, 90, lambda: (tmp_path / "out").read_text())
        body = {"prompt": "slurm", "max_tokens": 4}
        assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(60)


@pytest.fixture
def proxied(tmp_path: Path) -> Iterator[tuple[httpx.Client, str, threading.Event]]:
    """A server behind the published proxy: a client of that, the address behind it, and what its engine waits for before a step."""
    nginx = shutil.which("nginx")
    if nginx is None or shutil.which("openssl") is None:
        lacking("needs nginx and openssl")
    key, certificate, port = tmp_path / "key.pem", tmp_path / "certificate.pem", free_port()
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "1"]
    subprocess.run([*request, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=272)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float32).eval()
    going = threading.Event()
    going.set()

    def wait(*_: Any) -> None:
        assert going.wait(60)

    model.register_forward_pre_hook(wait)
    context = DynamicInferenceContext.for_model(model, InferenceConfig(max_sequence_length=512, num_blocks=128, block_size_tokens=16))
    with serve(DynamicInferenceEngine(model, context, ByteTokenizer()), token="secret") as server:
        text = (FILES / "nginx.conf").read_text(encoding="utf-8")
        folders = "".join(f"{kind}_temp_path {tmp_path};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
        for published, own in (
            ("127.0.0.1:8000", f"127.0.0.1:{server.port}"),
            ("listen 443", f"listen 127.0.0.1:{port}"),
            ("/etc/nginx/tls/certificate.pem", str(certificate)),
            ("/etc/nginx/tls/key.pem", str(key)),
            # So that a slow machine reaches it.
            ("rate=20r/s", "rate=1r/m"),
            ("http {\n", f"http {{\naccess_log off; {folders}\n"),
        ):
            assert text.count(published) == 1, published
            text = text.replace(published, own)
        # No other account may read the folder of a test.
        user = "user root;" if os.geteuid() == 0 else ""
        text = f"daemon off; pid {tmp_path / 'pid'}; error_log {tmp_path / 'error.log'}; {user}\n{text}"
        (tmp_path / "nginx.conf").write_text(text, encoding="utf-8")
        with (tmp_path / "out").open("wb") as out:
            proxy = subprocess.Popen([nginx, "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")], stdout=out, stderr=out)
        try:
            trust = ssl.create_default_context(cafile=certificate)
            with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=30) as client:

                def answers() -> bool:
                    assert proxy.poll() is None, (tmp_path / "out").read_text()
                    with contextlib.suppress(httpx.TransportError):
                        return client.get("/health").status_code == 200
                    return False

                until(answers, 20, lambda: (tmp_path / "out").read_text())
                yield client, server.url, going
        finally:
            proxy.terminate()
            proxy.wait(20)


@pytest.mark.journey
def test_behind_the_published_proxy_tokens_stream_and_nothing_internal_shows(
    proxied: tuple[httpx.Client, str, threading.Event],
) -> None:
    client, url, going = proxied
    token = {"Authorization": "Bearer secret"}
    body = {"prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body, headers=token) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream") and answer.headers["x-request-id"]
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        going.clear()
        # The first token is here while the request still runs: nothing holds the stream back.
        health = httpx.get(f"{url}/health", headers=token).json()
        assert health["unfinished_requests"] == 1
        going.set()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert client.get("/v1/models").status_code == 401 and client.get("/v1/models", headers=token).status_code == 200
    for path in ("/metrics", "/update_weights_from_disk", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert client.get(path, headers=token).status_code == 403
    assert client.post("/v1/completions", content=b" " * (5 << 20), headers=token).status_code == 413
    assert "<title>mcore playground</title>" in client.get("/").text
    codes = [client.get("/health").status_code for _ in range(80)]
    assert codes.count(429) > 10 and json.loads(httpx.get(f"{url}/health").text)["status"] == "ok"
