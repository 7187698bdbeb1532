# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The serving campaign in short, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("zmq", reason="the campaign has a coordinator")
pytest.importorskip("uvicorn", reason="the campaign has servers")

# Times depend on what else the machine does; those of the documentation are of a run of their own.
SHORT = {"frames": 300, "aborts": 60, "kills": 2, "swaps": 8, "repeats": 1, "slow-clients": 12, "requests": 120, "seconds": 1}
SHORT["oversize-ms"] = 5000


def run(sizes, timeout):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.campaigns.serving"]
    command += [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return json.loads(done.stdout)


def check(figures, sizes):
    assert not figures["problems"]
    # The attacks took place.
    assert figures["hostile bytes"]["frames"] + figures["hostile bytes"]["http_requests"] >= sizes["frames"]
    assert figures["hostile bytes"]["good"]["requests"] >= 20 and figures["hostile bytes"]["http_statuses"]["400"] > 10
    assert figures["clients that leave"]["left_within_their_stream"] > 0 and figures["suspends"]["requests"] > 0
    assert figures["weights"]["requests_of_several_versions"] > 0 and figures["killed engines"]["whole_requests"] > 0


@pytest.mark.timeout(180)
def test_the_short_campaign_loses_and_leaks_nothing():
    check(run(SHORT, 170), SHORT)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_long_campaign_loses_and_leaks_nothing():
    sizes = {"frames": 1_000_000, "aborts": 10_000, "oversize-ms": 5000}
    check(run(sizes, 7000), sizes)
