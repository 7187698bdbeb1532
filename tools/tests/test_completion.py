# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What Tab offers, as bash itself says it, and the scripts of the other shells."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

from mcore_tools.cli import VERBS, main
from mcore_tools.completion import completion_script, parser_of

ASK = """
compopt() { [ "$*" = "-o nospace" ] && nospace=yes; return 0; }
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_mcore
echo "${nospace-no}"; printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "mcore"
    path.write_text(completion_script("bash"))
    return path


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mcore tr", {"train"}),
        ("mcore serve --speculation", {"--speculation", "--speculation-tokens"}),
        ("mcore train --recipe gpt_t", {"gpt_tiny"}),
        ("mcore train --set train.stepz", set()),
        ("mcore train --set lora.rank", {"lora.rank="}),
        ("mcore rl --recipe countdown_tiny --set rl.teach", {"rl.teacher="}),
        ("mcore distill --set student.train.steps", {"student.train.steps="}),
        ("mcore convert export-h", {"export-hf"}),
        ("mcore completion z", {"zsh"}),
        ("mcore generate --kv-cache-dtype f", {"fp8"}),
    ],
)
def test_tab_offers_what_can_follow(script: Path, tmp_path: Path, words: str, offered: set[str]) -> None:
    ask = ["bash", "-c", ASK, "bash", str(script), *words.split()]
    done = subprocess.run(ask, capture_output=True, text=True, check=True, cwd=tmp_path)
    nospace, *lines = done.stdout.splitlines()
    assert {line for line in lines if line} == offered and not done.stderr
    # The value comes right behind.
    assert nospace == ("yes" if any(line.endswith("=") for line in offered) else "no")


def test_tab_offers_files(script: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    ask = ["bash", "-c", ASK, "bash", str(script), "mcore", "train", "--config", "ru"]
    assert "run.yaml" in subprocess.run(ask, capture_output=True, text=True, check=True, cwd=tmp_path).stdout.splitlines()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_verbs_options_and_fields(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb.summary.split(":")[0] in script for verb in VERBS.values())
    assert "train.checkpoint_interval=" in script and "student.optimizer.lr=" in script and "moe_tiny" in script
    assert ("--speculation-tokens" if shell == "zsh" else "-l speculation-tokens") in script


def test_a_parser_is_looked_at_and_left_as_it_was() -> None:
    for verb in VERBS.values():
        assert "--version" in parser_of(verb).format_help()
    with pytest.raises(SystemExit) as end:
        main(["train", "--recipee", "x"])
    assert end.value.code == 2


def test_without_its_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["completion", "bash"]) == 2
    assert 'pip install "mcore-tools[completion]"' in capsys.readouterr().err
