# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a user can get wrong at the command line: one line that says so, exit code 2, nothing written, nothing lost."""

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_parallel.data import ByteTokenizer, preprocess, train_bpe
from mcore_tools import quickstart, train
from mcore_tools.cli import main


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A tokenizer and a small corpus; ``broken`` is the corpus with a cut index."""
    folder = tmp_path / "data"
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    tokenizer = train_bpe(["to be or not to be"], 300, folder / "tokenizer")
    preprocess([tmp_path / "text.txt"], folder / "good", tokenizer)
    preprocess([tmp_path / "text.txt"], folder / "broken", ByteTokenizer())
    (folder / "broken.idx").write_bytes((folder / "broken.idx").read_bytes()[:-5])
    return folder


def fails(main: Callable[[], int], arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ``main`` prints about its ``arguments``."""
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    assert main() == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["plan.tp=2"], ["tp=2", "dp=1", "= 2 ranks", "world has 1"]),
        (["plan.tp=3"], ["tp=3 must divide", "lower tp"]),
        (["data.prefix="], ["data.prefix is empty", "mcore-preprocess"]),
        (["data.prefix={data}/nothing"], ["data.prefix=", "nothing.idx", "mcore-preprocess"]),
        (["data.prefix={data}/broken"], ["broken.idx", "truncated"]),
        (["data.tokenizer={data}/nothing"], ["nothing", "tokenizer.json"]),
        (["data.split=100,0,0"], ["data.split='100,0,0'"]),
        (["model.vocab_size=64"], ["model.vocab_size=64", "is smaller than"]),
        (["train.stepz=3"], ["did you mean 'steps'"]),
    ],
    ids=lambda value: value[0].split("/")[-1] if isinstance(value, list) else None,
)
def test_pretraining_names_what_cannot_be(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: list[str], words: list[str]
) -> None:
    output = tmp_path / "run"
    assignments = [f"data.prefix={corpus}/good", f"data.tokenizer={corpus}/tokenizer", f"output={output}", *changes]
    arguments = [word for change in assignments for word in ("--set", change.format(data=corpus))]
    message = fails(train.main, ["--recipe", "gpt_tiny", *arguments], monkeypatch, capsys)
    assert all(word in message for word in words), message
    # The index of the samples is a cache that the next run uses.
    assert not output.exists() or {path.name for path in output.iterdir()} <= {"index_cache"}


def test_an_unknown_recipe_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'moe_tiny'" in fails(train.main, ["--recipe", "moe_tny"], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "{tmp}/nothing"], "nothing: no such file"),
        (["--text", "{tmp}/empty.txt"], "no document with text"),
        (["--text", "{tmp}/lines.jsonl"], "lines.jsonl:2 is no JSON"),
        (["--set", "plan.tp=4"], "--set plan: the journey chooses this itself"),
        (["--set", "moe=none"], "trains a mixture"),
        (["--set", "train.steps=0"], "steps=0 must be at least 1"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_the_quickstart_refuses_before_it_removes_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "lines.jsonl").write_text('{"text": "good"}\nnot json\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").write_text("the last one")
    filled = [word.format(tmp=tmp_path) for word in arguments]
    message = fails(quickstart.main, ["--text", str(Path(__file__)), "--output", str(tmp_path / "run"), *filled], monkeypatch, capsys)
    assert words in message
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]


def test_the_quickstart_removes_nothing_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    message = fails(quickstart.main, ["--text", str(Path(__file__)), "--output", str(tmp_path)], monkeypatch, capsys)
    assert "thesis.txt, which no quickstart wrote" in message
    assert (tmp_path / "thesis.txt").exists()


REFUSED = [
    ("serve x --max-length 0", "--max-length: 0 must be at least 2"),
    ("serve x --cache-gb 0", "--cache-gb: 0 must be above 0"),
    ("serve x --cache-gb nan", "--cache-gb: 'nan' must be a finite number"),
    ("serve x --max-waiting -1", "--max-waiting: -1 must be at least 1"),
    ("serve x --port 70000", "--port: 70000 must be 0 to 65535"),
    ("serve x --port http", "--port: 'http' must be a whole number"),
    ("serve x --drain-seconds -1", "--drain-seconds: -1 must be at least 0"),
    ("serve x --data-parallel 0", "--data-parallel: 0 must be at least 1"),
    ("serve x --token-file nothing", "--token-file: 'nothing' is no file; give the path of a file"),
    ("serve x --token-file {tmp}/empty", "/empty' is empty; write the secret into it"),
    ("serve x --join 127.0.0.1:1", "--join: '127.0.0.1:1' is neither tcp://host:port nor a file that can be read (No such"),
    ("serve x --join tcp://127.0.0.1", "--join: 'tcp://127.0.0.1' is no address; it looks like tcp://"),
    (
        "serve x --join tcp://192.0.2.1:5",
        "--join: 'tcp://192.0.2.1:5' is of another host, which takes encrypted engines only; give its --job-",
    ),
    ("serve x --join tcp://[2001:db8::1]:5", "is of another host"),
    ("serve x --join {tmp}/plain", "/plain' is no file of `mcore serve --job-file`"),
    (f"serve x --join {__file__}", "test_bad_input.py' is no file of `mcore serve --job-file`"),
    ("serve x --join {tmp}/job", "/job' is no file of `mcore serve --job-file`"),
    ("serve x --tool-call-parser none", "--tool-call-parser: invalid choice: 'none'"),
    ("serve", "the following arguments are required: checkpoint"),
    ("generate x --prompt a --max-tokens 0", "--max-tokens: 0 must be at least 1"),
    ("generate x --prompt a --temperature -1", "--temperature: -1 must be at least 0"),
    ("generate x --prompt a --max-length 1.5", "--max-length: '1.5' must be a whole number"),
    ("generate x", "give --prompt, or --input and --output"),
    ("generate x --prompt a --output b", "--input and --output go together, without --prompt"),
    ("generate x --input nowhere --output b", "--input: 'nowhere' is no file; give the path of a file"),
    ("chat x --max-tokens -3", "--max-tokens: -3 must be at least 1"),
    ("chat x --temperature inf", "--temperature: 'inf' must be a finite number"),
    ("chat x --token-file {tmp}", "is a folder; give the path of a file"),
    ("eval x --text nothing", "--text: 'nothing' is no file"),
    ("eval x --choices {tmp}", "--choices: "),
    ("eval x --limit 0 --tasks arc_easy", "--limit: 0 must be at least 1"),
    ("eval x --stride 0 --text {tmp}/empty", "--stride: 0 must be at least 1"),
    ("eval x --include nothing --tasks a", "--include: 'nothing' is no folder"),
    ("eval x --output {tmp}/a/b.json", "has no folder to lie in; make "),
    ("eval x --output {tmp}", "is a folder; add the name of a file"),
    ("train --config nothing.yaml", "--config: 'nothing.yaml' is no file"),
    ("train --recipee gpt_tiny", "unrecognized arguments: --recipee gpt_tiny; mcore train --help"),
    ("train --recipe", "--recipe: expected one argument"),
    ("rl --config nothing.yaml", "--config: 'nothing.yaml' is no file"),
    ("rl --set", "--set: expected one argument"),
    ("rl a b", "unrecognized arguments: b"),
    ("sft x", "the following arguments are required: --data"),
    ("sft --data a", "the following arguments are required: model"),
    ("sft x --data a --exports", "unrecognized arguments: --exports"),
    ("distill --recipe gpt_tiny", "the following arguments are required: --teacher"),
    ("distill --teacher gpt_tiny", "the following arguments are required: --recipe"),
    ("distill --recipe", "--recipe: expected one argument"),
    ("eagle trian --recipe gpt_tiny", "verb: invalid choice: 'trian'"),
    ("eagle train", "the following arguments are required: --recipe"),
    ("eagle train --recipe gpt_tiny more", "unrecognized arguments: more"),
    ("quickstart --iterations 2", "--iterations: 2 must be at least 3"),
    ("quickstart --iterations many", "--iterations: 'many' must be a whole number"),
    ("quickstart --steps 3", "unrecognized arguments: --steps 3"),
]


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=lambda value: value.replace("{tmp}/", ""))
def test_a_value_that_cannot_be_is_one_line_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, words: str
) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "job").write_text(json.dumps({"address": "tcp://127.0.0.1:9", "secret": "s", "public_key": "~" * 40}))
    (tmp_path / "plain").write_text(json.dumps({"address": "tcp://192.0.2.1:9", "secret": "s", "public_key": None}))
    with pytest.raises(SystemExit) as end:
        main(line.format(tmp=tmp_path).split())
    message = capsys.readouterr()
    assert end.value.code == 2 and not message.out
    assert message.err.startswith("error: ") and message.err.count("\n") == 1 and words in message.err, message.err
    assert message.err.endswith(f"mcore {line.split()[0]} --help lists what there is\n")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "job", "plain"}


def test_a_server_that_others_reach_wants_a_secret_before_it_loads(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "node7"):
        assert main(["serve", "x", "--host", host]) == 2
        assert capsys.readouterr().err == f"error: --host {host} is reachable from other machines; give --token-file, or --host 127.0.0.1\n"
    for host in ("127.0.0.1", "localhost"):
        assert main(["serve", "x", "--host", host, "--port", "0"]) == 2
        assert "x is not a checkpoint" in capsys.readouterr().err


def test_a_coordinator_at_no_address_of_its_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "::", "*"):
        assert main(["serve", "x", "--port", "0", "--coordinator-host", host, "--job-file", "job"]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: --coordinator-host {host} stands for all addresses of this host, and engines of others that")
        assert message.endswith("give the one by which they reach this host\n")


def test_a_port_that_is_taken_is_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "x", "--port", str(port)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: --host 127.0.0.1 --port {port} cannot be opened: ") and message.count("\n") == 1
    assert message.endswith("choose others, --port 0 takes a free one\n")
