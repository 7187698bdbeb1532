# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl`` whose trainer and engines have ranks of their own: the same numbers by turns, a bound on their lag, and runs that go on."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointManager
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_tools import reinforce
from mcore_tools.launch import launch
from mcore_tools.recipes import override, recipe
from mcore_tools.rl import _run, reinforce_rank
from mcore_tools.rl._engines import watched
from mcore_tools.rl._evaluation import evaluation_names
from mcore_tools.rl._halves import Halves
from tests.support.commands import run_ranks
from tests.support.countdown import PACE, QUIET, SIZES, countdown_words, num_taken, rows

TINY = (*SIZES, *PACE, *QUIET, "train.steps=3", "rl.imitation_steps=2", "train.eval_interval=3", "rl.generation_args.max_tokens=6")
APART = ("rl.placement.num_engines=1", "rl.placement.timeout_s=30", "rl.rollout_timeout_s=27")


def words(output: Path, *changes: str) -> list[str]:
    return countdown_words(*TINY, f"output={output}", *changes)


def assert_same(beside: list[dict[str, Any]], apart: list[dict[str, Any]], names: tuple[str, ...]) -> None:
    """Which requests share a step of the engine is a matter of time, and so is the last bit of their log-probabilities."""
    for one, other in zip(beside, apart, strict=True):
        assert [other[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-4, abs=1e-7)


@pytest.mark.journey
def test_by_turns_halves_under_torchrun_learn_what_one_rank_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reinforce.main(words(tmp_path / "beside")) == 0
    monkeypatch.chdir(tmp_path)
    ranks = run_ranks(reinforce.main, words(tmp_path / "apart", *APART, "rl.placement.max_lag=0"), 2)
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    beside, apart = rows(tmp_path / "beside"), rows(tmp_path / "apart")
    names = ("step", "reward", "reward_std", "answer_length", "loss", "grad_norm", "kl")
    assert_same(beside, apart, names)
    assert all(0 <= row["logprob_mismatch"] < 1e-5 for row in (*beside, *apart))
    assert [row["lag"] for row in apart] == [0, 0, 0] and len({row["loss"] for row in apart}) == 3
    evaluated = {name: value for name, value in beside[-1].items() if name.startswith("eval/")}
    assert evaluated and [apart[-1][name] for name in evaluated] == pytest.approx([*evaluated.values()], rel=1e-4)
    assert sum(num_taken(tmp_path / "apart", 3)) == sum(num_taken(tmp_path / "beside", 3)) == 6


def test_guard_waits_for_answers_as_long_as_they_may_take() -> None:
    beside = recipe("countdown_tiny")
    apart = override(beside, ["plan.dp=1", "rl.placement.num_engines=1", "rl.placement.timeout_s=700"])
    # An evaluation that draws has its limit twice: for the most likely answers, and for those that it draws.
    samples = [override(config, ["rl.eval_samples=2", "train.eval_interval=1"]) for config in (beside, apart)]
    for config, wait_s in ((beside, 900.0), (apart, 1000.0), (samples[0], 1500.0), (samples[1], 1600.0)):
        told: dict[str, Any] = {}
        watchdog: Any = SimpleNamespace(watch=lambda numbers, told=told, **options: told.update(options, numbers=numbers) or numbers)
        assert watched(config, range(4, 7), watchdog) == watched(config, range(4, 7), None) == range(4, 7)
        assert told == {"numbers": range(4, 7), "start": 4, "wait_s": wait_s}


def evaluate_apart() -> dict[str, float]:
    """The first rank has its answers once the other one, which has its own, is seen to wait for it outside of a collective."""
    config = override(recipe("countdown_tiny"), ["plan.dp=2", "train.micro_batch_size=32", "rl.eval_samples=2", "train.eval_interval=1"])
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    assert groups.world.pg is not None
    store, is_first = groups.world.pg.get_group_store(), groups.world.is_first

    def share(*_: Any) -> list[list[float]]:
        deadline = time.monotonic() + 30
        while is_first and not store.add("mcore_rl rendezvous/1", 0):
            assert time.monotonic() < deadline, "the other rank is in a collective"
            time.sleep(0.01)
        return [[1.0, 2.0] for _ in evaluation_names(config, ["countdown"])]

    _run.evaluation_share = share
    nothing: Any = None
    environment = SimpleNamespace(env_ids=["countdown"])
    run: Any = SimpleNamespace(
        config=config, rl=config.rl, halves=None, pairs=None, environment=environment, evaluator=environment, engine=nothing,
        engines=groups.world, device=torch.device("cpu"), parts=SimpleNamespace(groups=groups),
        _takes_turns={"optimizer": nothing, "sync": nothing, "engine": nothing},
    )  # fmt: skip
    return _run._Run.evaluate(run)


@pytest.mark.world(2)
def test_ranks_wait_for_answers_of_an_evaluation_outside_of_a_collective(world) -> None:
    first, second = world(evaluate_apart)
    assert first == second and first["eval/reward"] == 0.5


class WaitingPlacement(SimpleNamespace):
    """A placement that notes how long it waits for an evaluation."""

    def gather(self, value: Any, timeout_s: float, purpose: str) -> list[Any]:
        self.waited_s = timeout_s
        return [None, value]


@pytest.mark.parametrize(("samples", "waited_s"), [(0, 700.0), (2, 1300.0)])
def test_trainers_wait_for_both_parts_of_an_evaluation(samples: int, waited_s: float) -> None:
    changes = ["rl.placement.num_engines=1", "rl.placement.timeout_s=700", f"rl.eval_samples={samples}", "train.eval_interval=1"]
    config = override(recipe("countdown_tiny"), changes)
    assert config.rl is not None
    placement = WaitingPlacement(num_trainers=1)
    halves: Any = SimpleNamespace(config=config, settings=config.rl.placement, placement=placement)
    Halves.evaluated(halves, ["countdown"], [[1.0, 2.0] for _ in evaluation_names(config, ["countdown"])])
    assert placement.waited_s == waited_s


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs a machine of one GPU")
@pytest.mark.parametrize("max_lag", [0, 1])
def test_trainer_and_engine_share_one_gpu(max_lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = run_ranks(reinforce.main, words(tmp_path / "run", *APART, f"rl.placement.max_lag={max_lag}", "rl.cache_gb=0.1"), 2)
    assert [code for code, _, _ in ranks] == [0, 0], ranks
    assert [row["lag"] for row in rows(tmp_path / "run")] == [0, max_lag, max_lag]
    # Without a word of memory that could not be mapped.
    assert not any("cannot be mapped" in errors for *_, errors in ranks)


@pytest.mark.journey
@pytest.mark.parametrize("layout", [pytest.param("plan.tp=2", marks=pytest.mark.slow), "plan.dp=2"])
def test_one_step_off_a_run_stops_and_goes_on_without_losing_problems(layout: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    changes = [*TINY, *APART, layout, "train.stop_after_minutes=1e-9", f"output={output}", "rl.eval_samples=2", "train.eval_interval=2"]
    config = reinforce.prepared(override(recipe("countdown_tiny"), changes), rank=0)
    assert [done.stopped_at for done in launch(reinforce_rank, 3, config=config, kind="cpu")] == [1, 1, 1]
    # The engine has drawn the next problems, which were not trained on.
    assert sum(num_taken(output, 1)) == 2
    reports = launch(reinforce_rank, 3, config=override(config, ["train.stop_after_minutes=0"]), kind="cpu")
    assert len({report.reward for report in reports}) == 1 and all(report.stopped_at is None for report in reports)
    assert [(row["step"], row["lag"]) for row in rows(output)] == [(1, 0), (2, 0), (3, 1)]
    assert "eval/pass@2" in rows(output)[1] and sum(num_taken(output, 3)) == 6


# Any text earns something there, without imitation.
SHARE = ("rl.environment=character_share", "rl.imitation_steps=0", "data.tokenizer=byte", "rl.kl_beta=0", "train.eval_interval=0")
KINDS = {
    "ppo": (("load.path=OTHER/checkpoints", "rl.gae.lam=0.95", "rl.critic.warmup_steps=1"), ("critic/loss", "critic/value")),
    "dpo": (("rl.dpo.beta=0.1",), ("loss", "margin", "chosen_reward")),
    "teacher": (("rl.teacher=OTHER",), ("loss", "logits_distillation_loss")),
}


@pytest.mark.journey
@pytest.mark.parametrize("kind", KINDS)
def test_by_turns_other_learners_learn_what_one_rank_learns(kind: str, tmp_path: Path) -> None:
    changes, names = KINDS[kind]
    changes = (*SHARE, "train.steps=2", "rl.eval_on_start=true", *(change.replace("OTHER", str(tmp_path / "other")) for change in changes))
    if "OTHER" in str(KINDS[kind]):
        assert reinforce.main(words(tmp_path / "other", *SHARE, "train.steps=1", "train.seed=7")) == 0
    assert reinforce.main(words(tmp_path / "beside", *changes)) == 0
    config = override(recipe("countdown_tiny"), [*TINY, *changes, *APART, "rl.placement.max_lag=0", f"output={tmp_path / 'apart'}"])
    assert [done.stopped_at for done in launch(reinforce_rank, 2, config=config, kind="cpu")] == [None, None]
    (start, *beside), (apart_start, *apart) = rows(tmp_path / "beside"), rows(tmp_path / "apart")
    # Of the policy's weights; those of another run differ from those that the engine is made with.
    assert start["step"] == 0 and start["eval/reward"] > 0 and apart_start == start
    names = ("step", "reward", "num_rollouts", *names)
    assert_same(beside, apart, names)
    assert apart[0][names[-1]] != apart[1][names[-1]]
    if kind == "ppo":
        # The critic alone learns at first; its checkpoints are those of the trainer.
        assert "loss" not in apart[0] and apart[1]["loss"] == pytest.approx(beside[1]["loss"], rel=1e-4, abs=1e-7)
        assert CheckpointManager(tmp_path / "apart" / "critic").latest() == 2


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fsdp", "fsdp rl.gae.lam=0.95")), "fsdp2"])
def test_fully_sharded_trainers_learn_from_an_engine_elsewhere(kind: str, tmp_path: Path) -> None:
    changes = [*TINY, *SHARE, *APART, "plan.dp=2", *f"data_parallel={kind}".split(), f"output={tmp_path / 'run'}"]
    config = override(recipe("countdown_tiny"), changes)
    assert [result.stopped_at for result in launch(reinforce_rank, 3, config=config, kind="cpu")] == [None] * 3
    steps = rows(tmp_path / "run")
    # The engine draws from the weights that the shards make up: one step off, it has those of the step before.
    assert steps[0]["logprob_mismatch"] < 1e-4 and steps[0]["grad_norm"] > 0
    assert [row["lag"] for row in steps] == [0, 1, 1] and len({row["loss"] for row in steps}) == 3
    for row in steps:
        shares = {int(name.removeprefix("token_lag/")): value for name, value in row.items() if name.startswith("token_lag/")}
        assert 0 <= row["token_lag"] <= 1 and sum(shares.values()) == pytest.approx(1.0)
        assert row["token_lag"] == pytest.approx(sum(lag * share for lag, share in shares.items()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("rl.placement.num_engines=1", "1 ranks of plan and rl.placement.num_engines=1 are 2, but the world has 1; start 2 with torchrun"),
        ("rl.placement.num_engines=0", "placement.num_engines=0 must be at least 1"),
        ("rl.placement.num_engines=1 rl.placement.timeout_s=inf", "placement.timeout_s=inf a finite number above 0"),
        ("rl.placement.num_engines=3", "num_groups=2 must be at least placement.num_engines=3"),
        ("rl.placement.num_engines=1 rl.placement.timeout_s=600", "placement.timeout_s=600 must be above rollout_timeout_s=600"),
        ("rl.placement.num_engines=1 rl.memory.suspend_engine=true", "memory needs no engines of their own ranks"),
        ("rl.placement.num_engines=1 rl.dpo.path=FILE rl.imitation_steps=0 rl.kl_beta=0", "dpo.path needs no engines of their own ranks"),
    ],
)
def test_what_halves_cannot_do_is_one_line(change: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reinforce.main(words(tmp_path / "run", *change.split())) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and reason in message
    assert not (tmp_path / "run").exists()
