# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The serving campaign in short, in a process of its own."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
from typing import Any

import pytest

pytest.importorskip("zmq", reason="the campaign has a coordinator")
pytest.importorskip("uvicorn", reason="the campaign has servers")

from tests.campaigns._serving_changes import Fates, killed_engines
from tests.campaigns._serving_clients import Departure, leave
from tests.campaigns._serving_cores import assigned
from tests.campaigns._serving_soak import Sample, growth
from tests.campaigns.serving import PARTS, main
from tests.support.commands import run_command

# Times depend on what else the machine does; those of the documentation are of a run of their own.
SHORT = {
    "frames": 200,
    "aborts": 40,
    "kills": 2,
    "swaps": 6,
    "repeats": 1,
    "slow-clients": 8,
    "requests": 80,
    "seconds": 1,
    "oversize-ms": 1500,
}


def run(sizes, timeout, *flags):
    words = [*flags, *(part for name, value in sizes.items() for part in (f"--{name}", str(value)))]
    code, output, errors = run_command(main, words, timeout_s=timeout)
    assert code == 0, output + errors[-4000:]
    return json.loads(output)


def check(figures, sizes):
    assert not figures["problems"]
    # The attacks took place.
    assert figures["hostile bytes"]["frames"] + figures["hostile bytes"]["http_requests"] >= sizes["frames"]
    assert figures["hostile bytes"]["good"]["requests"] >= 20 and figures["hostile bytes"]["http_statuses"]["400"] > 10
    assert figures["clients that leave"]["left_within_their_stream"] > 0 and figures["suspends"]["requests"] > 0
    assert figures["weights"]["requests_of_several_versions"] > 0 and figures["killed engines"]["whole_requests"] > 0
    assert figures["killed engines"]["held_by_a_killed_engine"] > 0 and figures["clients that leave"]["tokens_read_before"]["p100"] > 20
    refused = figures["oversize requests"]["requests"]
    assert {name.partition(":")[0] for name in refused} >= {"chat", "tokenize", "detokenize", "many prompts"}


@pytest.mark.journey
@pytest.mark.timeout(180)
def test_the_short_campaign_loses_and_leaks_nothing():
    figures = run(SHORT, 170, "--parts", *(part for part in PARTS if part != "kills"))
    # Here, where a server to fork engines from runs already.
    killed = killed_engines(SHORT["kills"], seed=0)
    assert killed["kills"] == SHORT["kills"] and not killed["problems"]
    check({**figures, "killed engines": killed}, SHORT)


@pytest.mark.journey
@pytest.mark.timeout(180)
def test_an_attack_on_engines_of_other_processes_loses_nothing_and_says_where_all_ran():
    words = {"engine-processes": 2, "frames": 400, "seconds": 1, "rate": 10}
    figures = run(words, 170, "--only-attack")
    assert not figures["problems"] and figures["cores"] == len(os.sched_getaffinity(0))
    places = figures["cores_of"]
    assert places == "all parts share all cores" if figures["cores"] < 8 else not set(places["server"]) & set(places["others"])
    assert figures["hostile bytes"]["http_statuses"]["400"] > 10 and figures["p99 to that without attack"]["hostile bytes"] > 0


def test_a_request_whose_engine_was_killed_is_late_however_many_kills_follow():
    fates = Fates(killed={f"dp-{index}": 2.0 * index for index in range(5)}, held={1: ["dp-0"], 2: ["dp-0", "dp-1"]})
    for number, end in ((1, 9.0), (2, 6.5), (3, 4.5), (4, 0.0)):
        fates.note_end(number, begin=-1.0, end=end)
    # The second went to the next victim; engines of the third lived; nobody was killed beside the fourth.
    assert fates.after_last_s == [9.0, 4.5] and fates.after_first_s == [9.0, 6.5] and fates.survivors_s == [5.5]
    assert fates.late() == ["9.0 s from the kill of its engine to the end of a request", "5.5 s for one of an engine that lived"]
    assert Fates(killed={"dp-0": 0.0}).late() == ["no killed engine held a request"] and Fates().late() == []


def test_every_client_that_leaves_within_its_stream_is_counted_and_leaves_at_any_token():
    """Eight at a time, of a server whose pieces come one by one."""
    sent: list[int] = []

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wanted = json.loads((await reader.readuntil(b"}"))[-200:].partition(b"\r\n\r\n")[2])
        number = 0
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while wanted["stream"] and number < 200 and not writer.is_closing():
                number += 1
                writer.write(b"6\r\ndata: {}\n\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.0005)
            if not wanted["stream"]:
                await reader.read()
        sent.append(number)
        writer.transport.abort()

    async def run() -> dict[str, Any]:
        server = await asyncio.start_server(stream, "127.0.0.1", 0)
        async with server:
            plan = {"ports": [server.sockets[0].getsockname()[1]], "count": 120, "seed": 1, "seconds": 30.0}
            figures = await leave(plan)
            while len(sent) < 120:
                await asyncio.sleep(0.01)
            # What was aborted is closed in the next turn.
            await asyncio.sleep(0.01)
            return figures

    figures = asyncio.run(asyncio.wait_for(run(), 50))
    draw = random.Random(1)
    cuts = [departure.cut for departure in (Departure.draw(draw) for _ in range(120)) if departure.cut]
    assert figures["count"] == 120 and figures["left_within_their_stream"] == len(cuts) > 60 and not figures["streams_that_ended_before"]
    read = figures["tokens_read_before"]
    assert read["p100"] == max(cuts) > 100 and read["p10"] == sorted(cuts)[(len(cuts) - 1) // 10]


def test_a_campaign_that_is_out_of_time_writes_what_it_has_and_says_what_is_lacking(tmp_path):
    path = tmp_path / "figures.json"
    code, _, _ = run_command(main, ["--parts", "kills", "memory", "--budget-seconds", "0", "--output", str(path)])
    figures = json.loads(path.read_text())
    assert code == 1 and figures["unfinished"] == ["killed engines", "memory"] and figures["problems"] == []


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
    sizes = {"frames": 1_000_000, "aborts": 10_000}
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
