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

from tests.campaigns._serving_cores import assigned
from tests.campaigns._serving_soak import Sample, growth

# Times depend on what else the machine does; those of the documentation are of a run of their own.
SHORT = {"frames": 200, "aborts": 40, "kills": 2, "swaps": 6, "repeats": 1, "slow-clients": 8, "requests": 80, "seconds": 1}
SHORT["oversize-ms"] = 5000


def run(sizes, timeout, *flags):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.campaigns.serving", *flags]
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


@pytest.mark.timeout(180)
def test_an_attack_on_engines_of_other_processes_loses_nothing_and_says_where_all_ran():
    words = {"engine-processes": 2, "frames": 400, "seconds": 1, "rate": 10}
    figures = run(words, 170, "--only-attack")
    assert not figures["problems"] and figures["cores"] == len(os.sched_getaffinity(0))
    places = figures["cores_of"]
    assert places == "all parts share all cores" if figures["cores"] < 8 else not set(places["server"]) & set(places["others"])
    assert figures["hostile bytes"]["http_statuses"]["400"] > 10 and figures["p99 to that without attack"]["hostile bytes"] > 0


def test_a_campaign_that_is_out_of_time_writes_what_it_has_and_says_what_is_lacking(tmp_path):
    path, environment = tmp_path / "figures.json", {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = ["--parts", "kills", "memory", "--budget-seconds", "0", "--output", str(path)]
    done = subprocess.run([sys.executable, "-m", "tests.campaigns.serving", *words], capture_output=True, timeout=60, env=environment)
    figures = json.loads(path.read_text())
    assert done.returncode == 1 and figures["unfinished"] == ["killed engines", "memory"] and figures["problems"] == []


@pytest.mark.parametrize(("threads", "sizes"), [(1, (4, 2, 2)), (2, (4, 2, 2)), (1, (16, 8, 8)), (2, (16, 8, 8)), (2, (6, 4, 2))])
def test_parts_of_the_campaign_share_no_physical_core(threads, sizes):
    count = sum(sizes)
    # The second threads have the higher numbers.
    shared = {core: core % (count // threads) for core in range(count)}
    cores = assigned(shared, shared)
    parts = (cores.server, cores.good, cores.others)
    assert tuple(map(len, parts)) == sizes and sorted(core for part in parts for core in part) == list(range(count))
    assert sum(len({shared[core] for core in part}) for part in parts) == count // threads


def test_parts_of_the_campaign_share_few_cores():
    cores = assigned(range(4), {core: core for core in range(4)})
    assert cores.server == cores.good == cores.others == [0, 1, 2, 3]


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
