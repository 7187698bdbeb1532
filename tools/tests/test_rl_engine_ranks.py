# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl`` whose engines span ranks (``rl.engine_tp``): the numbers of engines of one rank, losses, and how a run goes on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CheckpointManager
from mcore_ckpt.manifest import read_manifest
from mcore_inference import DynamicInferenceEngine, EngineDeadError
from mcore_parallel.training import STOPPED_EXIT_CODE
from mcore_tools import reinforce
from mcore_tools.rl._engines import step_may_hang
from tests.support.commands import run_ranks
from tests.support.countdown import PACE, QUIET, SIZES, countdown_words, num_taken, rows

pytestmark = pytest.mark.timeout(300)
PATIENCE_S = 120.0
"""With ranks that begin at once on few cores."""
# Any text earns something, without imitation.
TINY = (
    *(*SIZES, *PACE, *QUIET, "train.steps=3", "train.eval_interval=3", "rl.eval_samples=2", "rl.generation_args.max_tokens=6"),
    *("rl.environment=character_share", "rl.imitation_steps=0", "data.tokenizer=byte", "train.dtype=float64"),
)
SPLIT = ("rl.engine_tp=2", "plan.dp=2")
NUMBERS = ("step", "reward", "reward_std", "answer_length", "loss", "grad_norm", "kl", "num_rollouts")


def words(output: Path, *changes: str) -> list[str]:
    return countdown_words(*TINY, f"output={output}", *changes)


def assert_same(whole: list[dict[str, Any]], split: list[dict[str, Any]]) -> None:
    for one, other in zip(whole, split, strict=True):
        names = [*NUMBERS, *(name for name in one if name.startswith("eval/"))]
        assert [other[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-6, abs=1e-9)
        assert 0 <= other["logprob_mismatch"] < 1e-5


@pytest.mark.journey
def test_ranks_under_torchrun_that_share_an_engine_learn_what_one_rank_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reinforce.main(words(tmp_path / "whole")) == 0
    monkeypatch.chdir(tmp_path)
    ranks = run_ranks(reinforce.main, words(tmp_path / "split", *SPLIT), 2, timeout_s=PATIENCE_S)
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    whole, split = rows(tmp_path / "whole"), rows(tmp_path / "split")
    assert_same(whole, split)
    assert len({row["loss"] for row in split}) == 3 and "eval/pass@2" in split[-1]
    # Of one engine, as of one rank.
    assert num_taken(tmp_path / "split", 3) == num_taken(tmp_path / "whole", 3) == [6]


def codes(output: Path, num_ranks: int, *changes: str) -> list[int]:
    return [code for code, _, _ in run_ranks(reinforce.main, words(output, *changes), num_ranks, timeout_s=PATIENCE_S)]


@pytest.mark.journey
def test_a_run_of_two_engines_stops_and_goes_on_where_each_of_them_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output, changes = tmp_path / "run", ("plan.tp=4", "rl.engine_tp=2", "model.num_attention_heads=4", "model.num_query_groups=4")
    assert codes(output, 4, *changes, "train.stop_after_minutes=1e-9") == [STOPPED_EXIT_CODE] * 4 and num_taken(output, 1) == [1, 1]
    assert codes(output, 4, *changes) == [0] * 4 and num_taken(output, 3) == [3, 3]
    # One engine goes on where the two were.
    assert codes(output, 4, *changes, "rl.engine_tp=4", "train.steps=4", "train.eval_interval=4") == [0] * 4
    assert read_manifest(CheckpointManager(output / "checkpoints").folder(4)).extra["rl"]["problems"] == {
        "first": 6, "left": [], "num_taken": [2]
    }  # fmt: skip
    assert [row["step"] for row in rows(output)] == [1, 2, 3, 4] and all(row["logprob_mismatch"] < 1e-5 for row in rows(output))


MIXTURE = ("moe.num_moe_experts=4", "moe.moe_router_topk=2", "moe.moe_ffn_hidden_size=32")


@pytest.mark.journey
def test_a_mixture_replays_the_routing_of_an_engine_of_two_ranks_without_a_cache_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = ("rl.memory.suspend_engine=true", "rl.memory.offload_optimizer=true", "rl.memory.release_gradients=true")
    changes = (*MIXTURE, *memory, "rl.router_replay=true", "train.steps=2", "train.eval_interval=2")
    assert reinforce.main(words(tmp_path / "whole", *changes)) == 0
    monkeypatch.chdir(tmp_path)
    assert codes(tmp_path / "split", 2, *changes, *SPLIT, "plan.ep=2") == [0, 0]
    assert_same(rows(tmp_path / "whole"), rows(tmp_path / "split"))


@pytest.mark.parametrize("kind", [pytest.param("fsdp", marks=pytest.mark.slow), "fsdp2"])
def test_an_engine_of_two_ranks_takes_the_weights_of_a_sharded_policy(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert codes(tmp_path / "run", 2, *SPLIT, f"data_parallel={kind}", "train.dtype=float32", "train.steps=2") == [0, 0]
    steps = rows(tmp_path / "run")
    assert len({row["loss"] for row in steps}) == 2 and all(row["logprob_mismatch"] < 1e-5 and row["grad_norm"] > 0 for row in steps)


def lose_the_second_rank(arguments: list[str]) -> int:
    """The command, whose second rank is killed in the second iteration's draws."""
    step = DynamicInferenceEngine.step

    def dying(engine: DynamicInferenceEngine) -> Any:
        if os.environ["RANK"] == "1" and engine.weight_version == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine)

    DynamicInferenceEngine.step = dying  # type: ignore[method-assign]
    return reinforce.main(arguments)


@pytest.mark.journey
def test_a_lost_rank_of_an_engine_is_named_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = words(tmp_path / "run", *SPLIT, "train.checkpoint_interval=1")
    (code, _, errors), (lost, _, _) = run_ranks(lose_the_second_rank, arguments, 2, timeout_s=PATIENCE_S)
    print(errors)
    assert code not in (0, -signal.SIGKILL) and lost == -signal.SIGKILL and "tp rank 1 is gone" in errors, errors
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert codes(tmp_path / "run", 2, *SPLIT, "train.checkpoint_interval=1") == [0, 0]
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3] and num_taken(tmp_path / "run", 3) == [6]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("rl.engine_tp=0", "engine_tp=0 must be at least 1"),
        ("rl.engine_tp=2", "rl.engine_tp=2 must divide the 1 ranks of plan"),
        ("rl.engine_tp=4 plan.tp=2 plan.dp=2", "rl.engine_tp=4: tp=4 must divide num_attention_heads=2"),
        ("rl.engine_tp=2 plan.dp=2 batch_invariant=true", "rl.engine_tp=2: batch_invariant=true is served on one rank"),
        ("rl.engine_tp=2 rl.placement.num_engines=1", "engine_tp=2 divides engines on the ranks that train, of which placement has none"),
        (
            "rl.engine_tp=2 rl.served.urls=[http://127.0.0.1:1]",
            "engine_tp=2 divides engines on the ranks that train, of which served has none",
        ),
        (
            "rl.engine_tp=2 rl.dpo.path=FILE rl.kl_beta=0 rl.eval_samples=0",
            "engine_tp=2 divides engines on the ranks that train, of which dpo.path has none",
        ),
    ],
)
def test_what_engines_cannot_span_is_one_line(change: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reinforce.main(words(tmp_path / "run", *change.split())) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and reason in message
    assert not (tmp_path / "run").exists()


def test_an_engine_in_a_step_that_may_hang_is_left_alone() -> None:
    # One that follows another rank is in a step when Ctrl-C comes.
    assert all(map(step_may_hang, (KeyboardInterrupt(), SystemExit(1), EngineDeadError("lost"), TimeoutError())))
    assert not any(map(step_may_hang, (None, ValueError("wrong"))))
