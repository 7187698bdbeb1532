# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run of ``mcore rl`` that is killed in each of its phases ends with the numbers and weights of one that was not, whatever it learns."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CheckpointManager
from mcore_ckpt.manifest import read_manifest
from mcore_tools.rl import CRITIC, REFERENCE
from tests.support.countdown import QUIET, SIZES, countdown_words, num_taken, rows
from tests.support.killed_rl import PHASES, Start, run_starts

pytestmark = pytest.mark.timeout(300)
# Each problem is posed once, and any text may earn something. To the last bit, answers do not depend on those that share a step.
POSED = (
    *("rl.environment=character_share", f"rl.character_share.prompts=[{','.join('abcdefghijklmnopqrstuvwxyz')}]"),
    f"rl.character_share.wanted={''.join(map(chr, range(65, 91)))}{''.join(map(chr, range(97, 123)))}",
)
TINY = (
    *SIZES,
    *QUIET,
    *("model.vocab_size=264", "data.tokenizer=byte", "batch_invariant=true", "train.seq_len=8", "rl.generation_args.max_tokens=4"),
    *("rl.imitation_steps=0", "rl.kl_beta=0", "rl.num_groups=2", "rl.num_epochs=1"),
    *("train.global_batch_size=4", "train.micro_batch_size=4"),
    *("train.steps=3", "train.eval_interval=0", "train.checkpoint_interval=1", "optimizer.lr=1e-2", "optimizer.min_lr=1e-2"),
)
KINDS: dict[str, tuple[str, ...]] = {
    "rewards": ("rl.group_size=4", "rl.kl_beta=0.05", "rl.kl_in_reward=0.01", "rl.num_epochs=2"),
    "refreshed": ("rl.group_size=4", "rl.kl_beta=0.5", "rl.ref_model_sync_steps=2", "rl.ref_model_mixup_alpha=0.5"),
    "critic": ("rl.group_size=2", "rl.gae.lam=0.9", "rl.critic.lr=1e-2", "rl.kl_in_reward=0.05", "rl.critic.warmup_steps=1"),
    "preferences": ("rl.group_size=4", "rl.dpo.beta=0.1"),
    "file": ("rl.dpo.path={folder}/pairs.jsonl", "rl.dpo.beta=0.1"),
    "teacher": ("rl.group_size=4", "rl.teacher={folder}/teacher"),
}


def words(output: Path, *changes: str) -> list[str]:
    posed = () if any(change.startswith("rl.dpo.path=") for change in changes) else POSED
    return countdown_words(*TINY, *posed, f"output={output}", *changes)


def _changes(kind: str, folder: Path) -> list[str]:
    return [change.format(folder=folder) for change in KINDS[kind]]


def _before(kind: str, folder: Path) -> list[Start]:
    """What makes the files that a kind reads."""
    if kind == "file":
        lines = [{"prompt": letter, "chosen": letter.upper(), "rejected": letter + "!"} for letter in "abcdefg"]
        (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    if kind != "teacher":
        return []
    return [Start(words=words(folder / "teacher", "train.seed=7", "train.steps=1", "model.init_method_std=0.3"))]


def curve(output: Path) -> list[dict[str, Any]]:
    """What a run wrote, but for how long it took."""
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows(output)]


def stored(output: Path) -> dict[str, list[str]]:
    """Digests of the newest checkpoints of policy, critic and reference, and what is said beside."""
    contents = {}
    for name in ("checkpoints", CRITIC, REFERENCE):
        manager = CheckpointManager(output / name)
        step = manager.latest()
        if step is not None:
            files = sorted(manager.path(step).glob("*.safetensors"))
            contents[name] = sorted(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
            extra = read_manifest(manager.folder(step)).extra
            contents[name].append(json.dumps([extra.get(key) for key in ("trainer", "optimizer_step", "rl")]))
    return contents


@pytest.mark.journey
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind not in ("refreshed", "critic", "file") else kind for kind in KINDS]
)
def test_a_run_killed_in_each_phase_ends_as_one_that_was_not(kind: str, tmp_path: Path) -> None:
    changes, whole, output = _changes(kind, tmp_path), tmp_path / "whole", tmp_path / "run"
    unused = {"file": ("generate", "refit", "save_critic"), "critic": ()}.get(kind, ("save_critic",))
    phases = [phase for phase in PHASES if phase not in unused]
    # The first start comes to its second iteration, the others begin there.
    kills = [Start(words=words(output, *changes), phase=phase, iteration=2 - (number > 0)) for number, phase in enumerate(phases)]
    codes = run_starts([*_before(kind, tmp_path), Start(words=words(whole, *changes)), *kills, Start(words=words(output, *changes))])
    assert codes[-len(kills) - 2 :] == [[0], *[[-9]] * len(kills), [0]]
    assert curve(output) == curve(whole) and len({row["loss"] for row in curve(whole) if "loss" in row}) > 1
    assert stored(output) == stored(whole)


@pytest.mark.slow
def test_ranks_that_needed_unequally_many_groups_go_on_where_each_of_them_was(tmp_path: Path) -> None:
    prompts = ",".join(first + second for first in "abcdefgh" for second in "abcdefgh")
    changes = ("plan.dp=2", "rl.filter_equal_groups=true", "rl.num_groups=4", "rl.group_size=2", "train.global_batch_size=8")
    changes += ("train.seed=4", f"rl.character_share.prompts=[{prompts}]")
    whole, output = (words(tmp_path / name, *changes) for name in ("whole", "run"))
    killed = Start(words=output, phase="generate", iteration=2, num_ranks=2)
    codes = run_starts([Start(words=whole, num_ranks=2), killed, Start(words=output, num_ranks=2)])
    assert codes[0] == codes[2] == [0, 0] and codes[1][0] == -9
    assert curve(tmp_path / "run") == curve(tmp_path / "whole") and stored(tmp_path / "run") == stored(tmp_path / "whole")
    first, last = (num_taken(tmp_path / "run", step) for step in (1, 3))
    assert first[0] != first[1] and sum(last) > 4 * 3


@pytest.mark.journey
def test_a_critic_that_a_killed_run_left_alone_is_forgotten(tmp_path: Path) -> None:
    # The answers that are drawn again are others, and so is what is learnt from them.
    output, changes = tmp_path / "run", _changes("critic", tmp_path)
    one = {"words": words(output, *changes, "train.steps=1"), "draws_alike": False}
    assert run_starts([Start(**one, phase="save")]) == [[-9]]
    left = stored(output)
    assert list(left) == [CRITIC, REFERENCE]
    assert run_starts([Start(**one)]) == [[0]]
    assert stored(output)[CRITIC] != left[CRITIC]
    # One of a later step, which the policy never came to, takes no place among those that are kept.
    later = CheckpointManager(output / CRITIC)
    shutil.copytree(later.path(1), later.path(9))
    assert run_starts([Start(words=words(output, *changes))]) == [[0]]
    assert later.steps() == [2, 3]


@pytest.mark.journey
def test_a_reference_follows_the_policy_in_its_turn(tmp_path: Path) -> None:
    changes = ("rl.group_size=4", "rl.kl_beta=0.5", "rl.ref_model_sync_steps=2", "rl.ref_model_mixup_alpha=1", "train.global_batch_size=8")
    assert run_starts([Start(words=words(tmp_path / "run", *changes, "train.steps=4"))]) == [[0]]
    # With one update an iteration, the policy that is compared is the one after the iteration before.
    assert [row["kl"] > 1e-6 for row in curve(tmp_path / "run")] == [False, True, False, True]
    references = CheckpointManager(tmp_path / "run" / REFERENCE)
    assert references.steps() == [2, 4]


APART = ("rl.placement.num_engines=1", "rl.placement.timeout_s=60", "rl.rollout_timeout_s=50")
HALVES = [
    ("generate", 1),
    ("exchange", 0),
    ("exchange", 1),
    ("score", 0),
    ("train", 0),
    ("refit", 0),
    ("refit", 1),
    ("save", 0),
    ("saved", 0),
]
"""Phases, and the rank that is killed in each: the first one trains, the other one serves."""


def end_after_kills(output: Path, changes: Sequence[str], phases: Sequence[tuple[str, int]]) -> None:
    """A run on two ranks, one of which is killed in each phase, and the start that ends it."""
    kills = [
        Start(words=words(output, *changes), phase=phase, rank=rank, iteration=2 - (number > 0), num_ranks=2)
        for number, (phase, rank) in enumerate(phases)
    ]
    codes = run_starts([*kills, Start(words=words(output, *changes), num_ranks=2)])
    # Who is left ends, too, and says so.
    assert [(code[rank], code[1 - rank] > 0) for (_, rank), code in zip(phases, codes, strict=False)] == [(-9, True)] * len(phases), codes
    assert codes[-1] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rewards", "critic", "preferences", "teacher"])
def test_by_turns_a_run_whose_halves_are_killed_ends_as_one_that_was_not(kind: str, tmp_path: Path) -> None:
    changes, whole, output = [*_changes(kind, tmp_path), *APART, "rl.placement.max_lag=0"], tmp_path / "whole", tmp_path / "run"
    assert run_starts(_before(kind, tmp_path)) == [[0]] * (kind == "teacher")
    end_after_kills(output, changes, HALVES)
    assert run_starts([Start(words=words(whole, *changes), num_ranks=2)]) == [[0, 0]]
    assert curve(output) == curve(whole) and len({row["loss"] for row in curve(whole) if "loss" in row}) > 1
    assert stored(output) == stored(whole)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("kind", "max_lag", "phases"),
    [
        ("critic", 1, HALVES[1:8:3]),
        *(pytest.param(kind, 2, HALVES, marks=pytest.mark.slow) for kind in ("rewards", "critic", "teacher", "preferences")),
    ],
    ids=["one_step_off", "rewards", "critic", "teacher", "preferences"],
)
def test_engines_that_are_ahead_of_a_killed_run_draw_each_problem_again(
    kind: str, max_lag: int, phases: list[tuple[str, int]], tmp_path: Path
) -> None:
    changes, output = [*_changes(kind, tmp_path), *APART, f"rl.placement.max_lag={max_lag}", "train.steps=4"], tmp_path / "run"
    assert run_starts(_before(kind, tmp_path)) == [[0]] * (kind == "teacher")
    end_after_kills(output, changes, phases)
    steps = curve(output)
    assert [row["step"] for row in steps] == [1, 2, 3, 4] and all(row["num_rollouts"] == steps[0]["num_rollouts"] for row in steps)
    # A start begins with answers of the weights that it goes on from; later ones were posed at most so many refits before.
    assert steps[0]["lag"] == 0 and 0 < steps[-1]["lag"] <= max_lag
    for row in steps:
        # With the first iterations of PPO the policy stays as it is.
        assert kind == "teacher" or row["token_lag"] or row.get("logprob_mismatch", 0.0) == 0.0, row
    # Each problem was trained on once: nothing that was drawn ahead is left out or posed later.
    first = {row["step"]: int(row["problem_id"]) for row in map(json.loads, (output / "examples.jsonl").read_text().splitlines())}
    [taken] = num_taken(output, 4)
    if kind == "preferences":
        # Groups of equal rewards make no pair.
        assert 0 <= first[1] < first[2] < first[3] < first[4] < taken
    else:
        assert first == {step: 2 * step - 2 for step in (1, 2, 3, 4)} and taken == 8
    assert CheckpointManager(output / CRITIC).latest() == (4 if kind == "critic" else None)
