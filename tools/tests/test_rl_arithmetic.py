# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl --recipe arithmetic_tiny``: it is evaluated before its first iteration, and rewards teach it to work sums out."""

from pathlib import Path

import pytest

from mcore_rl import GRPOConfig
from mcore_tools import reinforce
from mcore_tools.recipes import recipe
from mcore_tools.rl import build_environment
from tests.support.countdown import PACE, QUIET, SIZES, rows
from tools.bench import rl_curve

FAST = (*SIZES, *PACE, *QUIET, "train.steps=2", "train.eval_interval=2", "rl.imitation_steps=3", "rl.max_requests=3")


def words(*changes: str) -> list[str]:
    return ["--recipe", "arithmetic_tiny", *(word for change in changes for word in ("--set", change))]


def test_step_0_is_the_evaluation_before_the_first_iteration(tmp_path: Path) -> None:
    # Weights that rewards do not change are evaluated twice with the same result.
    fixed = ("optimizer.lr=0", "optimizer.min_lr=0", f"output={tmp_path}/run")
    assert reinforce.main(words(*FAST, *fixed)) == 0
    before, first, last = rows(tmp_path / "run")
    assert (before["step"], first["step"], last["step"]) == (0, 1, 2)
    assert before["imitation_loss"] > 0 and before["imitation_s"] > 0 and "reward" not in before
    assert "eval/pass@1" not in first and 0 <= before["eval/pass@1"] <= before["eval/pass@4"] <= 1
    assert before["eval/reward"] == last["eval/reward"] and before["eval/right"] == last["eval/right"]
    assert last["num_rollouts"] == 8 and last["logprob_mismatch"] < 1e-5
    # What goes on does not begin again.
    assert reinforce.main(words(*FAST, *fixed, "train.steps=3")) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("rl.imitation_lr_schedule=linear", "imitation_lr_schedule='linear' must be constant or cosine"),
        ("rl.max_requests=0", "max_requests=0 must be at least 1"),
        ("rl.arithmetic.num_numbers=[1,3]", "num_numbers=[1, 3] must rise from at least 2"),
    ],
)
def test_what_cannot_run_is_refused_by_name(change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reinforce.main(words(*FAST, f"output={tmp_path}/run", change)) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["arithmetic_tiny", "arithmetic_100m"])
def test_rows_hold_the_longest_problem_with_its_answer(name: str) -> None:
    config = recipe(name)
    assert config.rl is not None and isinstance(
        config.rl.grpo(seq_len=config.train.seq_len, micro_batch_size=64, global_batch_size=64), GRPOConfig
    )
    environment = build_environment(config.rl)
    lengths = [len(environment.problem(number).prompt) for number in range(500)]
    assert max(lengths) + (config.rl.generation_args.max_tokens or 0) <= config.train.seq_len


def test_a_curve_says_how_far_it_rose() -> None:
    lines = [
        {"step": 0, "imitation_s": 2.0, "imitation_loss": 0.5, "eval/right": 0.25, "eval/pass@1": 0.5},
        {"step": 1, "reward": 0.5, "logprob_mismatch": 1e-4, "step_s": 1.5},
        {"step": 2, "reward": 0.75, "logprob_mismatch": 2e-4, "step_s": 1.0, "eval/right": 0.75, "eval/pass@1": 0.875},
    ]
    result = rl_curve.curve(lines)
    assert result["greedy"] == {"before": 0.25, "after": 0.75, "margin": 0.5} and result["sampled"]["margin"] == 0.375
    assert result["max_logprob_mismatch"] == 2e-4 and [row["iterations_s"] for row in result["rows"]] == [0.0, 1.5, 2.5]
    assert result["rows"][1] == {"step": 1, "iterations_s": 1.5, "reward": 0.5, "logprob_mismatch": 1e-4}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 7])
def test_rewards_raise_pass_at_1_on_problems_whose_numbers_were_never_trained_on(seed: int) -> None:
    result = rl_curve.learn("arithmetic_tiny", [], seed)
    assert result["greedy"]["margin"] > 0.05 and result["sampled"]["margin"] > 0.15
    assert result["max_logprob_mismatch"] < 1e-5
