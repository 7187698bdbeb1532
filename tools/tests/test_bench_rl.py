# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The bench of reinforcement learning on one device runs on the CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_rl import refit
from tools.bench._peers import peers
from tools.bench.rl import ARITHMETICS, SHARED, SIZES, Clock, agreement, build, build_learner, main, shared_prompts, turns


def test_a_shared_prompt_trains_as_one_with_each_answer_in_fewer_places() -> None:
    device = torch.device("cpu")
    row = shared_prompts(build_learner("tiny", device, narrow=False), SHARED["tiny"], Clock(device))
    apart, shared = row["with_each_answer"], row["shared"]
    assert shared["trained_tokens"] == apart["trained_tokens"] == 2 * 4 * 4
    assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)
    assert shared["mean_logprob"] == pytest.approx(apart["mean_logprob"], rel=1e-5)
    assert (shared["places"], apart["places"]) == (80, 160) and row["times_as_fast"] > 0


def test_turns_of_trainer_and_engine_leave_no_tensor_behind() -> None:
    device = torch.device("cpu")
    learner, engine = build("tiny", SIZES["tiny"], device, narrow=False)
    refit(learner.model, learner.groups, engine)
    # Whoever holds one: it has no bytes of its own.
    sparse = torch.eye(2).to_sparse()
    row = turns(learner, engine, Clock(device), cycles=6)
    least, most = row["tensor_bytes"]
    assert sparse.is_sparse and least == most > 1e6 and row["cycles"] == 6 and 0 < row["peak_gib"][0] <= row["peak_gib"][1]


@pytest.mark.journey
def test_the_arithmetics_of_trainer_and_engine_are_compared() -> None:
    device = torch.device("cpu")
    plain, exact, wide = agreement("tiny", list(ARITHMETICS), SIZES["tiny"], device, Clock(device))
    assert [row["arithmetic"] for row in (plain, exact, wide)] == ["plain", "batch-invariant", "float32"]
    assert exact["logprob_mismatch"] == 0 < wide["logprob_mismatch"] < 1e-6
    assert plain["cost"] == 1 and exact["cost"] == pytest.approx(exact["whole_s"] / plain["whole_s"], rel=0.01)


def test_an_arithmetic_that_has_no_room_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(learner: Any, *_: object, **__: object) -> dict[str, float]:
        if len(made) == 2:
            raise torch.OutOfMemoryError("no room")
        made.append(learner)
        return {"whole_s": 2.0 * len(made)}

    made: list[Any] = []
    monkeypatch.setattr("tools.bench.rl.step_beside_peers", step)
    device = torch.device("cpu")
    plain, exact, wide = agreement("tiny", list(ARITHMETICS), SIZES["tiny"], device, Clock(device))
    assert (plain["cost"], exact["cost"]) == (1, 2) and wide == {"arithmetic": "float32", "error": "OutOfMemoryError: no room"}


def test_a_step_stands_beside_its_peer_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    output = tmp_path / "rl.json"
    command = ["rl", "--model", "tiny", "--size", "tiny", "--device", "cpu", "--peer", "echo=echo '{\"whole_s\": 2.5}'"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    main()
    peer, ours = json.loads(output.read_text())["rows"]
    assert peer == {"part": "peer", "by": "echo", "whole_s": 2.5}
    assert ours["generated"] == 2 * 4 * 16 and ours["whole_s"] > 0 and ours["num_dropped"] == 0 and 0 < ours["reward"] < 1


@pytest.mark.journey
def test_what_a_peer_printed_before_its_time_was_over_is_kept() -> None:
    kept, failure = peers(['slow=bash -c \'echo "{\\"step\\": 1}"; exec sleep 60\''], timeout_s=2.0)
    assert kept == {"part": "peer", "by": "slow", "step": 1}
    assert failure["by"] == "slow" and "did not end within 2 s" in failure["error"]
