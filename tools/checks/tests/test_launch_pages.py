# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The scripts that the launch pages show start."""

import json
import runpy
import subprocess
import sys

import pytest

from tests.support.commands import run_ranks
from tools.checks._tree import ROOT

EXAMPLES = ROOT / "docs" / "launch" / "examples"


def check_world(words: list[str]) -> int:
    """The script of the page, as a command."""
    sys.argv = ["check_world.py", *words]
    runpy.run_path(str(EXAMPLES / "check_world.py"), run_name="__main__")
    return 0


def test_check_world_exchanges_over_every_group():
    first, other = run_ranks(check_world, ["--tp", "2"], 2)
    assert (first[0], other[0]) == (0, 0), first[2] + other[2]
    assert "tp          2 ranks" in first[1] and "all 2 ranks" in first[1] and not other[1]


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
