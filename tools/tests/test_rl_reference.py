# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl`` beside a reference of its own choice (``rl.reference``): another checkpoint, a published folder."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt import CheckpointManager, load
from mcore_ckpt.manifest import read_manifest
from mcore_tools import reinforce
from mcore_tools.launch import launch
from mcore_tools.recipes import RunConfig, override, recipe
from mcore_tools.rl import REFERENCE, _reference, reinforce_rank
from mcore_tools.training import export_run, open_weights
from tests.support.countdown import PACE, QUIET, SIZES, countdown_words, rows

STILL = ("optimizer.lr=0.0", "optimizer.min_lr=0.0")
FAST = (*SIZES, *PACE, *QUIET, "train.steps=1", "rl.imitation_steps=0", "train.eval_interval=0", "rl.generation_args.max_tokens=6")


def run(output: Path, *changes: str) -> int:
    return reinforce.main(countdown_words(*FAST, f"output={output}", *changes))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All weights of the newest checkpoint, without the optimizer's state."""
    manager = CheckpointManager(folder)
    step = manager.latest()
    assert step is not None
    records = read_manifest(manager.folder(step)).tensors
    named = {name: torch.empty(record.shape, dtype=record.torch_dtype) for name, record in records.items() if "optimizer." not in name}
    load(named, manager.folder(step), strict=False)
    return named


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with other weights than those that the recipe begins with."""
    output = tmp_path_factory.mktemp("rl") / "other"
    assert run(output, "rl.kl_beta=0", "rl.imitation_steps=3", "rl.imitation_lr=1e-2") == 0
    return output


@pytest.mark.journey
def test_the_divergence_is_from_the_named_weights_which_the_run_keeps(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, output, plain = tmp_path / "other", tmp_path / "run", tmp_path / "plain"
    shutil.copytree(other, moved)
    named = (*STILL, "rl.kl_beta=0.1", f"rl.reference={moved}")
    with monkeypatch.context() as here:
        here.chdir(tmp_path)
        # Which goes on from anywhere.
        assert run(output, *STILL, "rl.kl_beta=0.1", "rl.reference=./other/") == 0
    assert run(plain, *STILL, "rl.kl_beta=0.1") == 0
    expected = weights_of(other / "checkpoints")
    assert equal(weights_of(output / REFERENCE), expected)
    # The policy's own weights are where they were.
    assert equal(weights_of(output / "checkpoints"), weights_of(plain / "checkpoints"))
    assert rows(output)[0]["kl"] > 1e-4 and abs(rows(plain)[0]["kl"]) < 1e-9
    # A run that goes on needs the folder no more.
    shutil.rmtree(moved)
    assert run(output, *named, "train.steps=2") == 0
    assert equal(weights_of(output / REFERENCE), expected) and rows(output)[1]["kl"] > 1e-4
    capsys.readouterr()
    assert run(output, *named, "train.steps=3", "rl.reference=") == 2
    assert f"rl.reference='', and the run began with '{moved}', with which it goes on" in capsys.readouterr().err
    assert run(plain, *STILL, "rl.kl_beta=0.1", "train.steps=3", f"rl.reference={other}") == 2
    assert f"rl.reference='{other}', and the run began with ''" in capsys.readouterr().err


@pytest.mark.journey
@pytest.mark.parametrize(
    "layout", ["plan.tp=2", "plan.dp=2 data_parallel=fsdp", pytest.param("plan.dp=2 data_parallel=fsdp2", marks=pytest.mark.slow)]
)
def test_a_published_folder_is_the_reference_in_every_layout(layout: str, other: Path, tmp_path: Path) -> None:
    published, output = export_run(other / "checkpoints", tmp_path / "published"), tmp_path / "run"
    sets = [*FAST, *STILL, "train.global_batch_size=8", f"output={output}", "rl.kl_beta=0.1", "rl.ref_model_sync_steps=2"]
    sets += ["rl.ref_model_mixup_alpha=1", f"rl.reference={published}", *layout.split()]
    config = reinforce.prepared(override(recipe("countdown_tiny"), sets), rank=0)
    launch(reinforce_rank, 2, config=config, kind="cpu")
    assert equal(weights_of(output / REFERENCE), weights_of(other / "checkpoints"))
    launch(reinforce_rank, 2, config=override(config, ["train.steps=3"]), kind="cpu")
    # It follows the policy, as first weights do.
    assert [row["kl"] > 1e-4 for row in rows(output)] == [True, True, False]
    assert equal(weights_of(output / REFERENCE), weights_of(output / "checkpoints"))


def rank_that_finds_another(config: RunConfig, kind: str, found: Path) -> None:
    """The second rank resolves the reference to ``found``, as one that looks when a step more is there."""
    if dist.get_rank() == 1:
        _reference.reference_weights = lambda config: open_weights(found)
    reinforce_rank(config, kind)


def test_all_ranks_take_the_reference_that_the_first_one_found(other: Path, tmp_path: Path) -> None:
    output, later = tmp_path / "run", tmp_path / "later"
    assert run(later, "rl.kl_beta=0", "rl.imitation_steps=1", "rl.imitation_lr=1e-2") == 0
    sets = [*FAST, *STILL, "train.global_batch_size=8", f"output={output}", "rl.kl_beta=0.1", f"rl.reference={other}", "plan.tp=2"]
    config = reinforce.prepared(override(recipe("countdown_tiny"), sets), rank=0)
    launch(rank_that_finds_another, 2, config=config, kind="cpu", found=later)
    expected = weights_of(other / "checkpoints")
    assert equal(weights_of(output / REFERENCE), expected) and not equal(weights_of(later / "checkpoints"), expected)


def test_a_mixture_takes_no_dense_reference_and_pairs_take_one(other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "mixture", "rl.kl_beta=0.1", f"rl.reference={other}", "moe.num_moe_experts=4", "moe.moe_router_topk=2") == 2
    assert f"rl.reference='{other}': it is a dense model and the policy has experts (moe)" in capsys.readouterr().err
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "1 2=3:", "chosen": "1+2", "rejected": "1-2"}\n' * 4)
    preferences = ("rl.kl_beta=0", f"rl.dpo.path={pairs}", f"data.tokenizer={other}/tokenizer", "rl.num_groups=4")
    assert run(tmp_path / "pairs", *preferences, "rl.group_size=8", "train.global_batch_size=8", f"rl.reference={other}") == 0
    # Beside its first weights a policy has no margin yet.
    assert abs(rows(tmp_path / "pairs")[0]["margin"]) > 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("rl.kl_beta=0 rl.reference={other}", "has no effect without kl_beta, kl_in_reward or dpo; set one, or leave it out"),
        ("rl.kl_beta=0 rl.teacher={other} rl.reference={other}", "has no effect without kl_beta, kl_in_reward or dpo"),
        ("rl.kl_beta=0.1 rl.reference=no/such/folder", "no/such/folder"),
        (
            "rl.kl_in_reward=0.1 rl.reference={other} model.ffn_hidden_size=48",
            "step_00000001 holds the weights of another model: model.ffn_hidden_size=64 there, 48 here",
        ),
    ],
)
def test_what_is_no_reference_is_one_line_before_anything_is_written(
    changes: str, words: str, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "run", *(change.format(other=other) for change in changes.split())) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and words.format(other=other) in message, message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field", ["rl.reference", "rl.teacher"])
def test_another_tokenizer_is_refused_before_the_imitation(
    field: str, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocabulary = override(recipe("countdown_tiny"), [*FAST]).model.vocab_size
    changes = (f"rl.kl_beta={0.1 * (field == 'rl.reference')}", f"{field}={other}", "data.tokenizer=byte", "rl.imitation_steps=3")
    assert run(tmp_path / "run", *changes, f"model.vocab_size={vocabulary}", "train.seq_len=64") == 2
    printed = capsys.readouterr()
    assert f"{field}='{other}' has another tokenizer than the policy" in printed.err
    assert "imitation" not in printed.out and not (tmp_path / "run").exists()
