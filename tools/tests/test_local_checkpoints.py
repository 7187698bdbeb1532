# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps on the nodes beside those on shared storage: a run that is killed goes on from the newer one."""

import io
import json
import os
import shutil
import signal
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mcore_tools.assembly import _data
from mcore_tools.recipes import RecipeError, RunConfig, override, recipe
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus


def changes(folder: Path) -> list[str]:
    """Of gpt_tiny: eight tiny steps on two ranks, saved every third, kept on the nodes every second."""
    write_corpus(folder, "to be or not to be, that is the question. ")
    return [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", "plan.dp=2"),
        *("model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=16", "train.seq_len=16", "train.micro_batch_size=1"),
        *("train.global_batch_size=2", "train.steps=8", "train.eval_batches=1", "train.eval_interval=0", "train.checkpoint_interval=3"),
        *("train.warmup_steps=0", "log.tensorboard=false", "log.html=false", "optimizer.use_distributed_optimizer=true"),
    ]


def kept_in(config: RunConfig) -> Path:
    """The folder of a run on this node."""
    (folder,) = Path(config.train.local_checkpoint_folder).glob(f"{Path(config.output).name}-*")
    return folder


def killed_after_four(config: RunConfig) -> None:
    """Train, and die as step 6 begins and both files of step 4 are there."""
    original = _data.step_batches

    def dies(*arguments: Any) -> Any:
        for number, batches in enumerate(original(*arguments)):
            if number == 5 and len(arguments) > 5:
                while len(list(kept_in(config).glob("step_00000004-r*.json"))) < 2:
                    time.sleep(0.01)
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batches

    _data.step_batches = dies
    train_rank(config, "cpu")


def rows(config: RunConfig) -> list[tuple[int, float, float]]:
    lines = (Path(config.output) / "train.jsonl").read_text(encoding="ascii").splitlines()
    return [(row["step"], row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


def go_on(config: RunConfig) -> tuple[list[int], str]:
    """Train to the end; the steps of the report, and what was printed."""
    with redirect_stdout(io.StringIO()) as printed:
        trained = train_rank(config, "cpu")
    return [step for step, _ in trained.history.recent], printed.getvalue()


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_killed_run_goes_on_from_the_newest_step_that_is_whole(world, tmp_path: Path) -> None:
    base = override(recipe("gpt_tiny"), [*changes(tmp_path), f"output={tmp_path}/unbroken"])
    local = [f"train.local_checkpoint_folder={tmp_path}/node", "train.local_checkpoint_interval=2"]
    config = override(base, [f"output={tmp_path}/run", *local])
    world(go_on, config=base)
    unbroken = rows(base)

    with pytest.raises(AssertionError, match="died without a word"):
        world(killed_after_four, config=config)
    for name in ("run", "node"):
        shutil.copytree(tmp_path / name, tmp_path / f"spare_{name}")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000003"]
    assert rows(config) == unbroken[:5]

    # Step 4 is on the node.
    steps, printed = world(go_on, config=config)[0]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert f"goes on from step 4 in {kept_in(config)}\n" in printed
    assert rows(config) == [*unbroken[:5], *unbroken[4:]], "the bits of a run that was not killed"
    # The last step is saved, so the nodes keep none.
    assert (tmp_path / "run" / "checkpoints" / "step_00000008").is_dir() and not list(kept_in(config).iterdir())

    # One rank's file is gone.
    for name in ("run", "node"):
        shutil.rmtree(tmp_path / name)
        shutil.move(tmp_path / f"spare_{name}", tmp_path / name)
    for path in kept_in(config).glob("step_00000004-r00001*"):
        path.unlink()
    _, printed = world(go_on, config=config)[0]
    assert f"goes on from step 3 of {config.output}/checkpoints: in {kept_in(config)} of step 4 the files of ranks [1] are gone" in printed
    assert rows(config) == [*unbroken[:5], *unbroken[3:]]


@pytest.mark.journey
def test_one_process_needs_no_saved_step_and_the_model_of_the_kept_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    local = [f"train.local_checkpoint_folder={tmp_path}/node", "train.local_checkpoint_interval=2", "train.steps=4", "plan.dp=1"]
    config = override(recipe("gpt_tiny"), [*changes(tmp_path), *local, f"output={tmp_path}/run", "train.checkpoint_interval=0"])

    def fails(*arguments: Any) -> Any:
        for number, batches in enumerate(original(*arguments)):
            if number == 3 and len(arguments) > 5:
                while not list(kept_in(config).glob("*.json")):
                    time.sleep(0.01)
                raise OSError("the file system is gone")
            yield batches

    original = _data.step_batches
    with monkeypatch.context() as patch:
        patch.setattr(_data, "step_batches", fails)
        with pytest.raises(OSError, match="is gone"):
            train_rank(config, "cpu")
    with pytest.raises(ValueError, match=r"step 2 in .* holds the weights of another model: model.rotary_base=10000.0? there, 500.0? here"):
        train_rank(override(config, ["model.rotary_base=500"]), "cpu")
    # It counts where one is required, though no step outlives the node.
    train_rank(override(config, ["load.required=true"]), "cpu")
    assert "goes on from step 2 in " in capsys.readouterr().out
    assert [step for step, *_ in rows(config)] == [1, 2, 3, 3, 4]
    # A run that begins in its place has other steps, and none on the node.
    shutil.rmtree(Path(config.output) / "checkpoints")
    shutil.rmtree(tmp_path / "node")
    with pytest.raises(ValueError, match=r"load.required=true, and .*run/checkpoints or .*node/run-\w+ holds no checkpoint; set output"):
        train_rank(override(config, ["load.required=true"]), "cpu")
    shutil.rmtree(config.output)
    with pytest.raises(ValueError, match=r"load.required=true, and .*run/checkpoints holds no checkpoint; set output"):
        train_rank(override(config, ["load.required=true"]), "cpu")
    assert not Path(config.output).exists()
    train_rank(config, "cpu")
    assert "goes on" not in capsys.readouterr().out and [step for step, *_ in rows(config)] == [1, 2, 3, 4]
    with pytest.raises(ValueError, match=r"train.local_checkpoint_copies=2 must be at most the number of nodes, 1; lower it"):
        train_rank(override(config, ["train.local_checkpoint_copies=2", f"output={tmp_path}/other"]), "cpu")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["train.local_checkpoint_interval=5"], r"local_checkpoint_interval=5 and local_checkpoint_folder='' go together; set both"),
        (["train.local_checkpoint_folder=/dev/shm/x"], "go together"),
        (["train.local_checkpoint_interval=-1"], "must not be negative"),
        (["train.local_checkpoints_kept=0"], "local_checkpoints_kept=0 must be at least 1"),
        (
            ["train.local_checkpoint_interval=5", "train.local_checkpoint_folder=x", "lora.rank=2", "load.path=x"],
            "lower train.checkpoint_interval",
        ),
    ],
)
def test_choices_that_do_not_go_together_are_refused(change: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        override(recipe("gpt_tiny"), change)
