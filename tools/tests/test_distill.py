# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A small student comes close to a trained teacher, which runs beside it or was written down."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mcore_ckpt import CheckpointingException, CheckpointManager
from mcore_parallel import ProcessGroups, load_communicator_options
from mcore_parallel.training import STOPPED_EXIT_CODE, model_state
from mcore_parallel.training.distill import LogProbStoreError
from mcore_tools.assembly import build_stage
from mcore_tools.distill import DistillConfig, distill, distill_config, distill_rank, main, record_rank
from mcore_tools.recipes import DataConfig, RunConfig, override, recipe
from mcore_tools.training import Trained, fill_model, train_rank, trained_run, trained_weights
from tests.support.corpora import write_corpus
from tests.support.published import write_published

TEXT = "a student hears what its teacher finds likely, and every other word it could have been. "


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run that has learnt the text."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, TEXT, num_documents=20, vocab_size=290)
    config = override(
        recipe("gpt_tiny"),
        [
            *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.steps=16"),
            *("train.seq_len=32", "train.micro_batch_size=4", "train.warmup_steps=2", "train.eval_interval=0", "train.eval_batches=1"),
            *("optimizer.lr=1e-2", f"output={folder / 'teacher'}", "log.tensorboard=false", "log.html=false"),
        ],
    )
    data = DataConfig(prefix=str(folder / "corpus"), tokenizer=str(folder / "tokenizer"), split="80,20,0")
    config = dataclasses.replace(config, data=data)
    train_rank(config, "cpu")
    return config


def student(teacher: RunConfig, output: Path) -> RunConfig:
    return override(teacher, ["model.num_layers=1", "model.hidden_size=16", f"output={output}"])


def rows(config: RunConfig) -> list[dict[str, float]]:
    lines = (Path(config.output) / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def test_the_student_approaches_a_teacher_that_runs(teacher: RunConfig, tmp_path: Path) -> None:
    config = DistillConfig(student=student(teacher, tmp_path), teacher=teacher, pairs="layers.0=layers.1,final_norm=final_norm=mse")
    trained = distill_rank(config, "cpu")
    curve = rows(config.student)
    first, last = curve[0], curve[-1]
    # At the beginning the divergence is that from an even guess.
    assert last["logits_distillation_loss"] < 0.6 * first["logits_distillation_loss"]
    assert last["intermediate_distillation_loss"] < first["intermediate_distillation_loss"]
    # The labels were learnt without being looked at.
    assert last["lm_loss"] < first["lm_loss"] - 0.5
    assert trained.validation_loss < first["loss"]
    again = distill_rank(dataclasses.replace(config, student=override(config.student, ["train.steps=17"])), "cpu")
    assert len(rows(config.student)) == 17 and again.validation_loss < trained.validation_loss + 0.1


def test_a_teacher_of_other_fields_than_its_step_is_refused_by_them(teacher: RunConfig, tmp_path: Path) -> None:
    other = override(teacher, ["model.rotary_base=77", "model.norm_epsilon=0.1"])
    with pytest.raises(ValueError, match=r"^teacher: .*model.rotary_base=10000.* there, 77.* here") as refused:
        distill_rank(DistillConfig(student=student(teacher, tmp_path), teacher=other), "cpu")
    assert "model.norm_epsilon=" in str(refused.value) and not (tmp_path / "checkpoints").exists()


def test_a_step_of_a_teacher_is_that_which_is_named(teacher: RunConfig, tmp_path: Path) -> None:
    taught = override(teacher, ["train.steps=3", "train.checkpoint_interval=1", f"output={tmp_path / 'teacher'}"])
    train_rank(taught, "cpu")
    named = override(taught, ["output=other", f"load.path={taught.output}"])
    steps = CheckpointManager(tmp_path / "teacher" / "checkpoints")
    assert str(trained_weights("teacher", named)) == str(steps.folder(3))
    assert str(trained_weights("teacher", override(named, ["load.step=2"]))) == str(steps.folder(2))
    with pytest.raises(ValueError, match=r"^teacher: load.step=7 is not in load.path='.*', which has \[1, 2, 3\]; name one of them"):
        trained_weights("teacher", override(named, ["load.step=7"]))


def test_a_published_model_teaches(teacher: RunConfig, tmp_path: Path) -> None:
    published = trained_run(str(write_published(tmp_path / "llama", initializer_range=0.2)))
    assert published.model.hidden_size == 64 and published.load.path == str(tmp_path / "llama")
    runs = override(student(teacher, tmp_path / "runs"), ["train.steps=8"])
    distill_rank(DistillConfig(student=runs, teacher=published), "cpu")
    curve = [row["logits_distillation_loss"] for row in rows(runs)]
    assert len(curve) == 8 and curve[-1] < 0.9 * curve[0]
    # Its own run, by its folder, is the run that its recipe builds.
    own = trained_run(teacher.output)
    assert own.model == teacher.model and str(trained_weights("teacher", own)) == str(trained_weights("teacher", teacher))
    with pytest.raises(ValueError, match=r"^teacher: .*holds the weights of another model: model.rotary_base"):
        trained_weights("teacher", override(published, ["model.rotary_base=77"]))


def test_a_teacher_is_read_in_a_wider_dtype(teacher: RunConfig, tmp_path: Path) -> None:
    """Its weights are widened, as those that a run begins with."""
    narrow = override(teacher, ["train.dtype=bfloat16", "train.steps=3", f"output={tmp_path / 'narrow'}"])
    train_rank(narrow, "cpu")
    runs = override(student(teacher, tmp_path / "runs"), ["train.steps=3"])
    wide = dataclasses.replace(narrow, train=dataclasses.replace(narrow.train, dtype="float32"))
    trained = distill_rank(DistillConfig(student=runs, teacher=wide), "cpu")
    assert trained.validation_loss > 0 and len(rows(runs)) == 3


def test_weights_that_are_missing_are_named_unless_they_are_yet_to_be_trained(teacher: RunConfig) -> None:
    groups, device = ProcessGroups.single(), torch.device("cpu")
    weights = trained_weights("teacher", teacher)
    model = build_stage(override(teacher, ["model.mtp_num_layers=1", "train.seed=9"]), groups, device)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    with pytest.raises(
        CheckpointingException, match=r"has no weights for mtp\..*; name the weights of a whole model, or make model theirs"
    ):
        fill_model(model_state(model, groups), weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    fill_model(model_state(model, groups), weights, untrained=("mtp.",))
    kept = {name for name, tensor in model.named_parameters() if torch.equal(tensor, before[name]) and tensor.unique().numel() > 1}
    assert kept and all(name.startswith("mtp.") for name in kept), kept


def test_the_manifest_of_a_teacher_is_asked_for_once(teacher: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def opening(name: str, run: RunConfig) -> Any:
        opened.append(name)
        return trained_weights(name, run)

    monkeypatch.setattr("mcore_tools.distill.trained_weights", opening)
    runs = override(student(teacher, tmp_path / "runs"), ["train.steps=1", "train.warmup_steps=0"])
    config = DistillConfig(student=runs, teacher=teacher, store=str(tmp_path / "store"), top_k=320)
    record_rank(config, "cpu")
    assert opened == ["teacher"]
    distill_rank(config, "cpu")
    assert opened == ["teacher"]


def test_a_recorded_teacher_teaches_as_the_one_that_runs(teacher: RunConfig, tmp_path: Path) -> None:
    runs = override(student(teacher, tmp_path / "runs"), ["train.steps=3"])
    config = DistillConfig(student=runs, teacher=teacher, top_k=320)
    distill_rank(config, "cpu")
    recorded = dataclasses.replace(
        config, student=dataclasses.replace(runs, output=str(tmp_path / "store_run")), store=str(tmp_path / "store")
    )
    assert record_rank(recorded, "cpu") > 3 * 4
    assert record_rank(recorded, "cpu") == 0
    distill_rank(recorded, "cpu")
    assert [row["loss"] for row in rows(recorded.student)] == pytest.approx([row["loss"] for row in rows(runs)], rel=1e-4)


def test_a_store_takes_no_samples_of_weights_that_were_trained_anew(teacher: RunConfig, tmp_path: Path) -> None:
    again = override(teacher, ["train.steps=1", "train.warmup_steps=0", f"output={tmp_path / 'again'}"])
    train_rank(again, "cpu")
    few = ["train.steps=1", "train.warmup_steps=0"]
    config = DistillConfig(student=override(student(teacher, tmp_path / "runs"), few), teacher=again, store=str(tmp_path / "store"))
    record_rank(config, "cpu")
    shutil.rmtree(again.output)
    train_rank(override(again, ["train.seed=9"]), "cpu")
    with pytest.raises(LogProbStoreError, match="was made with .*; write to another folder"):
        record_rank(config, "cpu")
    # A store of before the weights had a digest.
    path = tmp_path / "store" / "store.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"teacher": stored["teacher"].rpartition(" ")[0]}))
    with pytest.raises(LogProbStoreError, match="names the place of its teacher alone, .*, and not which weights") as caught:
        record_rank(config, "cpu")
    [now] = re.findall(r'store\.json to ("[^"]+"),', str(caught.value))
    path.write_text(json.dumps(stored | {"teacher": json.loads(now)}))
    record_rank(config, "cpu")


def test_the_command(teacher: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["distill", "--recipe", "gpt_tiny", "--teacher", "gpt_tiny"])
    assert main() == 2
    assert "student.data.prefix is empty" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["distill", "--recipe", "gpt_tiny", "--teacher", "gpt_tiny", "--set", "pairs=layers.0"])
    assert main() == 2
    assert "pairs holds 'layers.0'; write STUDENT=TEACHER" in capsys.readouterr().err
    fields = {"model.num_layers": 2, "model.hidden_size": 32, "model.ffn_hidden_size": 64, "model.vocab_size": 320}
    changes = {f"{name}.{field}": value for name in ("student", "teacher") for field, value in fields.items()}
    changes |= {"student.data.prefix": teacher.data.prefix, "student.data.tokenizer": teacher.data.tokenizer}
    changes |= {"teacher.output": teacher.output, "student.output": tmp_path / "student", "student.data.split": "80,20,0"}
    changes |= {
        f"student.train.{field}": value for field, value in {"steps": 2, "seq_len": 32, "eval_batches": 1, "warmup_steps": 0}.items()
    }
    words = [word for path, value in changes.items() for word in ("--set", f"{path}={value}")]
    words += ["--set", f"store={tmp_path / 'store'}", "--set", "top_k=8"]
    for more, message in ((["--record"], "the teacher ran over"), ([], "validation loss")):
        monkeypatch.setattr(sys, "argv", ["distill", "--recipe", "gpt_tiny", "--teacher", "gpt_tiny", *words, *more])
        assert main() == 0
        assert message in capsys.readouterr().out
    assert "logits_distillation_loss" in (tmp_path / "student" / "report.html").read_text(encoding="utf-8")


@pytest.mark.journey
def test_vocabulary_and_tokenizer_are_those_of_the_teachers_folder(
    teacher: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for folder, tokenizer in (
        (teacher.output, f"{teacher.output}/tokenizer"),
        (str(write_published(tmp_path / "llama")), tmp_path / "llama"),
    ):
        config = distill_config("gpt_tiny", folder)
        assert config.student.model.vocab_size == config.teacher.model.vocab_size == 320
        assert config.student.data.tokenizer == str(tokenizer)
        # A step of it, and what names another one.
        step = next(Path(folder).glob("checkpoints/step_*"), None)
        assert step is None or distill_config("gpt_tiny", str(step)).student.data.tokenizer == str(tokenizer)
    few = {"steps": 1, "seq_len": 32, "eval_batches": 1, "warmup_steps": 0}
    changes = {f"train.{field}": value for field, value in few.items()} | {"data.prefix": teacher.data.prefix, "model.num_layers": 1}
    sets = [word for path, value in changes.items() for word in ("--set", f"student.{path}={value}")]
    sets += ["--set", f"student.output={tmp_path / 'student'}"]
    assert main(["--recipe", "gpt_tiny", "--teacher", teacher.output, *sets]) == 0
    (tmp_path / "llama" / "tokenizer.json").unlink()
    assert main(["--recipe", "gpt_tiny", "--teacher", str(tmp_path / "llama"), *sets]) == 2
    assert "student.data.tokenizer is empty" in capsys.readouterr().err


def test_fields_of_a_run_that_goes_on_are_refused_for_a_teacher(teacher: RunConfig) -> None:
    path = f"load.path={teacher.output}"
    for changes, words in (
        (["load.take=all"], "teacher.load.take=all is for a run that trains these weights.*set teacher.load.take=weights"),
        (["load.required=true"], "teacher.load.required=true is for .*set teacher.load.required=false"),
        (["load.adapter=Folder"], "teacher.load.adapter=Folder is for .*set teacher.load.adapter=$"),
        (["load.upcycle=true", "moe.num_moe_experts=2"], "teacher.load.upcycle=true is for"),
        (["lora.rank=2"], "teacher.lora is set, and a teacher has no adapters"),
    ):
        with pytest.raises(ValueError, match=words):
            DistillConfig(student=teacher, teacher=override(teacher, [path, *changes]))


def test_a_student_follows_its_fields_of_the_world(teacher: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic algorithms while it learns, and the choices of NCCL for its groups."""
    (tmp_path / "nccl.json").write_text('{"dp": {"max_ctas": 4}}', encoding="utf-8")
    seen: list[Any] = []
    build = ProcessGroups.build

    def building(*arguments: Any, options: Any = None) -> ProcessGroups:
        seen.extend([torch.are_deterministic_algorithms_enabled(), options])
        return build(*arguments, options=options)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(ProcessGroups, "build", building)
    few = ["train.steps=1", "train.warmup_steps=0", "train.deterministic=true", f"communicators={tmp_path / 'nccl.json'}"]
    assert distill(DistillConfig(student=override(student(teacher, tmp_path / "runs"), few), teacher=teacher)) == 0
    assert seen == [True, load_communicator_options(tmp_path / "nccl.json")]
    assert not torch.are_deterministic_algorithms_enabled()


def test_choices_that_do_not_go_together_are_refused() -> None:
    tiny = recipe("gpt_tiny")
    with pytest.raises(
        ValueError, match=r"student.model.vocab_size=2048 and teacher.model.vocab_size=4096 differ; set student.model.vocab_size=4096"
    ):
        DistillConfig(student=tiny, teacher=override(tiny, ["model.vocab_size=4096"]))
    with pytest.raises(ValueError, match="student must predict the next token; set student.masked=none"):
        DistillConfig(student=recipe("bert_tiny"), teacher=tiny)
    with pytest.raises(ValueError, match="targets=mtp needs heads that predict further tokens"):
        DistillConfig(student=tiny, teacher=tiny, targets="mtp")
    with pytest.raises(ValueError, match="quantize=FP8_DEFAULT_CFG begins with the teacher's weights"):
        DistillConfig(student=override(tiny, ["model.num_layers=1"]), teacher=tiny, quantize="FP8_DEFAULT_CFG")
    with pytest.raises(ValueError, match="a store holds likely tokens only"):
        DistillConfig(student=tiny, teacher=tiny, store="folder", reverse=True)
    with pytest.raises(ValueError, match="student.data_parallel='fsdp' has no distillation"):
        DistillConfig(student=dataclasses.replace(tiny, data_parallel="fsdp"), teacher=tiny)


def test_torchrun_is_told_why_a_student_ended(teacher: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def reason(exit_code: int) -> str:
        return ProcessFailure(local_rank=0, pid=1, exitcode=exit_code, error_file=str(tmp_path / "error.json")).message["message"]

    assert main(["--recipe", "gpt_tiny", "--teacher", "gpt_tiny", "--set", "store=no", "--set", "reverse=true"]) == 2
    assert "a store holds likely tokens only" in reason(1)

    def stopped(*parts: Any) -> Trained:
        return distill_rank(*parts[:-1], stop=lambda: True)

    monkeypatch.setattr("mcore_tools.distill.distill_rank", stopped)
    config = DistillConfig(student=student(teacher, tmp_path / "student"), teacher=teacher)
    assert distill(config) == STOPPED_EXIT_CODE
    assert reason(STOPPED_EXIT_CODE) == "no failure: stopped and saved after step 1; start it again to go on"


def test_a_student_ends_after_its_minutes_and_takes_no_field_that_it_would_not_follow(teacher: RunConfig, tmp_path: Path) -> None:
    run = student(teacher, tmp_path / "student")
    short = override(run, ["train.stop_after_minutes=1e-9"])
    assert distill_rank(DistillConfig(student=short, teacher=teacher), "cpu").stopped_at == 1
    for assignment, field in (("rerun.mode=report", "rerun"), ("dumps.every=1", "dumps"), ("log.timers_interval=1", "log.timers_interval")):
        config = DistillConfig(student=override(run, [assignment]), teacher=teacher)
        with pytest.raises(ValueError, match=f"{field} is for `mcore train`"):
            distill_rank(config, "cpu")
