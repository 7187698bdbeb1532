# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl``: iterations leave files and numbers, a run goes on, and what cannot run is one line."""

import asyncio
import dataclasses
import html
import json
import math
import multiprocessing
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mcore_ckpt import CheckpointManager, find_mismatches, load
from mcore_ckpt.hf import import_hf
from mcore_ckpt.manifest import read_manifest
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel
from mcore_parallel.graphs import CudaGraphConfig
from mcore_parallel.pipeline import zero_bubble
from mcore_parallel.training import STOPPED_EXIT_CODE, train_step
from mcore_rl import InferenceInterface, InferenceRequest, InferenceResponse, LostError, StreamPosition
from mcore_rl._loop import _update
from mcore_tools import reinforce
from mcore_tools.launch import launch
from mcore_tools.recipes import RLConfig, RunConfig, override, read_config, recipe, write_config
from mcore_tools.rl import CRITIC, REFERENCE, _imitation, best_attempt, build_environment, post_train_rank, reinforce_rank
from mcore_tools.rl._attempts import attempt_seed, begin_attempt
from mcore_tools.rl._critic import RunCritic
from mcore_tools.rl._evaluation import evaluation_means, evaluation_sums
from mcore_tools.rl._imitation import imitate
from mcore_tools.rl._policy import assemble_policy
from mcore_tools.rl._run import stored_position
from mcore_tools.serving import open_engine
from mcore_tools.training import export_run
from tests.support.countdown import PACE, QUIET, SIZES, countdown_words, num_taken, rows
from tests.support.published import write_published
from tests.support.tape_capture import TapeCapture

PROMPT = "rl.countdown.prompt={numbers}={target}:<answer>"
MIXTURE = "moe.num_moe_experts=4 moe.moe_router_topk=2"
FAST = (*SIZES, *PACE, *QUIET, "train.steps=2", "rl.imitation_steps=2", "train.eval_interval=2", "rl.generation_args.max_tokens=6")


def run(output: Path, *changes: str) -> int:
    return reinforce.main(countdown_words(*FAST, f"output={output}", *changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("rl") / "run"
    assert run(output, "rl.kl_beta=0.01", "rl.num_epochs=2", "log.tensorboard=true", "log.html=true") == 0
    return output


def test_iterations_leave_files_and_numbers(trained: Path) -> None:
    first, second = rows(trained)
    assert (first["step"], second["step"]) == (1, 2)
    for row in (first, second):
        assert 0 <= row["reward"] <= 1 and row["num_rollouts"] == 8 and row["num_dropped"] == 0
        # The trainer's distribution is the engine's: rows of padding are in neither.
        assert row["logprob_mismatch"] < 1e-3
        assert row["rollout_s"] > 0 and row["train_s"] > 0 and row["answer_length"] <= 6
    assert "eval/reward" in second and "eval/reward" not in first
    assert {"config.yaml", "report.html", "tensorboard", "tokenizer", "checkpoints", REFERENCE} <= {path.name for path in trained.iterdir()}
    for row in (first, second):
        assert 0 <= row["group_similarity"] <= 1 and 0 <= row["truncated"] <= 1 and row["answer_length"] <= row["answer_length_max"] <= 6
        assert row["answer_length_min"] <= row["answer_length"] and row["answer_length_std"] >= 0 and row["num_turns"] == 1
        # Of weights that are all 1, but for the last bits.
        assert row["effective_sample_size"] == pytest.approx(1.0, abs=1e-3) and 0 <= row["mismatch_k3"] < 1e-4
        # Each part of an iteration is there, and the shares of the lengths are whole.
        parts = sum(row[f"{name}_s"] for name in ("to_generation", "generate", "to_training", "exchange"))
        assert parts == pytest.approx(row["rollout_s"]) and 0 < row["pack_s"] + row["score_s"] < row["train_s"]
        assert sum(value for name, value in row.items() if name.startswith("length/")) == pytest.approx(1)
    page = (trained / "report.html").read_text()
    assert all(title in page for title in ("Reward", "Timeline of the newest iterations", "Lengths of answers", "Seconds of an iteration"))
    examples = [json.loads(line) for line in (trained / "examples.jsonl").read_text().splitlines()]
    assert [example["step"] for example in examples] == [1, 1, 2, 2]
    assert all(example["env_id"] == "countdown" and example["prompt"].endswith("<answer>") for example in examples)
    assert all(best["reward"] >= worst["reward"] for best, worst in zip(examples[::2], examples[1::2], strict=True))
    assert "Best and worst answers to a problem" in page and html.escape(examples[-1]["prompt"]) in page
    assert read_config(trained / "config.yaml").rl == override(recipe("countdown_tiny"), [*FAST, "rl.kl_beta=0.01", "rl.num_epochs=2"]).rl


def test_the_checkpoint_serves_and_says_what_it_is(trained: Path) -> None:
    engine = open_engine(trained, "cpu", cache_gb=0.01)
    assert engine.generate(["3 4=7:<answer>"])
    manager = CheckpointManager(trained / "checkpoints")
    extra = read_manifest(manager.folder(2)).extra
    assert num_taken(trained, 2) == [4] and extra["trainer"]["step"] == 2
    # Two updates of imitation, and two mini-batches twice in each of two iterations.
    assert extra["optimizer_step"] == 2 + 2 * 2 * 2


def test_rows_that_tp_pads_are_in_neither_distribution(trained: Path) -> None:
    config = override(read_config(trained / "config.yaml"), ["train.seq_len=48", "plan.tp=2", f"output={trained}"])
    assert open_engine(trained, "cpu", cache_gb=0.01).tokenizer.vocab_size < config.model.vocab_size
    reports = launch(post_train_rank, 2, config=config, kind="cpu", prompts=("3 4=7:", "2 5="), wanted="+-*", iterations=1, lr=1e-3)
    for [report] in reports:
        assert report.num_rollouts == 64 and report.train.metrics["logprob_mismatch"] < 1e-5
        assert report.train.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)


def test_a_run_goes_on_at_its_next_iteration(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run"
    shutil.copytree(trained, output)
    assert run(output, "rl.kl_beta=0.01", "rl.num_epochs=2", "train.steps=3", f"data.tokenizer={output}/base") == 0
    stdout = capsys.readouterr().out
    assert "goes on from step 2" in stdout and "imitation" not in stdout
    assert [row["step"] for row in rows(output)] == [1, 2, 3]
    # The reference is that of the first run, from which the policy has gone away.
    assert rows(output)[2]["kl"] > 1e-9
    references = [CheckpointManager(folder / REFERENCE) for folder in (trained, output)]
    assert [one.latest() for one in references] == [0, 0]
    assert num_taken(output, 3) == [6]
    # At its end there is nothing to do.
    assert run(output, "rl.kl_beta=0.01", "rl.num_epochs=2", "train.steps=3") == 0
    assert "nothing is left to do: all train.steps=3 are made" in capsys.readouterr().out
    assert len(rows(output)) == 3
    shutil.rmtree(output / REFERENCE)
    assert run(output, "rl.kl_beta=0.01", "rl.num_epochs=2", "train.steps=4") == 2
    assert "the run began without a reference" in capsys.readouterr().err


def test_a_run_goes_on_behind_the_problems_that_its_checkpoint_counts() -> None:
    position = StreamPosition(first=4, left=(1,), num_taken=(3, 2))
    assert stored_position({"rl": {"problems": json.loads(json.dumps(dataclasses.asdict(position)))}}) == position
    assert stored_position({"rl": {"position": 12}}) == StreamPosition(first=12)
    assert stored_position({"trainer": {}}) == StreamPosition()


def test_answers_that_ended_a_run_are_not_drawn_again(tmp_path: Path) -> None:
    assert [begin_attempt(tmp_path, step) for step in (0, 0, 0, 3, 3, 0)] == [0, 1, 2, 0, 1, 0]
    (tmp_path / "attempts.json").write_text("{")
    assert begin_attempt(tmp_path, 0) == 0
    places = [(rank, step, attempt) for rank in range(4) for step in range(50) for attempt in range(3)]
    # Whatever the number of engines was when the run began, and is when it goes on.
    seeds = {attempt_seed(7, rank=rank, step=step, attempt=attempt) for rank, step, attempt in places}
    assert len(seeds) == len(places) and [attempt_seed(7, rank=rank, step=0, attempt=0) for rank in range(3)] == [7, 8, 9]


def test_the_best_of_several_attempts_is_imitated() -> None:
    config = recipe("countdown_tiny").rl
    assert config is not None
    environment = build_environment(config)

    def rewards(tries: int) -> list[float]:
        problems, generator = [environment.problem(number) for number in range(200)], random.Random(0)
        answers = [(asyncio.run(best_attempt(environment, problem, generator, tries)), problem) for problem in problems]
        return [asyncio.run(environment.get_reward(answer, problem)) for answer, problem in answers]

    single_attempts, best_of_four = rewards(1), rewards(4)
    assert set(single_attempts) == set(best_of_four) == {0.1, 1.0}
    # An operator of three, and more than one may be right.
    assert 0.3 < sum(single_attempts) / 200 < 0.6 < 0.75 < sum(best_of_four) / 200


def imitate_sliced() -> bool:
    """Whether parameters of a sliced optimizer are on their way when references, critics and engines take them."""
    changes = ("plan.dp=2", "optimizer.use_distributed_optimizer=true", "data.tokenizer=byte", "model.vocab_size=264", "train.seq_len=48")
    config = override(recipe("countdown_tiny"), [*FAST, *changes])
    assert config.rl is not None
    tokenizer, device = ByteTokenizer(), torch.device("cpu")
    parts = assemble_policy(config, tokenizer, device)
    assert isinstance(parts.sync, DistributedDataParallel) and parts.sync._gather.has_hooks
    imitate(config, parts, build_environment(config.rl), tokenizer, device)
    return any(work is not None for work in parts.sync._gather._works)


@pytest.mark.world(2)
def test_nothing_is_on_its_way_behind_imitation(world) -> None:
    assert world(imitate_sliced) == [False, False]


def test_it_begins_with_the_weights_of_another_run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["optimizer.lr=0.0", "optimizer.min_lr=0.0", "train.steps=1", "train.seq_len=48", "rl.countdown.num_numbers=2"]
    words = [
        word for change in (*PACE, *QUIET, *changes, f"output={tmp_path / 'run'}", "rl.cache_gb=0.05", PROMPT) for word in ("--set", change)
    ]
    assert reinforce.main([str(trained), *words, "--set", "rl.generation_args.max_tokens=6"]) == 0
    assert "weights of" in capsys.readouterr().out
    before, after = CheckpointManager(trained / "checkpoints").folder(2), CheckpointManager(tmp_path / "run" / "checkpoints").folder(1)
    names = [name for name in read_manifest(after).tensors if not name.startswith("optimizer.")]
    assert names
    for name in names:
        shape = tuple(read_manifest(after).tensors[name].shape)
        saved, initial = ({name: torch.empty(shape)} for _ in range(2))
        assert not find_mismatches(saved, after).missing
        load(saved, after, strict=False)
        load(initial, before, strict=False)
        assert torch.equal(saved[name], initial[name]), name


def test_programs_of_a_file_are_run(tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"{n}?", "tests": [{"input": "", "output": "1"}]}) for n in range(8)]
    (tmp_path / "code.jsonl").write_text("\n".join(lines))
    places = [f"rl.code.path={tmp_path / 'code.jsonl'}", "rl.code.prompt={question}", "rl.code.num_evaluation=2", "rl.code.time_s=30"]
    assert run(tmp_path / "run", "rl.environment=code", "rl.imitation_steps=0", "train.steps=1", *places) == 0
    [row] = rows(tmp_path / "run")
    assert row["num_rollouts"] == 8 and row["reward"] == 0.0


@pytest.mark.journey
def test_answers_are_judged_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ["train.steps=1", "rl.judges.num_workers=1", "rl.judges.time_s=20"]
    assert run(tmp_path / "run", *changes) == 0
    [row] = rows(tmp_path / "run")
    assert row["num_rollouts"] == 8 and row["num_dropped"] == 0 and 0 <= row["reward"] <= 1
    assert not multiprocessing.active_children()
    assert run(tmp_path / "other", *changes, "rl.judges.start_timeout_s=0.001") == 2
    assert "error: rl.judges: no process for 'countdown' started: not within start_timeout_s=0.001" in capsys.readouterr().err


@pytest.mark.parametrize("environment", ["arithmetic", "character_share", "tests.support.environments:Vowels"])
def test_each_environment_runs_by_its_name(environment: str, tmp_path: Path) -> None:
    tiny = recipe("countdown_tiny")
    assert tiny.rl is not None
    config = RunConfig(model=tiny.model, rl=RLConfig(environment=environment, cache_gb=0.05, generation_args=tiny.rl.generation_args))
    config = override(
        config,
        [*FAST, "rl.imitation_steps=0", "train.steps=1", "train.warmup_steps=0", "train.eval_interval=1", f"output={tmp_path / 'run'}"],
    )
    write_config(config, tmp_path / "run.yaml")
    assert reinforce.main(["--config", str(tmp_path / "run.yaml")]) == 0
    [row] = rows(tmp_path / "run")
    assert row["num_rollouts"] == 8 and "eval/reward" in row


@pytest.mark.journey
def test_several_environments_share_a_run_and_each_has_its_numbers(tmp_path: Path) -> None:
    names = ["rl.mixture=[countdown,arithmetic,character_share]", "rl.mixture_weights=[1,1,0]"]
    changes = ["rl.imitation_steps=0", "train.steps=1", "train.eval_interval=1", "rl.eval_samples=2", "log.html=true"]
    assert run(tmp_path / "run", *names, *changes) == 0
    [row] = rows(tmp_path / "run")
    assert row["env/countdown/num_rollouts"] == row["env/arithmetic/num_rollouts"] == 4 and "env/character_share/reward" not in row
    assert row["reward"] == pytest.approx((row["env/countdown/reward"] + row["env/arithmetic/reward"]) / 2, abs=1e-12)
    each = [row[f"eval/{name}/reward"] for name in ("countdown", "arithmetic", "character_share")]
    assert row["eval/reward"] == pytest.approx(sum(each) / 3) and all(
        f"eval/countdown/{name}" in row for name in ("right", "pass@1", "pass@2")
    )
    assert "Reward by environment" in (tmp_path / "run" / "report.html").read_text()


def test_maths_of_a_file_are_evaluated_with_pass_at_k(tmp_path: Path) -> None:
    (tmp_path / "maths.jsonl").write_text("\n".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(8)))
    places = [f"rl.maths.path={tmp_path / 'maths.jsonl'}", "rl.maths.prompt={question}", "rl.maths.num_evaluation=2"]
    changes = ["rl.environment=maths", "rl.eval_samples=3", "train.steps=1", "train.eval_interval=1", "log.html=true"]
    assert run(tmp_path / "run", *changes, *places) == 0
    [row] = rows(tmp_path / "run")
    assert 0 <= row["eval/pass@1"] <= row["eval/pass@3"] <= 1 and row["eval/num_dropped"] == 0
    assert "pass@3" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize("name", ["maths", "code"])
def test_problems_of_the_wheel_need_no_file(name: str, tmp_path: Path) -> None:
    changes = [f"rl.environment={name}", "rl.imitation_steps=0", "train.seq_len=640", "train.steps=1", "train.eval_interval=1"]
    assert run(tmp_path / "run", *changes) == 0
    [row] = rows(tmp_path / "run")
    assert row["num_rollouts"] == 8 and row["num_dropped"] == row["eval/num_dropped"] == 0


BALANCED_MIXTURE = ("moe.num_moe_experts=4", "moe.moe_ffn_hidden_size=32", "moe.moe_aux_loss_coeff=0.01")
HYBRID = ("model.hybrid_layer_pattern=M*-", "model.num_layers=3", "model.mamba.num_groups=2", "model.mamba.head_dim=16")


@pytest.mark.journey
@pytest.mark.parametrize("changes", [(), BALANCED_MIXTURE, HYBRID], ids=["dense", "mixture", "hybrid"])
def test_trainer_and_engine_of_a_batch_invariant_run_agree_to_the_last_bit(changes: tuple[str, ...], tmp_path: Path) -> None:
    assert run(tmp_path / "run", "batch_invariant=true", "train.steps=1", *changes) == 0
    [row] = rows(tmp_path / "run")
    assert row["logprob_mismatch"] == 0.0 and row["grad_norm"] > 0
    assert row["inference_ratio_min"] == row["inference_ratio"] == row["inference_ratio_max"] == 1.0
    assert row["probability_gap_min"] == row["probability_gap_max"] == 0.0
    assert 0 < row["inference_probability_min"] < row["inference_probability"] < row["inference_probability_max"] <= 1
    assert row["group_reward_min"] <= row["reward"] <= row["group_reward_max"] and 0 <= row["group_reward_std"] <= row["reward_std"]


@pytest.mark.parametrize("change", ["rl.weight_dtype=fp8_weight_only", "rl.weight_dtype=fp8", "rl.kv_cache_dtype=fp8"])
def test_an_engine_of_fewer_bits_draws_and_takes_each_refit(change: str, tmp_path: Path) -> None:
    assert run(tmp_path / "run", change) == 0
    apart = [(row["logprob_mismatch"], row["inference_ratio_min"], row["inference_ratio_max"]) for row in rows(tmp_path / "run")]
    # A second iteration whose engine had kept the weights of before would lie far apart.
    assert len(apart) == 2 and all(1e-4 < gap < 0.2 and 0.5 < low < 1 < high < 2 for gap, low, high in apart)


@pytest.mark.parametrize("steps", [4, pytest.param(200, marks=pytest.mark.slow)])
def test_a_policy_that_does_not_move_does_not_drift_from_its_engine(steps: int, tmp_path: Path) -> None:
    changes = ["optimizer.lr=0", "optimizer.min_lr=0", "train.warmup_steps=0", f"train.steps={steps}", "train.eval_interval=0"]
    assert run(tmp_path / "run", *changes) == 0
    mismatches = [row["logprob_mismatch"] for row in rows(tmp_path / "run")]
    assert len(mismatches) == steps and max(mismatches) < 1e-6
    half = steps // 2
    assert sum(mismatches[half:]) < 1.5 * sum(mismatches[:half]) + 1e-7 * half


def test_a_mixture_replays_the_routing_of_its_engine(tmp_path: Path) -> None:
    assert run(tmp_path / "run", "rl.router_replay=true", "train.steps=1", *MIXTURE.split()) == 0
    [row] = rows(tmp_path / "run")
    assert row["logprob_mismatch"] < 1e-5


def test_a_mixture_replays_the_routing_of_its_own_first_pass(tmp_path: Path) -> None:
    assert run(tmp_path / "run", "rl.router_replay=trainer", "train.steps=1", "rl.num_epochs=2", *MIXTURE.split()) == 0
    [row] = rows(tmp_path / "run")
    assert row["logprob_mismatch"] < 1e-5
    assert read_config(tmp_path / "run" / "config.yaml").rl.router_replay == "trainer"  # type: ignore[union-attr]


def test_ppo_trains_a_mixture_whose_bias_follows_a_schedule(tmp_path: Path) -> None:
    bias = "moe.moe_router_enable_expert_bias=true moe.moe_router_score_function=sigmoid moe.moe_router_bias_decay_steps=4"
    assert run(tmp_path / "run", "train.steps=1", "rl.gae.lam=1", *MIXTURE.split(), *bias.split()) == 0
    [row] = rows(tmp_path / "run")
    assert row["critic/loss"] >= 0


@pytest.mark.parametrize("per_layer", [True, False])
def test_a_mixture_says_how_its_experts_are_loaded(per_layer: bool, tmp_path: Path) -> None:
    changes = ("train.steps=1", *MIXTURE.split(), "moe.moe_aux_loss_coeff=0.01", "moe.moe_router_report_entropy=true")
    assert run(tmp_path / "run", *changes, f"log.per_layer_values={str(per_layer).lower()}") == 0
    [row] = rows(tmp_path / "run")
    assert 1 <= row["aux/load"] <= 2 and 0 <= row["aux/idle_experts"] <= 4 and row["aux/router_entropy"] > 0
    assert row["aux"] == pytest.approx(0.01 * row["aux/load_balancing_loss"])
    assert ("aux/load/layer_0" in row) == per_layer


@pytest.mark.parametrize(
    "changes",
    [
        "rl.imitation_steps=1 rl.gae.lam=1 rl.environment=countdown",
        "rl.dpo.beta=0.1 rl.kl_beta=0 rl.environment=character_share rl.imitation_steps=0",
    ],
)
def test_all_updates_follow_the_schedule_of_the_run(changes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules: list[Any] = []

    def step(*parts: Any, **options: Any) -> Any:
        schedules.append(options.get("pipeline"))
        return train_step(*parts, **options)

    for module in (_update, _imitation):
        monkeypatch.setattr(module, "train_step", step)
    assert run(tmp_path / "run", "pipeline.schedule=zero_bubble", "train.steps=1", *changes.split()) == 0
    assert schedules and all(schedule is zero_bubble for schedule in schedules)


@pytest.mark.journey
@pytest.mark.parametrize(
    "layout",
    [
        "plan.tp=2",
        "plan.dp=2 data_parallel=fsdp rl.kl_beta=0.1 train.global_batch_size=8",
        pytest.param("plan.dp=2 data_parallel=fsdp2 rl.kl_beta=0.1 train.global_batch_size=8", marks=pytest.mark.slow),
    ],
)
def test_ranks_learn_together(layout: str, tmp_path: Path) -> None:
    config = override(recipe("countdown_tiny"), [*FAST, "train.steps=1", f"output={tmp_path / 'run'}", *layout.split()])
    config = reinforce.prepared(config, rank=0)
    first_rank, second_rank = launch(reinforce_rank, 2, config=config, kind="cpu")
    assert first_rank.reward == second_rank.reward
    [row] = rows(tmp_path / "run")
    assert row["num_rollouts"] == 8 and row["logprob_mismatch"] < 1e-3
    if "fsdp" not in layout:
        return
    # It goes on beside the weights that it began with, from which it has gone away.
    launch(reinforce_rank, 2, config=override(config, ["train.steps=2"]), kind="cpu")
    first, second = rows(tmp_path / "run")
    assert abs(first["kl"]) < 1e-9 < second["kl"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rl.environment=countdwon", "environment='countdwon' must be one of countdown, arithmetic, calculator, maths, code, "),
        (
            "rl.environment=maths rl.maths.path=file.jsonl rl.maths.judge=math-verify",
            "maths.judge='math-verify' simplifies what a model writes, which may take any time: set rl.judges.num_workers=2",
        ),
        (
            "rl.mixture=[countdown,arithmetic] rl.mixture_weights=[1]",
            "mixture_weights=[1.0] must be as many as the environments of mixture",
        ),
        ("rl.mixture=[countdown,countdown]", "must be one or more, of different env_id"),
        ("rl.environment=maths rl.maths.path=no/such/file", "maths.path='no/such/file' is no file; name one of JSON lines"),
        ("rl.environment=maths rl.maths.num_evaluation=54 rl.imitation_steps=0", "environment 'maths' has no problems to train on; lower"),
        ("rl.environment=no.such.module:Task", "cannot be made: No module named 'no'"),
        ("rl.critic.lr=1e-3", "critic has no effect without gae"),
        ("rl.gae.lam=1 rl.critic.lr=inf", "critic.lr=inf must be a finite number above 0"),
        ("rl.max_filter_ratio=2", "max_filter_ratio=2.0 has no effect without filter_equal_groups"),
        ("rl.gae.lam=1 rl.group_size=1 rl.num_groups=8 rl.filter_equal_groups=true", "filter_equal_groups=True replaces every group of"),
        ("rl.maths.path=file.jsonl", "maths.path='file.jsonl' has no effect on countdown; set rl.environment=maths"),
        ("rl.arithmetic.worked=0.5", "--set rl.arithmetic.worked=0.5: it has no effect on countdown; set rl.environment=arithmetic, or"),
        ("rl.environment=arithmetic rl.countdown.max_number=9", "rl.countdown.max_number=9: it has no effect on arithmetic; set rl.env"),
        ("rl.character_share.wanted=a", "character_share.wanted='a' has no effect on countdown; set rl.environment=character_share"),
        ("rl.imitation_steps=0 rl.imitation_tries=4", "rl.imitation_tries=4: it has no effect without imitation; set rl.imitation_steps"),
        ("rl.imitation_steps=0 rl.imitation_lr=1e-2", "rl.imitation_lr=1e-2: it has no effect without imitation"),
        ("rl.imitation_steps=0 rl.imitation_lr_schedule=cosine", "rl.imitation_lr_schedule=cosine: it has no effect without imitation"),
        ("rl.mixture=[arithmetic] rl.environment=maths", "rl.environment=maths: it has no effect beside rl.mixture; name it there, or"),
        ("rl.old_logprobs=inference rl.correction.veto=0.1", "rl.correction.veto=0.1: it has no effect beside rl.old_logprobs=inference"),
        ("rl.imitation_lr=inf", "imitation_lr=inf must be a finite number above 0"),
        ("rl.cache_gb=inf", "cache_gb=inf must be a finite number above 0"),
        ("rl.rollout_timeout_s=inf", "rollout_timeout_s=inf must be a finite number above 0"),
        ("rl.kl_beta=0 rl.kl_estimator=k1", "kl_estimator='k1' has no effect without a divergence; set kl_beta, or leave it out"),
        (
            "rl.mixture=[countdown,arithmetic] rl.code.time_s=1",
            "code.time_s=1.0 has no effect on countdown, arithmetic; set rl.environment=co",
        ),
        (
            "rl.overlong.max_length=10 rl.overlong.buffer=4",
            "rl.overlong.max_length=10 has no effect: up to max_length - buffer = 6 tokens nothing is taken, and rl.generation",
        ),
        ("rl.weight_dtype=fp4", "rl.weight_dtype='fp4' is not of type Literal['fp8', 'fp8_weight_only'] or None"),
        ("batch_invariant=true rl.weight_dtype=fp8_weight_only", "rl.weight_dtype='fp8_weight_only' rounds what the engine computes with"),
        ("batch_invariant=true rl.kv_cache_dtype=fp8", "rl.kv_cache_dtype='fp8' rounds what the engine computes with, and batch_invariant"),
        (
            "rl.old_logprobs=inference rl.kv_cache_dtype=fp8",
            "kv_cache_dtype='fp8' changes the engine's log-probabilities, and ",
        ),
        ("rl.served.urls=[http://127.0.0.1:1] rl.weight_dtype=fp8", "weight_dtype needs engines of the run itself"),
        ("rl.eval_samples=2 train.eval_interval=0", "rl.eval_samples=2 has no effect without evaluations; set train.eval_interval"),
        ("rl.kl_beta=0 rl.ref_model_sync_steps=5", "ref_model_sync_steps=5 has no effect without a reference; set kl_beta"),
        ("rl.ref_model_sync_steps=-1", "ref_model_sync_steps=-1 must not be negative"),
        ("rl.ref_model_sync_steps=5 rl.ref_model_mixup_alpha=0", "ref_model_mixup_alpha=0.0 lie above 0 and up to 1"),
        ("rl.ref_model_mixup_alpha=0.5", "ref_model_mixup_alpha=0.5 has no effect without ref_model_sync_steps"),
        ("rl.router_replay=true", "rl.router_replay=True, and the model has no experts; set it to false"),
        ("rl.router_replay=trainer", "rl.router_replay='trainer', and the model has no experts; set it to false"),
        ("rl.router_replay=engine", "rl.router_replay='engine' is not of type bool or Literal['trainer']"),
        (
            f"{MIXTURE} rl.router_replay=trainer rl.num_groups=1",
            "found rl.old_logprobs='trainer' and 1 updates an iteration; set rl.old_logprobs=trainer and rl.num_epochs=2",
        ),
        (
            f"{MIXTURE} rl.router_replay=trainer rl.old_logprobs=inference",
            "rl.router_replay='trainer' replays in later updates what the trainer's old log-probabilities were computed with",
        ),
        (
            f"{MIXTURE} rl.router_replay=trainer rl.dpo.beta=0.1 rl.kl_beta=0",
            "router_replay='trainer' is of old log-probabilities, which dpo has none of; set it to true or false",
        ),
        (f"{MIXTURE} moe.moe_router_load_balancing_type=sinkhorn", "moe.moe_router_load_balancing_type='sinkhorn': the policy that is"),
        (f"{MIXTURE} moe.moe_expert_capacity_factor=2", "moe.moe_expert_capacity_factor=2.0 has a token's fate depend on those beside it"),
        (f"{MIXTURE} moe.moe_input_jitter_eps=0.1", "moe.moe_input_jitter_eps=0.1: the policy that is trained would be another one"),
        (
            "plan.cp=2 rl.packing.bin_size=48 rl.packing.share_prompts=true",
            "rl.packing.share_prompts=True: a prompt is not split over plan.cp=2 ranks; set plan.cp=1, or it to false",
        ),
        (
            "rl.packing.bin_size=48 rl.packing.device_bounds=true",
            "rl.packing.device_bounds=True is for CUDA graphs, found cuda_graphs=[]; set cuda_graphs=[layers.*], or it to false",
        ),
        (
            "cuda_graphs=[layers.*] rl.packing.bin_size=48",
            "rl.packing.device_bounds=False leaves the bounds of bins on the host, which no graph replays; set rl.packing.devi",
        ),
        (
            "cuda_graphs=[layers.*] rl.packing.bin_size=48 rl.packing.share_prompts=true",
            "which no graph replays; set cuda_graphs=[], or rl.packing=none for rows",
        ),
        (
            "cuda_graphs=[layers.*] rl.packing.bin_size=48 rl.packing.device_bounds=true rl.packing.share_prompts=true",
            "device_bounds=True needs whole sequences on one rank, found share_prompts=True and alignment=1; set False and 1",
        ),
        (
            "cuda_graphs=[layers.*] rl.memory.release_gradients=true",
            "rl.memory.release_gradients=True brings gradients back elsewhere than where graphs add to them",
        ),
        (
            "cuda_graphs=[layers.*] data_parallel=fsdp",
            "data_parallel='fsdp' gathers parameters by hooks inside the layers, which no graph rep",
        ),
        ("cuda_graphs=[layers.*] cuda_graph.external_cuda_graph=true plan.pp=2", "plan.pp=2 stages wait for each other; set cuda_graph.c"),
        (
            "cuda_graphs=[layers.*] cuda_graph.external_cuda_graph=true cuda_graph.capture_forward_only=true",
            "capture_forward_only=True: cuda",
        ),
        ("rl.generation_args.top_k=20", "generation_args.top_k=20 draws from another distribution than the one that is trained"),
        ("rl.generation_args.top_p=0.9", "generation_args.top_p=0.9 draws from another distribution than the one that is trained"),
        ("rl.group_size=1", "group_size=1 must be at least 2"),
        ("train.global_batch_size=6", "= 8 answers must be a multiple of train.global_batch_size=6"),
        ("rl.generation_args.max_tokens=24", "max_tokens=24 must lie below train.seq_len=24"),
        ("rl.packing.bin_size=8", "packing.bin_size=8 must be at least seq_len=24, as long as a trajectory may be; raise packing.bin_size"),
        ("rl.policy.kind=clipped", "kind='clipped' must be one of clip, cispo"),
        ("dumps.every=5", "dumps is for `mcore train` only"),
        ("log.peak_tflops=989", "log.peak_tflops is for `mcore train` only"),
        ("train.deterministic=true", "train.deterministic=true is of algorithms that engines do not all have; set it to false for rl"),
        ("rl.overlong.max_length=3", "set rl.overlong.buffer too, without a default"),
        ("train.warmup_steps=2", "train.warmup_steps=2 must be below train.steps=2, the iterations"),
        ("load.path=no/such/folder", "load.path='no/such/folder' has nothing to begin with"),
        ("rl=none", "rl=none has nothing to learn from"),
    ],
)
def test_what_cannot_run_is_one_line_before_anything_is_written(
    change: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = [word for one in (*FAST, f"output={tmp_path / 'run'}", *change.split()) for word in ("--set", one)]
    assert reinforce.main(["--recipe", "countdown_tiny", *(sets if change != "rl=none" else ["--set", change])]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message
    assert not (tmp_path / "run").exists()


def test_without_a_gpu_graphs_of_policy_and_critic_say_so_and_the_run_is_as_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = ("rl.packing.bin_size=48", "rl.packing.max_sequences_per_bin=8", "rl.packing.device_bounds=true")
    moved = ("rl.memory.offload_optimizer=true", "rl.memory.suspend_engine=true")
    graphs = ("cuda_graphs=[layers.*]", "cuda_graph.capture_forward_only=true")
    assert run(tmp_path / "run", *packed, *moved, *graphs, "rl.gae.lam=0.95", "rl.kl_in_reward=0.01") == 0
    remarks = [line for line in capsys.readouterr().out.splitlines() if "cuda graphs: " in line]
    assert [remark.split(": 0 captured, 0 replays, 0 MiB; eager calls: ")[0] for remark in remarks] == [
        "cuda graphs",
        "critic: cuda graphs",
    ]
    assert all("there is no CUDA device" in remark for remark in remarks)
    assert all(row["packing_efficiency"] > 0 and row["logprob_mismatch"] < 1e-3 for row in rows(tmp_path / "run"))


def test_graphs_of_imitation_are_given_up_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[TapeCapture] = []

    def capture(self: CudaGraphConfig) -> TapeCapture:
        captures.append(TapeCapture())
        return captures[-1]

    monkeypatch.setattr(CudaGraphConfig, "capture", capture)
    packed = ("rl.packing.bin_size=48", "rl.packing.max_sequences_per_bin=8", "rl.packing.device_bounds=true")
    graphs = ("cuda_graphs=[layers.*]", "cuda_graph.warmup_steps=0", "model.attention_backend=reference")
    assert run(tmp_path / "run", *packed, *graphs, "rl.num_epochs=2") == 0
    assert "cuda graphs: 1 captured, " in capsys.readouterr().out
    # A forward and a backward of imitation's rows, and of bins.
    assert [one.recorded for one in captures] == [4]


def test_graphs_of_the_critic_are_those_of_the_policy_for_what_both_have() -> None:
    heads = ("model.mtp_num_layers=1", "rl.gae.lam=0.95", "data.tokenizer=byte", "model.vocab_size=264", "train.seq_len=48")
    for patterns, shared in (("layers.*,mtp.*", ["layers.0"]), ("mtp.*", None)):
        config = override(recipe("countdown_tiny"), [*FAST, *heads, f"cuda_graphs=[{patterns}]"])
        parts = assemble_policy(config, ByteTokenizer(), torch.device("cpu"))
        critic = RunCritic(config, parts, torch.device("cpu"))
        assert parts.graphs is not None and "mtp.0" in parts.graphs.blocks
        assert (None if critic.graphs is None else list(critic.graphs.blocks)) == shared
        critic.close()
        parts.close()


@pytest.mark.journey
def test_evaluations_change_nothing_that_is_trained(tmp_path: Path) -> None:
    # What is batched together depends on the time that it takes, and must not change a bit here.
    shared = ("train.steps=3", "rl.countdown.num_numbers=2", "batch_invariant=true")
    often = ("train.eval_interval=1", "rl.eval_samples=2", "rl.eval_on_start=true")
    with_evaluations, without = tmp_path / "with", tmp_path / "without"
    assert run(with_evaluations, *shared, *often) == 0
    assert run(without, *shared, "train.eval_interval=0") == 0
    assert (with_evaluations / "examples.jsonl").read_text() == (without / "examples.jsonl").read_text()
    one, other = ([row for row in rows(output) if row["step"]] for output in (with_evaluations, without))
    assert len(one) == len(other) == 3 and all("eval/pass@2" in row for row in one)

    def trained_on(row: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in row.items() if not name.startswith("eval/") and not name.endswith("_s")}

    assert [trained_on(row) for row in one] == [trained_on(row) for row in other]


class Losing(InferenceInterface):
    """Loses each ``every``-th drawn answer, or with ``greedy`` all of the most likely ones."""

    def __init__(self, every: int, *, greedy: bool = False) -> None:
        self.every, self.greedy, self.num_drawn = every, greedy, 0

    def encode(self, text: str) -> list[int]:
        return [0]

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        is_greedy = request.generation_args.temperature == 0
        self.num_drawn += not is_greedy
        if self.greedy if is_greedy else self.num_drawn % self.every == 0:
            raise LostError("a tool fell over")
        return [[InferenceResponse(response="1", token_ids=[0, 1], prompt_length=1, logprobs=[0.0])]]


@pytest.mark.parametrize(
    ("interface", "expected"),
    [
        (Losing(5), {"reward": 0.0, "right": 0.0, "pass@1": 0.0, "pass@4": 0.0, "num_dropped": 3}),
        # One of four to each problem, of which none has as many as pass@4 asks for.
        (Losing(4), {"reward": 0.0, "right": 0.0, "pass@1": 0.0, "num_dropped": 4}),
        (Losing(4, greedy=True), {"pass@1": 0.0, "num_dropped": 8}),
    ],
    ids=["some", "one of each problem", "all greedy ones"],
)
def test_lost_answers_of_an_evaluation_are_counted_and_a_mean_over_none_is_no_number(interface: Losing, expected: dict[str, float]) -> None:
    config = override(recipe("countdown_tiny"), ["rl.eval_samples=4", "train.eval_interval=1"])
    assert config.rl is not None
    environment = build_environment(config.rl)
    means = evaluation_means(config, environment.env_ids, evaluation_sums(config, environment, interface, 4))
    assert {name.removeprefix("eval/"): value for name, value in means.items()} == expected


def test_ppo_trains_its_critic_first_and_goes_on_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("rl.gae.lam=0.9", "rl.critic.lr=1e-3", "rl.critic.warmup_steps=1", "rl.group_size=1", "rl.num_groups=8")
    changes += ("rl.environment=character_share", "rl.imitation_steps=0")
    output = tmp_path / "run"
    assert run(output, *changes) == 0
    first, second = rows(output)
    assert "ratio" not in first and second["ratio"] == pytest.approx(1.0, abs=0.1)
    assert first["critic/loss"] > 0 and math.isfinite(second["critic/explained_variance"])
    critics = CheckpointManager(output / CRITIC)
    assert critics.steps() == [2] and read_manifest(critics.folder(2)).extra["optimizer_step"] == 4
    assert "value_head.weight" in read_manifest(critics.folder(2)).tensors
    assert not [name for name in read_manifest(CheckpointManager(output / "checkpoints").folder(2)).tensors if "value_head" in name]
    assert run(output, *changes, "train.steps=3") == 0
    assert [row["step"] for row in rows(output)] == [1, 2, 3]
    assert read_manifest(critics.folder(3)).extra["optimizer_step"] == 6
    shutil.rmtree(output / CRITIC)
    assert run(output, *changes, "train.steps=4") == 2
    assert "the run began without rl.gae" in capsys.readouterr().err


def test_a_problem_that_leaves_no_room_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "run", "train.seq_len=16", "rl.countdown.num_numbers=6") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "train.seq_len=16 must hold a problem, and none of the first 2 fits" in message
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_problem_that_is_too_long_loses_its_answers_alone(tmp_path: Path) -> None:
    changes = ["rl.environment=tests.support.environments:OneTooLong", "rl.imitation_steps=0", "train.steps=4", "train.eval_interval=4"]
    assert run(tmp_path / "run", *changes) == 0
    # Of two problems an iteration the second of the third one has a prompt that no row holds.
    assert [(row["num_rollouts"], row["num_dropped"]) for row in rows(tmp_path / "run")] == [(8, 0), (8, 0), (4, 4), (8, 0)]
    assert rows(tmp_path / "run")[3]["eval/num_dropped"] == 1


def test_a_problem_that_cannot_be_posed_loses_its_answers_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = ["rl.environment=tests.support.environments:Gaps", "rl.imitation_steps=0", "data.tokenizer=byte", "train.eval_interval=0"]
    assert run(tmp_path / "run", *changes) == 0
    assert [(row["num_rollouts"], row["num_dropped"]) for row in rows(tmp_path / "run")] == [(4, 4), (4, 4)]
    assert "row 3 is broken" in caplog.text


def test_other_verbs_name_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mcore_tools import train

    assert train.main(["--recipe", "countdown_tiny", "--set", f"output={tmp_path / 'run'}"]) == 2
    assert "start the run with `mcore rl`" in capsys.readouterr().err
    assert reinforce.main([]) == 2
    assert "Recipes that learn from rewards: arithmetic_100m, arithmetic_tiny, countdown_tiny" in capsys.readouterr().err
    assert reinforce.main(["--recipe", "gpt_tiny"]) == 2
    assert "this recipe learns from texts" in capsys.readouterr().err


def test_a_run_that_is_asked_to_stop_saves_and_says_where(tmp_path: Path) -> None:
    config = reinforce.prepared(override(recipe("countdown_tiny"), [*FAST, f"output={tmp_path / 'run'}"]), rank=0)
    assert reinforce_rank(config, "cpu", stop=lambda: True).stopped_at == 1
    assert CheckpointManager(tmp_path / "run" / "checkpoints").latest() == 1
    assert reinforce_rank(config, "cpu").stopped_at is None
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


def test_torchrun_is_told_why_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As torchrun sets it, which reads the file when a rank ends with another code than 0.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def reason(exit_code: int) -> str:
        return ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file=str(tmp_path / "error.json")).message["message"]

    assert run(tmp_path / "run", "rl.group_size=1") == 2
    assert "group_size=1 must be at least 2" in reason(1)
    assert run(tmp_path / "run", "rl.imitation_steps=0", "train.stop_after_minutes=1e-9") == STOPPED_EXIT_CODE
    assert reason(STOPPED_EXIT_CODE) == "no failure: stopped and saved after step 1; start it again to go on"


@pytest.mark.journey
def test_a_published_model_is_trained_and_exported(tmp_path: Path) -> None:
    published = write_published(tmp_path / "llama")
    changes = [*PACE, *QUIET, "rl.environment=arithmetic", "rl.generation_args.max_tokens=4", "train.steps=1", f"output={tmp_path / 'run'}"]
    assert reinforce.main([str(published), *(word for change in changes for word in ("--set", change))]) == 0
    [row] = rows(tmp_path / "run")
    assert row["num_rollouts"] == 8 and row["lr"] == 1e-6 and row["logprob_mismatch"] < 1e-3
    assert import_hf(export_run(tmp_path / "run" / "checkpoints", tmp_path / "hf")).family == "llama"
