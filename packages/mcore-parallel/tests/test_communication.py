# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The share of a trace that waits for communication."""

import gzip
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from mcore_parallel.training import CommunicationReport, exposed_communication, read_trace

SUM, GATHER = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllGather_RING_LL"


def kernel(name: str, begin: float, end: float, stream: int = 7, **facts: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "tid": stream, "args": facts}


def step(number: int, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"step {number}", "ts": begin, "dur": end - begin}


def report(*events: dict[str, Any]) -> CommunicationReport:
    found = exposed_communication(events)
    assert found is not None
    return found


def test_only_what_no_kernel_hides_is_exposed() -> None:
    found = report(
        step(3, 0, 1000),
        kernel("gemm", 100, 400),
        kernel("norm", 350, 500, stream=9),
        kernel(SUM, 200, 700, stream=20, **{"Process Group Description": "dp"}),
        kernel(GATHER, 650, 750, stream=21, **{"Process Group Description": "tp"}),
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 800, "dur": 50},
    )
    assert (found.num_steps, found.span_s) == (1, pytest.approx(1000e-6))
    assert found.compute_s == pytest.approx(400e-6)
    assert found.communication_s == pytest.approx(550e-6)
    assert found.exposed_s == pytest.approx(250e-6)
    assert found.other_s == pytest.approx(350e-6)
    assert found.exposed_share == pytest.approx(0.25) and found.hidden_share == pytest.approx(300 / 550)
    assert found.exposed_by_collective == pytest.approx({"AllReduce dp": 200e-6, "AllGather tp": 100e-6})
    assert str(found).startswith("exposed communication: 25.0% of a step, 0.25 of 1.00 ms; communication 0.55 ms, 55% of it hidden")
    assert "most: AllReduce dp 0.20 ms, AllGather tp 0.10 ms" in str(found)


def test_numbers_are_those_of_one_of_many_steps() -> None:
    events = [step(number, 100 * number, 100 * number + 100) for number in (4, 5)]
    events += [kernel("gemm", 400, 480), kernel(SUM, 480, 500), kernel("gemm", 500, 570), kernel(SUM, 560, 600)]
    found = report(*events)
    assert found.num_steps == 2
    values = found.values()
    assert values["communication/exposed_s"] == pytest.approx(25e-6) and values["communication/s"] == pytest.approx(30e-6)
    assert values["communication/exposed_share"] == pytest.approx(0.25)
    assert values["communication/compute_share"] == pytest.approx(0.75) and values["communication/other_share"] == pytest.approx(0.0)
    assert json.loads(json.dumps(found.to_json()))["exposed_share"] == pytest.approx(0.25)


def test_any_trace_is_divided_as_moment_by_moment() -> None:
    draw = random.Random(5)
    for _ in range(50):
        events = []
        for name, number in itertools.product(("gemm", SUM, GATHER, "void nvshmem::put(int)"), range(draw.randrange(1, 8))):
            begin = draw.randrange(200)
            events.append(kernel(name, begin, begin + draw.randrange(1, 30), stream=number))
        found = report(*events)
        compute, communication = set(), set()
        for event in events:
            moments = range(event["ts"], event["ts"] + event["dur"])
            (compute if event["name"] == "gemm" else communication).update(moments)
        length = max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events)
        assert found.span_s * 1e6 == pytest.approx(length)
        assert found.compute_s * 1e6 == pytest.approx(len(compute))
        assert found.communication_s * 1e6 == pytest.approx(len(communication))
        assert found.exposed_s * 1e6 == pytest.approx(len(communication - compute))
        assert found.compute_s + found.exposed_s + found.other_s == pytest.approx(found.span_s)


def test_a_run_without_communication_exposes_none_and_one_without_kernels_has_no_report() -> None:
    alone = report(step(1, 0, 10), kernel("gemm", 2, 8))
    assert alone.exposed_share == 0.0 and alone.hidden_share == 1.0 and "most" not in str(alone)
    assert exposed_communication([step(1, 0, 10), {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 3}]) is None


def test_traces_are_read_and_others_refused(tmp_path: Path) -> None:
    events = [step(1, 0, 10), kernel(SUM, 2, 4)]
    plain, packed, broken = tmp_path / "a.json", tmp_path / "a.json.gz", tmp_path / "b.json.gz"
    plain.write_text(json.dumps({"traceEvents": events}))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain) == read_trace(packed) == events
    broken.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b\.json\.gz is no trace"):
        read_trace(broken)
    plain.write_text("[1]")
    with pytest.raises(ValueError, match="holds no traceEvents"):
        read_trace(plain)
