# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The parts of the bench of many GPUs that need no GPU run on two ranks of the CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mcore_tools.launch import launch
from tools.bench._halves import grpo_on_halves
from tools.bench._killed import killed_engine
from tools.bench._scale import Scale
from tools.bench._turns import TURNS, grpo_by_turns
from tools.bench.many import RefitRun, main, refit_runs, refit_times
from tools.bench.rl import SIZES
from tools.bench.serve import build, run_case

TWO = Scale(gpus=2, small=True)


@pytest.mark.journey
def test_a_trainer_and_an_engine_work_by_turns_and_one_step_off() -> None:
    by_turns, one_off = grpo_on_halves(TWO, SIZES["tiny"], iterations=2)
    assert (by_turns["lag"], one_off["lag"]) == (0, 1)
    assert by_turns["logprob_mismatch"] < 1e-5 and one_off["num_dropped"] == 0
    assert all(row["tokens_per_s_per_gpu"] > 0 and row["refit_ms"] > 0 for row in (by_turns, one_off))


@pytest.mark.parametrize(
    ("streams", "resident_gb", "optimizer"), [(None, 0.0, "offloaded"), pytest.param(True, -1.0, "streamed", marks=pytest.mark.journey)]
)
def test_trainer_and_engines_of_the_same_ranks_take_turns(streams: bool | None, resident_gb: float, optimizer: str) -> None:
    [row] = grpo_by_turns(TWO, TURNS["tiny"], iterations=1, streams=streams, resident_gb=resident_gb)
    assert len(row["peak_gib"]) == len(row["peak_training_alone_gib"]) == 2
    assert row["resident_gib"] == (1e-4 if resident_gb else 0.0)
    assert row["logprob_mismatch"] < 1e-5 and row["num_dropped"] == 0 and row["optimizer"] == optimizer
    assert 0 <= row["timeline_s"]["to_generation"] + row["timeline_s"]["to_training"] < row["timeline_s"]["rollout"] < row["iteration_s"]
    assert row["generation_alone_s"] > 0 and row["training_alone_s"] > 0 and row["cycles"] == 3


@pytest.mark.parametrize("run", refit_runs(2, small=True), ids=lambda run: run.name)
def test_engines_have_the_trainer_s_weights_after_a_refit(run: RefitRun) -> None:
    for times in launch(refit_times, 2, device="cpu", scale=TWO, run=run, timeout_s=120.0):
        assert len(times) == 4 and min(times) > 0


@pytest.mark.journey
def test_a_killed_engine_takes_its_own_streams_only() -> None:
    [row] = killed_engine(TWO)
    # Those of which nothing had come go to the other one.
    assert row["problems"] == [] and row["streams_lost_by_its_name"] <= row["streams"] // 2 and row["open_at_the_killed_one"] > 0
    assert row["noticed_s"] < 10 and row["afterwards"] > 0


def test_a_rank_without_a_request_has_no_steps() -> None:
    row = run_case(build("tiny", "cpu", 0.05)[0], 0, 4, 2)
    assert (row["n"], row["steps"], row["graph_share"], row["out_tok_s"]) == (0, 0, 0.0, 0)


def results(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str, ranks: int = 2) -> dict[str, Any]:
    """The file that the command writes."""
    output = folder / "many.json"
    command = ["many", "--gpus", str(ranks), "--small", "--steps", "1", *arguments, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    main()
    return json.loads(output.read_text())


def test_a_missing_peer_is_named_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    talkative = "talkative=printf '{started}\\n{\"ms\": 2.5}\\n'"
    written = results(monkeypatch, tmp_path, "--parts", "exchange", "--peer", "absent=no-such-command --ep 2", "--peer", talkative)
    assert {"command", "machine", "versions"} <= set(written)
    absent, present, exchange = written["rows"]
    assert present == {"part": "peer", "by": "talkative", "ms": 2.5}
    assert absent["by"] == "absent" and "no-such-command" in absent["error"]
    assert exchange["part"] == "exchange" and exchange["ms"] > 0 and exchange["ratio"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_experts_over_four_ranks_over_halves_and_skewed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ("ep4", "ep4, skewed", "ep4, balanced", "ep2 edp2")
    rows = results(monkeypatch, tmp_path, "--parts", "experts", "--runs", *runs, ranks=4)["rows"]
    assert tuple(row["run"] for row in rows) == runs
    even, skewed, balanced, halves = rows
    assert skewed["busiest_expert"] > 3 > max(even["busiest_expert"], halves["busiest_expert"]) >= 1
    # Of its four experts two are hot: of 16 picks the first rank has 2 * 4 and 2 * 4 / 7.
    assert skewed["busiest_rank"] == pytest.approx(16 / 7, rel=0.15)
    assert 1 <= balanced["busiest_rank"] < 1.4 and balanced["busiest_expert"] < 2
    assert all(row["tokens_per_s_per_gpu"] > 0 and 5 < row["loss"] < 8 for row in rows)
    with pytest.raises(SystemExit):
        results(monkeypatch, tmp_path, "--runs", "ep4")
    assert "--runs 'ep4': must be of 'ep2', 'ep2, skewed', 'ep2, balanced', 'ep1 etp2', 'ep1 pp2'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_command_runs_on_two_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = results(monkeypatch, tmp_path)["rows"]
    runs = [row["run"] for row in rows if row["part"] == "experts"]
    assert runs == ["ep2", "ep2, skewed", "ep2, balanced", "ep1 etp2", "ep1 pp2"]
    assert {row["part"] for row in rows} == {"experts", "exchange", "serving", "refit", "rl", "turns", "killed"}
    # One request is too few for an engine a rank; of engines that share experts one has none.
    served = [(row["run"], row["requests"]) for row in rows if row["part"] == "serving"]
    assert served == [("tp2", 8), ("tp2", 1), ("dp2", 8), ("ep2", 8), ("ep2", 1)]
    assert [row["run"] for row in rows if row["part"] == "refit"] == ["fsdp2 to tp2", "fsdp2 to dp2", "ep2 to ep2", "ep2 to tp2"]
