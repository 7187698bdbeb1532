# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The scripts that the launch pages show start."""

import json
import os
import subprocess
import sys

import pytest

from tools.checks._tree import ROOT

EXAMPLES = ROOT / "docs" / "launch" / "examples"


@pytest.mark.journey
def test_check_world_exchanges_over_every_group(tmp_path):
    # An empty rendezvous port lets torchrun choose a free one.
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(EXAMPLES / "check_world.py"),
        "--tp",
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "tp          2 ranks" in done.stdout and "all 2 ranks" in done.stdout


def test_the_slurm_script_is_valid_shell():
    subprocess.run(["bash", "-n", str(EXAMPLES / "train.sbatch")], check=True)


def test_the_kubernetes_pods_rendezvous_at_the_first_of_them():
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((EXAMPLES / "train.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    arguments = pod["containers"][0]["args"]
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert f"--nnodes={job['spec']['completions']}" in arguments
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:29500" in arguments, json.dumps(arguments)
