# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The command: it starts fast, names its verbs, and ends with one set of exit codes."""

import errno
import importlib
import io
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest

import mcore_tools
from mcore_ckpt import CheckpointingException
from mcore_tools.cli import VERBS, Verb, main
from mcore_tools.distill import DistillConfig
from mcore_tools.eagle import EagleRun
from mcore_tools.exit_code import exit_code, under_way
from mcore_tools.joint import JointConfig
from mcore_tools.recipes import RunConfig, list_fields, override, recipe

TIMED = """
import sys, time
from mcore_tools.cli import main
assert main(["--help"]) == 0
print("torch" in sys.modules, time.process_time(), file=sys.stderr)
"""


def test_help_names_every_verb_in_half_a_second_without_torch() -> None:
    done = [subprocess.run([sys.executable, "-c", TIMED], capture_output=True, text=True, check=True) for _ in range(3)]
    for name, verb in VERBS.items():
        assert f"  {name} " in done[0].stdout and verb.summary in done[0].stdout
    assert {one.stderr.split()[0] for one in done} == {"False"}
    assert min(float(one.stderr.split()[1]) for one in done) < 0.5


def test_each_verb_has_a_program() -> None:
    for name, verb in VERBS.items():
        assert callable(verb.load()), name
        assert bool(verb.module) != bool(verb.script)


@pytest.mark.parametrize("name", sorted(VERBS))
def test_a_verb_shows_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    own = f"mcore {name}" if VERBS[name].module else VERBS[name].script
    words = " ".join(capsys.readouterr().out.split())
    assert words.startswith(f"usage: {own} ")
    listed = "--help-fields [PREFIX] list the fields that --set takes, with type, default, meaning and unit, and end"
    assert (" --set PATH=VALUE " in words) == (listed in words)


@pytest.mark.parametrize(
    ("name", "part", "line", "words"),
    [
        ("train", "train.check", "train.checkpoint_interval=0  (int)", "Steps between checkpoints; 0 for one at the end."),
        ("sft", "plan", "plan.dp=1  (int)", "data-parallel replicas of the dense view."),
        (
            "rl",
            "rl.gen",
            "rl.generation_args.max_tokens=32  (int or None)",
            "Tokens of an answer at most; None for what the engine allows.",
        ),
        ("distill", "student.opt", "student.optimizer.lr=0.003  (float)", "Learning rate of a step that is not given another one."),
        ("eagle", "run.moe", "run.moe=none  (MoEConfig or None)", "None for dense feed-forwards."),
    ],
)
def test_a_verb_lists_the_fields_that_it_takes(name: str, part: str, line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help-fields", part])
    lines = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and f"    {words}" == lines[lines.index(line) + 1]
    assert all(one.startswith((part, "    ")) for one in lines)


def test_a_prefix_of_no_field_is_two_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--help-fields", "train.checkpiont"])
    assert end.value.code == 2 and "no field begins so; did you mean 'train.checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("config", [RunConfig, DistillConfig, EagleRun, JointConfig])
def test_every_field_says_what_it_means(config: type) -> None:
    fields = list(list_fields(config))
    assert len(fields) > 50 and not [field.path for field in fields if not field.words]


def test_shown_defaults_are_those_of_the_run_and_are_read_back() -> None:
    run = recipe("moe_tiny")
    shown = [field for field in list_fields(run) if field.default != "required"]
    # Sizes of the parts that are none here, and what needs another field.
    set_here = [field for field in shown if field.path.partition(".")[0] in ("moe", "plan", "train", "fsdp", "log", "guard")]
    assert len(set_here) > 50
    assert override(run, [f"{field.path}={field.default}" for field in set_here]) == run


def test_version_is_of_the_application_and_its_wheels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"mcore-tools {version('mcore-tools')}" and len(lines) == 7


@pytest.mark.parametrize("name", sorted(VERBS))
def test_each_verb_says_whose_version_it_has(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--version"])
    wheel = "mcore-tools" if VERBS[name].module else "mcore-ckpt" if name == "convert" else "mcore-parallel"
    assert end.value.code == 0 and capsys.readouterr().out == f"{wheel} {version(wheel)}\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["trian"], "there is no verb 'trian'; did you mean 'train'?"),
        (["--vresion"], "there is no verb '--vresion'; one of: quickstart, preprocess, train"),
        ([], "there is no verb; one of: quickstart"),
    ],
)
def test_what_is_no_verb_is_one_line_and_two(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out = capsys.readouterr()
    assert reason in out.err and not out.out


def test_an_unknown_option_of_a_verb_is_two() -> None:
    with pytest.raises(SystemExit) as end:
        main(["train", "--recipee", "gpt_tiny"])
    assert end.value.code == 2


def test_arguments_and_exit_code_are_those_of_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(arguments: Sequence[str]) -> int:
        assert arguments == ["--recipe", "x"]
        return 16

    monkeypatch.setattr(Verb, "load", lambda self: program)
    assert main(["train", "--recipe", "x"]) == 16


def test_an_interrupted_verb_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def program(arguments: Any) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(Verb, "load", lambda self: program)
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_library_that_is_not_installed_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def start(arguments: object) -> int:
        raise ModuleNotFoundError('uvicorn is not installed: pip install "mcore-inference[server]"', name="uvicorn")

    monkeypatch.setattr("mcore_tools.serve.main", start)
    assert main(["serve", "there"]) == 2
    assert capsys.readouterr().err == 'error: uvicorn is not installed: pip install "mcore-inference[server]"\n'


@pytest.mark.journey
def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m mcore_tools doctor --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "141" and done.stderr == ""


MODULES = sorted(
    f"mcore_tools.{path.stem}"
    for path in Path(mcore_tools.__file__).parent.glob("*.py")
    if "__main__" in path.read_text() and path.stem != "__main__"
)
SCRIPTS = sorted(entry.value for entry in entry_points(group="console_scripts") if entry.name.startswith("mcore"))


@pytest.mark.parametrize("name", [*MODULES, *SCRIPTS])
def test_each_program_that_is_started_alone_ends_without_a_word_when_nobody_reads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unread(io.TextIOWrapper):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    module, _, function = name.partition(":")
    program = getattr(importlib.import_module(module), function or "main")
    with (tmp_path / "stdout").open("wb") as file:
        monkeypatch.setattr("sys.stdout", Unread(file))
        assert program(["--version"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", [*MODULES, *SCRIPTS])
@pytest.mark.parametrize("words", [["--no-such-option"], ["--versoin", "nothing"]], ids=["option", "more"])
def test_each_program_refuses_what_it_cannot_use_in_one_line_with_two(
    name: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    module, _, function = name.partition(":")
    program = getattr(importlib.import_module(module), function or "main")
    try:
        code = program(words)
    except SystemExit as end:
        code = end.code
    out = capsys.readouterr()
    assert (code, out.out) == (2, "") and out.err.startswith("error: ") and out.err.count("\n") == 1, out


@pytest.mark.parametrize(
    "words",
    [
        ["compare", "nowhere", "nowhere"],
        ["convert", "inspect", "nowhere"],
        ["convert", "verify", "nowhere"],
        ["convert", "export-hf", "nowhere", "out"],
        ["plan", "--model", "nowhere", "--gpus", "8", "--sequence", "64", "--global-batch", "8"],
        ["preprocess", "--input", "nowhere", "--output-prefix", "out", "--tokenizer", "byte"],
    ],
    ids=" ".join,
)
def test_an_input_that_is_not_there_is_two_for_each_command_of_a_wheel(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and "nowhere" in message and not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*MODULES, *SCRIPTS])
def test_each_program_that_is_interrupted_says_so_with_its_own_code(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    module, _, function = name.partition(":")
    program = getattr(importlib.import_module(module), function or "main")
    monkeypatch.setattr("argparse.ArgumentParser.parse_args", stop)
    monkeypatch.setattr(Verb, "load", lambda self: stop)
    assert program(["train"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("steps=0"), 2),
        (FileNotFoundError("nowhere"), 2),
        (CheckpointingException("damaged"), 2),
        (ModuleNotFoundError("uvicorn"), 2),
        (OSError(errno.ENOSPC, "no space left"), 1),
        (RuntimeError("a rank is gone"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exit_code_says_whether_work_had_begun(error: Exception, code: int) -> None:
    assert exit_code(error) == code
    with pytest.raises(type(error)) as caught, under_way():
        raise error
    assert exit_code(caught.value) == 1


@pytest.mark.journey
def test_a_printing_program_ends_without_a_word_when_nobody_reads() -> None:
    # Unbuffered, so that the print fails and not the end.
    line = f"{sys.executable} -u -m mcore_tools.train --recipe gpt_tiny --write-config - | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")


@pytest.mark.parametrize("name", ["train", "serve", "generate", "eval", "chat"])
def test_what_a_verb_says_of_its_exit_codes_is_what_all_of_them_mean(name: str) -> None:
    said = " ".join(str(importlib.import_module(VERBS[name].module).__doc__).split())
    assert ("2 an input cannot be used" in said or "2 it was refused" in said) and "1 something was refused" not in said
