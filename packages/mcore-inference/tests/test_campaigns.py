# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The serving campaign in short, in a process of its own."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("zmq", reason="the campaign has a coordinator")
pytest.importorskip("uvicorn", reason="the campaign has servers")

from tests.campaigns._serving_soak import Sample, growth

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


STEADY = Sample(at_s=0, resident_kb=300_000, python_blocks=800_000, tasks=20, threads=8, file_descriptors=50)


@pytest.mark.parametrize(
    ("field", "step"), [("resident_kb", 400), ("python_blocks", 500), ("tasks", 1), ("threads", 1), ("file_descriptors", 1)]
)
def test_a_soak_names_what_grows_and_forgives_what_only_fills_at_first(field, step):
    first = getattr(STEADY, field)
    filling = [dataclasses.replace(STEADY, **{field: first + step * min(index, 10)}) for index in range(48)]
    assert growth(filling, num_requests=4800)[1] == []
    leaking = [dataclasses.replace(STEADY, **{field: first + step * index}) for index in range(48)]
    grown, [problem] = growth(leaking, num_requests=4800)
    assert grown[field] == 24 * step and problem.startswith(f"{field} grew by {24 * step}; at most ")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_soak_of_two_minutes_loses_nothing_and_grows_by_nothing():
    figures = run({"soak-minutes": 2, "sample-seconds": 5, "rate": 10}, 280)
    assert not figures["problems"] and figures["soak"]["good"]["requests"] > 500 and figures["soak"]["num_samples"] >= 20
