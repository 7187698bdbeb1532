# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl`` without rewards: pairs of answers, of the policy or of a file, and a teacher."""

import json
from pathlib import Path

import pytest

from mcore_ckpt import CheckpointManager
from mcore_tools import reinforce
from mcore_tools.launch import launch
from mcore_tools.recipes import override, recipe
from mcore_tools.rl import REFERENCE, reinforce_rank
from mcore_tools.serving import open_engine
from tests.support.countdown import QUIET, SIZES, countdown_words, num_taken, rows

PAIRED = (
    *SIZES,
    *QUIET,
    *("rl.kl_beta=0", "rl.num_groups=4", "rl.group_size=4", "rl.num_epochs=1", "rl.generation_args.max_tokens=6"),
    *("train.global_batch_size=8", "train.micro_batch_size=8", "train.eval_batches=1", "train.eval_interval=4", "train.steps=4"),
    *("optimizer.lr=2e-3", "optimizer.min_lr=2e-3"),
)


def run(output: Path, *changes: str, model: str = "") -> int:
    return reinforce.main([*([model] if model else []), *countdown_words(*PAIRED, f"output={output}", *changes)])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that writes answers of the right form."""
    output = tmp_path_factory.mktemp("rl") / "base"
    assert run(output, "rl.imitation_steps=60", "rl.imitation_tries=2", "rl.imitation_lr=5e-3", "train.steps=1") == 0
    return output


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    lines = [{"prompt": f"{n} 2={n + 2}:", "chosen": f"{n}+2", "rejected": f"{n}-2"} for n in range(1, 13)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


FILE = ("rl.imitation_steps=0", "rl.group_size=8", "rl.dpo.num_evaluation=4", "train.steps=8")


def test_pairs_of_a_file_are_preferred_more_and_more(base: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "run"
    assert run(output, *FILE, "log.html=true", f"rl.dpo.path={pairs}", model=str(base)) == 0
    assert "trained on pairs" in capsys.readouterr().out
    numbers = rows(output)
    assert numbers[0]["margin"] == pytest.approx(0.0, abs=1e-6) and numbers[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert numbers[-1]["margin"] > numbers[3]["margin"] > numbers[1]["margin"] > 0 and numbers[-1]["accuracy"] == 1.0
    # What was kept back is preferred, too.
    evaluated = [row for row in numbers if "eval/margin" in row]
    assert [row["step"] for row in evaluated] == [4, 8] and evaluated[-1]["eval/margin"] > evaluated[0]["eval/margin"] > 0
    assert "reward" not in numbers[0] and {"report.html", "checkpoints", REFERENCE} <= {path.name for path in output.iterdir()}
    assert num_taken(output, 8) == [32]
    assert open_engine(output, "cpu", cache_gb=0.01).generate(["3 2=5:"])
    # It goes on with the next pairs, beside the first weights.
    assert run(output, *FILE, "train.steps=9", f"rl.dpo.path={pairs}", f"data.tokenizer={output}/base", model=str(base)) == 0
    assert [row["step"] for row in rows(output)] == list(range(1, 10)) and rows(output)[-1]["margin"] > numbers[3]["margin"]


@pytest.mark.journey
def test_the_best_and_the_worst_of_each_group_are_told_apart(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    changes = ("rl.imitation_steps=0", "rl.environment=character_share", "rl.dpo.beta=0.5", "rl.group_size=8", "train.steps=12")
    assert run(output, *changes, "rl.num_groups=8", "train.global_batch_size=16", model=str(base)) == 0
    numbers = rows(output)
    assert all(0 < row["num_rollouts"] <= 16 and 0 < row["reward"] < 1 for row in numbers)
    early, late = ([row[name] for row in numbers[begin : begin + 4]] for name, begin in (("margin", 0), ("margin", 8)))
    assert sum(late) > sum(early) and "eval/reward" in numbers[3]


@pytest.mark.journey
def test_ranks_share_pairs(base: Path, pairs: Path, tmp_path: Path) -> None:
    losses = []
    for plan, number in (("plan.dp=1", 1), ("plan.dp=2", 2), ("plan.tp=2", 2)):
        output = tmp_path / plan
        sets = [
            *PAIRED,
            *FILE,
            "train.steps=2",
            "train.eval_interval=2",
            "train.micro_batch_size=4",
            f"rl.dpo.path={pairs}",
            f"output={output}",
        ]
        config = override(recipe("countdown_tiny"), [*sets, plan, f"load.path={base}/checkpoints"])
        config = reinforce.prepared(config, rank=0)
        reinforce_rank(config, "cpu") if number == 1 else launch(reinforce_rank, number, config=config, kind="cpu")
        losses.append([(row["loss"], row["margin"], row.get("eval/margin", 0.0)) for row in rows(output)])
    for other in losses[1:]:
        assert [value for row in other for value in row] == pytest.approx([value for row in losses[0] for value in row], rel=1e-3, abs=1e-5)


@pytest.mark.journey
def test_a_student_comes_to_its_teacher_on_its_own_answers(base: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    # Random weights, and another size than the teacher's.
    changes = (
        f"rl.teacher={base}",
        f"data.tokenizer={base}/tokenizer",
        "model.hidden_size=48",
        "model.num_layers=2",
        *("rl.imitation_steps=0", "optimizer.lr=8e-3", "optimizer.min_lr=8e-3"),
    )
    assert run(output, *changes, "train.steps=40", "train.eval_interval=0", "train.global_batch_size=16") == 0
    numbers = [row["logits_distillation_loss"] for row in rows(output)]
    assert sum(numbers[-5:]) < 0.35 * sum(numbers[:5]) and rows(output)[0]["loss"] == pytest.approx(numbers[0])


def test_a_sharded_policy_learns_from_pairs_beside_its_first_weights(base: Path, pairs: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    sets = [*PAIRED, *FILE, "train.steps=2", "train.micro_batch_size=4", f"output={output}", "plan.dp=2", "data_parallel=fsdp"]
    # Of five pairs, and two a micro-batch, one rank has more than the other.
    sets += ["rl.dpo.num_evaluation=5", "train.eval_interval=2"]
    config = override(recipe("countdown_tiny"), [*sets, f"rl.dpo.path={pairs}", f"load.path={base}", f"data.tokenizer={base}/tokenizer"])
    launch(reinforce_rank, 2, config=config, kind="cpu")
    first, second = rows(output)
    assert first["margin"] == pytest.approx(0.0, abs=1e-6) and second["margin"] > 1e-4 and 0 <= second["eval/accuracy"] <= 1


@pytest.mark.journey
@pytest.mark.parametrize("kind", ["fsdp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_the_reference_of_a_sharded_policy_follows_it_and_a_run_goes_on_with_it(kind: str, base: Path, pairs: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    sets = [*PAIRED, *FILE, "train.steps=2", "train.micro_batch_size=4", f"output={output}", "plan.dp=2", f"data_parallel={kind}"]
    sets += ["rl.ref_model_sync_steps=2", "rl.ref_model_mixup_alpha=1", "train.eval_interval=0", f"rl.dpo.path={pairs}"]
    config = override(recipe("countdown_tiny"), [*sets, f"load.path={base}", f"data.tokenizer={base}/tokenizer"])
    launch(reinforce_rank, 2, config=config, kind="cpu")
    launch(reinforce_rank, 2, config=override(config, ["train.steps=4"]), kind="cpu")
    margins = [row["margin"] for row in rows(output)]
    # An iteration has one update, before which the policy is its own reference where that has just followed.
    assert [abs(margin) > 1e-4 for margin in margins] == [False, True, False, True]
    assert CheckpointManager(output / REFERENCE).steps() == [2, 4]


@pytest.mark.parametrize("plan", ["plan.tp=2", "plan.dp=2"])
def test_teachers_are_in_the_layout_of_the_policy(base: Path, plan: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    sets = [*PAIRED, "rl.imitation_steps=0", "train.steps=1", "train.eval_interval=0", "train.micro_batch_size=4", f"output={output}", plan]
    config = override(recipe("countdown_tiny"), [*sets, f"rl.teacher={base}", f"data.tokenizer={base}/tokenizer"])
    launch(reinforce_rank, 2, config=config, kind="cpu")
    assert rows(output)[0]["logits_distillation_loss"] > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            "rl.group_size=8 rl.dpo.path=no/such/file data.tokenizer={base}/tokenizer",
            "'no/such/file' is no file; name one of JSON lines with prompt",
        ),
        ("rl.group_size=8 rl.dpo.path={pairs}", "rl.dpo.path has pairs for a model that can read; name it as MODEL, or set data.tokenizer"),
        ("rl.dpo.beta=0", "beta=0.0 must be positive"),
        ("rl.dpo.beta=0.1 rl.kl_beta=0.1", "kl_beta=0.1 has no effect beside dpo; leave it at 0.0"),
        ("rl.dpo.beta=0.1 rl.gae.lam=1", "has no effect beside dpo; leave it at None"),
        ("rl.dpo.path={pairs}", "rl.group_size=4: it has no effect beside rl.dpo.path, whose pairs nobody draws; set rl.dpo.beta without"),
        *(
            (f"rl.group_size=8 rl.dpo.path={{pairs}} {change}", f"{change}: it has no effect beside rl.dpo.path")
            for change in ("rl.cache_gb=3", "rl.max_requests=7", "rl.environment=maths", "rl.mixture=[maths,code]")
        ),
        ("rl.group_size=8 rl.dpo.path={pairs} rl.generation_args.temperature=0.7", "generation_args.temperature=0.7: it has no effect"),
        ("rl.dpo.path={pairs} rl.memory.stream_optimizer=true", "memory.stream_optimizer is for a run that draws answers, and dpo.path"),
        ("rl.dpo.num_evaluation=3", "counts pairs of dpo.path=''; name a file, or set it to 0"),
        ("rl.dpo.beta=0.1 train.micro_batch_size=1", "must be even: a pair has two answers"),
        ("rl.dpo.beta=0.1 train.global_batch_size=16", "rl.num_groups=4 * 2 = 8 answers must be a multiple of train.global_batch_size=16"),
        ("rl.dpo.beta=0.1 rl.teacher={base}", "exclude each other; set rl.dpo=none, or rl.teacher="),
        ("rl.teacher=no/such/folder", "no/such/folder"),
        ("rl.teacher={base} model.vocab_size=328", "has model.vocab_size=320, and the policy 328; both need one tokenizer"),
        ("rl.teacher={base} rl.entropy_weight=0.1", "entropy_weight=0.1 has no effect beside teacher"),
    ],
)
def test_what_cannot_run_is_one_line_before_anything_is_written(
    changes: str, words: str, base: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [change.format(base=base, pairs=pairs) for change in changes.split()]
    assert run(tmp_path / "run", "rl.imitation_steps=0", *named) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words in message, message
    assert not (tmp_path / "run" / "checkpoints").exists()
