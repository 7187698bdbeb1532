# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sampling settings and chats of `mcore generate` are those of the engine, or refused before a model is loaded."""

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mcore_ckpt import CheckpointManager
from mcore_inference import DynamicInferenceEngine, EngineRunner, InvalidTokenError, NonFiniteLogitsError, SamplingParams, StepFailedError
from mcore_inference.sampling import StructuredOutput
from mcore_inference.text import chat_tokens
from mcore_parallel import ProcessGroups
from mcore_parallel.data import train_bpe
from mcore_parallel.training import model_state
from mcore_tools import cli
from mcore_tools.assembly import build_model
from mcore_tools.recipes import DataConfig, override, recipe
from mcore_tools.serving import Outcome, PromptFile, continue_prompts, open_engine
from mcore_tools.training import run_assets

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one saved step."""
    place = tmp_path_factory.mktemp("run")
    train_bpe(["user: words that a chat is made of. assistant:\n" * 20], 290, place / "words")
    sizes = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.seq_len=96")
    config = override(recipe("gpt_tiny"), [*sizes, "train.dtype=float32"])
    config = dataclasses.replace(config, data=DataConfig(tokenizer=str(place / "words")))
    manager = CheckpointManager(place / "checkpoints", assets=run_assets(config))
    manager.save(1, model_state(build_model(config, ProcessGroups.single(), "cpu"), ProcessGroups.single()))
    return place / "checkpoints"


@pytest.fixture(scope="module")
def engine(folder: Path) -> DynamicInferenceEngine:
    return open_engine(folder, "cpu", cache_gb=0.01)


def continued(folder: Path, tmp_path: Path, lines: list[dict[str, Any]], *words: str) -> dict[int, dict[str, Any]]:
    source, target = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert cli.main(["generate", str(folder), "--cache-gb", "0.01", "--input", str(source), "--output", str(target), *words]) == 0
    return {entry["number"]: entry for entry in map(json.loads, target.read_text(encoding="utf-8").splitlines())}


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "stop": (
        "--max-tokens 12 --stop e --stop a --include-stop-str-in-output",
        {"stop_words": ["e", "a"], "detokenize_stop_sequence": True},
    ),
    "stop token": ("--max-tokens 12 --stop-token-id 97 --stop-token-id 5", {"stop_token_ids": [97, 5]}),
    "penalties": (
        "--max-tokens 12 --repetition-penalty 1.5 --presence-penalty 0.5 --frequency-penalty 2 --min-tokens 9 --ignore-eos",
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 2, "min_tokens": 9, "ignore_eos": True},
    ),
    "ids": ("--max-tokens 12 --allowed-token-id 70 --allowed-token-id 71", {"allowed_token_ids": [70, 71]}),
    "regex": ("--max-tokens 12 --regex [ab]{3}", {"structured_output": StructuredOutput(regex="[ab]{3}")}),
    "choice": ("--max-tokens 12 --choice yes --choice no", {"structured_output": StructuredOutput(choices=["yes", "no"])}),
    "drawn": (
        "--max-tokens 12 --temperature 1 --top-k 1 --top-p 0.5 --min-p 0.1",
        {"temperature": 1.0, "top_k": 1, "top_p": 0.5, "min_p": 0.1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_flags_are_the_settings_of_the_engine(kind: str, folder: Path, tmp_path: Path, engine: DynamicInferenceEngine) -> None:
    words, fields = SETTINGS[kind]
    (entry,) = continued(folder, tmp_path, [{"prompt": "words that"}], *words.split()).values()
    params = SamplingParams(**{"temperature": 0, "num_tokens_to_generate": 12, **fields})
    assert entry["text"] == engine.generate(["words that"], params)[0].generated_text
    settings = json.loads((tmp_path / "texts.jsonl.settings.json").read_text(encoding="utf-8"))
    for flag in re.findall(r"--[a-z-]+", words):
        assert settings[flag] not in (None, [])


def test_texts_have_a_form_that_a_file_says(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    entries = continued(folder, tmp_path, [{"prompt": "words"}], "--json-schema", str(tmp_path / "schema.json"))
    assert type(json.loads(entries[0]["text"])["a"]) is bool
    # Not the path: another file with the same schema goes on, another schema does not.
    words = ["generate", str(folder), "--input", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "texts.jsonl")]
    (tmp_path / "schema.json").write_text(json.dumps({"type": "string"}))
    assert cli.main([*words, "--json-schema", str(tmp_path / "schema.json")]) == 2
    (tmp_path / "same.json").write_text(json.dumps(SCHEMA))
    assert cli.main([*words, "--json-schema", str(tmp_path / "same.json")]) == 0


def test_chats_and_several_continuations_with_log_probabilities(folder: Path, tmp_path: Path, engine: DynamicInferenceEngine) -> None:
    messages = [{"role": "user", "content": "words"}]
    words = ["--n", "3", "--temperature", "1", "--max-tokens", "4", "--logprobs", "--processed-logprobs", "--top-logprobs", "2"]
    entries = continued(folder, tmp_path, [{"messages": messages}, {"prompt": "chat"}], *words)
    assert entries[0]["messages"] == messages and "prompt" not in entries[0] and entries[1]["prompt"] == "chat"
    for entry in entries.values():
        assert len(entry["choices"]) == 3 and "text" not in entry
        for choice in entry["choices"]:
            assert len(choice["token_ids"]) == len(choice["log_probs"]) == len(choice["top_log_probs"]) == choice["tokens"]
            assert all(len(best) == 2 for best in choice["top_log_probs"])
    assert len({tuple(choice["token_ids"]) for choice in entries[0]["choices"]}) > 1
    # All is there, chats too: nothing is done again.
    before = (tmp_path / "texts.jsonl").stat().st_mtime_ns
    continued(folder, tmp_path, [{"messages": messages}, {"prompt": "chat"}], *words)
    assert (tmp_path / "texts.jsonl").stat().st_mtime_ns == before
    (tmp_path / "texts.jsonl").unlink()
    entries = continued(folder, tmp_path, [{"messages": messages}], "--max-tokens", "6")
    tokens = chat_tokens(engine.tokenizer, messages)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, num_tokens_to_generate=6)
    assert entries[0]["text"] == engine.generate([tokens], params)[0].generated_text


@pytest.mark.parametrize("coordinator", ["0", pytest.param("1", marks=pytest.mark.journey)])
def test_each_continuation_of_a_prompt_is_printed(
    coordinator: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_COORDINATOR", coordinator)
    words = "--max-tokens 2 --n 2 --temperature 1 --allowed-token-id 70 --ignore-eos --prompt chat --prompt words --cache-gb 0.01"
    assert cli.main(["generate", str(folder), *words.split()]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line[:4] for line in out] == ["chat", "chat", "word", "word"] and len(set(out)) == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--top-p 1.5", "--top-p: top_p=1.5 must be a number from 0 to 1"),
        ("--top-k x", "--top-k: 'x' must be a whole number"),
        ("--n 0", "--n: n=0 must be an integer from 1 to 65536"),
        ("--json-schema {tmp}/text", "--json-schema: json_schema='no JSON' is no JSON"),
        ("--json-schema nothing", "--json-schema: 'nothing' is no file"),
        ("--top-p 0.5", "--top-p says what is drawn, and without --temperature the likeliest token is taken; give --temperature"),
        ("--n 2 --temperature 0", "--n says what is drawn"),
        ("--regex a --choice b", "--regex and --choice exclude each other"),
        ("--min-tokens 65", "--min-tokens 65 is more than the 64 tokens of a continuation"),
        ("--min-tokens 3 --regex a", "min_tokens=3 and structured_output exclude each other"),
        ("--logprobs", "--logprobs is of --output"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_a_model_is_loaded(
    words: str, reason: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("no JSON")
    monkeypatch.setattr("mcore_tools.generate.open_engine", lambda *_, **__: pytest.fail("loaded"))
    command = [
        "generate",
        str(folder),
        "--prompt",
        "a",
        *(word.format(tmp=tmp_path) if "{tmp}" in word else word for word in words.split()),
    ]
    try:
        code = cli.main(command)
    except SystemExit as end:
        code = end.code
    assert code == 2 and reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", [{"messages": []}, {"messages": [{"role": "user"}]}, {"messages": "a"}, {"prompt": "a", "messages": []}, {}]
)
def test_lines_that_are_no_chats_are_refused(
    line: dict[str, Any], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(json.dumps(line) + "\n")
    assert cli.main(["generate", str(folder), "--input", str(source), "--output", str(tmp_path / "texts.jsonl")]) == 2
    assert 'is no object with a "prompt", or with "messages" of a role and a content each' in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ['{"prompt": "x\\ud800"}', '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "\\udc00x"}]}']
)
def test_halves_of_surrogate_pairs_are_refused_by_their_line_before_anything_is_continued(
    line: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_tools.generate.open_engine", lambda *_, **__: pytest.fail("loaded"))
    source, target = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    source.write_text(f'{{"prompt": "words"}}\n{line}\n{{"prompt": "chat \\ud83d\\ude00"}}\n')
    assert cli.main(["generate", str(folder), "--input", str(source), "--output", str(target)]) == 2
    assert f"line 2 of {source} has \\ud" in capsys.readouterr().err and not target.exists()


def test_whole_surrogate_pairs_are_characters(folder: Path, tmp_path: Path) -> None:
    # json.dumps escapes them.
    assert continued(folder, tmp_path, [{"prompt": "chat \U0001f600"}], "--max-tokens", "2")[0]["prompt"] == "chat \U0001f600"


def test_a_prompt_that_the_tokenizer_refuses_fails_alone(engine: DynamicInferenceEngine) -> None:
    params = SamplingParams(temperature=0, num_tokens_to_generate=4)
    first, refused, last = engine.generate(["words", "x\ud800", "chat"], params)
    assert isinstance(refused.error, InvalidTokenError) and refused.error.message.startswith("the tokenizer refused the prompt: ")
    assert [first.generated_text, last.generated_text] == [engine.generate([text], params)[0].generated_text for text in ("words", "chat")]


class FailsOnce(torch.nn.Module):
    """An output layer whose first step fails."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.errors = inner, [RuntimeError("out of memory")]

    def forward(self, *inputs: Any) -> Any:
        if self.errors:
            raise self.errors.pop()
        return self.inner(*inputs)


@pytest.mark.parametrize("n", [1, 2])
def test_prompts_of_a_step_that_failed_are_left_to_the_same_command(
    n: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"prompt": "words"}, {"prompt": "words " * 200}, {"prompt": "chat"}]
    source, target, whole = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl", tmp_path / "whole.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["generate", str(folder), "--cache-gb", "0.01", "--max-tokens", "4", "--temperature", "1", "--n", str(n)]
    words += ["--input", str(source), "--output"]
    assert cli.main([*words, str(whole)]) == 1

    def failing(*arguments: Any, **options: Any) -> DynamicInferenceEngine:
        engine = open_engine(*arguments, **options)
        engine.model.output = FailsOnce(engine.model.output)
        return engine

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr("mcore_tools.generate.open_engine", failing)
        assert cli.main([*words, str(target)]) == 1
    entries = [json.loads(line) for line in target.read_text().splitlines()]
    errors = capsys.readouterr().err
    # The one that is too long is refused for good; its error has no number of the engine's.
    assert any(entry["number"] == 1 and entry["error"].startswith("the prompt") for entry in entries) and len(entries) < 3
    assert all("error" not in entry for entry in entries if entry["number"] != 1)
    assert f"{len(entries)} of 3 prompts; {3 - len(entries)} ended with errors that may pass, such as: " in errors
    assert "out of memory" in errors and "the same command goes on with them" in errors and "request " not in errors
    assert cli.main([*words, str(target)]) == 1 and "3 of 3 prompts" in capsys.readouterr().err
    # With the draws of a command in which no step failed.
    by_number = [{entry["number"]: entry for entry in map(json.loads, file.read_text().splitlines())} for file in (target, whole)]
    assert by_number[0] == by_number[1] and len(target.read_text().splitlines()) == 3


class Meets:
    """A runner of a command, while which others with its files begin."""

    def __init__(self, runner: EngineRunner, others: Callable[[], None]) -> None:
        self._runner, self._others = runner, others

    async def submit(self, *arguments: Any, **options: Any) -> Any:
        self._others()
        return await self._runner.submit(*arguments, **options)


def test_a_file_is_written_by_one_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    source.write_text("words\nchat\n")
    params = SamplingParams(temperature=0, num_tokens_to_generate=4, ignore_eos=True)

    def others() -> None:
        with pytest.raises(ValueError, match=rf"--output {target} is written by another command; wait for its end, or give another --out"):
            PromptFile(source, target, {})
        assert cli.main(["generate", str(folder), "--input", str(source), "--output", str(target)]) == 2
        assert "is written by another command" in capsys.readouterr().err

    with EngineRunner(open_engine(folder, "cpu", cache_gb=0.01)) as runner:
        with PromptFile(source, target, {}) as first:
            # Other ranks of the command read beside it.
            assert first.left == PromptFile(source, target, {}, writes=False).left == {0: "words", 1: "chat"}
            others()
            first.run(cast("Any", Meets(runner, others)), params, lambda prompt: str(prompt))
            others()
        # Nothing is read of a pipe, which would wait for what the command itself writes.
        reading, writing = os.pipe()
        with PromptFile(source, Path(f"/dev/fd/{writing}"), {}) as piped:
            piped.run(runner, params, lambda prompt: str(prompt))
        os.close(writing)
        with open(reading, encoding="utf-8") as pipe:
            assert sorted(pipe) == sorted(target.read_text().splitlines(keepends=True))
    assert sorted(json.loads(line)["number"] for line in target.read_text().splitlines()) == [0, 1]
    with PromptFile(source, target, {}) as again:
        assert not again.left


def test_of_commands_that_begin_together_one_has_the_file(tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    source.write_text("words\n")
    barrier = threading.Barrier(2)

    def begin(_: int) -> str:
        barrier.wait(30)
        try:
            with PromptFile(source, target, {}) as prompts:
                assert prompts.left == {0: "words"} and target.read_bytes() == b""
                # Both have tried.
                barrier.wait(30)
        except ValueError as error:
            barrier.wait(30)
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as commands:
        for _ in range(30):
            first, second = sorted(commands.map(begin, range(2)))
            assert not first and "is written by another command; wait for its end" in second
            # The one that had it made no text.
            assert list(tmp_path.iterdir()) == [source]


def test_a_file_that_went_while_it_was_opened_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    source.write_text("words\n")
    flock, first = fcntl.flock, PromptFile(source, target, {})

    def late(descriptor: int, kind: int) -> None:
        """The other command ends between the two calls of this one."""
        first.close()
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    with PromptFile(source, target, {}), pytest.raises(ValueError, match="is written by another command"):
        PromptFile(source, target, {})
    assert not target.exists()


def test_a_file_that_comes_between_two_questions_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    source.write_text("words\n")
    with contextlib.ExitStack() as stack:
        first: list[PromptFile] = []
        ask = Path.stat

        def late(path: Path, **options: Any) -> Any:
            """The other command makes it behind the first question of this one."""
            if path != target or first:
                return ask(path, **options)
            try:
                return ask(path, **options)
            finally:
                first.append(None)  # type: ignore[arg-type]
                first[0] = stack.enter_context(PromptFile(source, target, {}))

        monkeypatch.setattr(Path, "stat", late)
        with pytest.raises(ValueError, match="is written by another command"):
            PromptFile(source, target, {})


def test_a_file_that_took_the_name_meanwhile_stays(tmp_path: Path) -> None:
    source, target, other = (tmp_path / name for name in ("prompts.txt", "texts.jsonl", "other.jsonl"))
    source.write_text("words\n")
    other.write_text("kept")
    with PromptFile(source, target, {}):
        other.rename(target)
    assert target.read_text() == "kept"


def test_links_and_full_files_stay(tmp_path: Path) -> None:
    source, target, behind = (tmp_path / name for name in ("prompts.txt", "texts.jsonl", "behind.jsonl"))
    source.write_text("words\n")
    target.symlink_to(behind)
    with PromptFile(source, target, {}):
        assert behind.exists()
    assert target.is_symlink()


class Refuses:
    """A runner whose requests end with these errors, in turn."""

    def __init__(self, errors: list[Exception]) -> None:
        self.errors = errors

    async def submit(self, *_: Any, **__: Any) -> "Refuses":
        return self

    async def record(self) -> Any:
        return SimpleNamespace(error=self.errors.pop(0))


@pytest.mark.parametrize("order", [1, -1])
def test_a_prompt_is_not_left_to_the_same_command_where_one_continuation_is_refused_for_good(order: int) -> None:
    errors = [StepFailedError(7, "out of memory"), NonFiniteLogitsError(8, "the model gave NaN")][::order]
    ends: list[Outcome] = []
    params = SamplingParams(n=2, temperature=1)
    continue_prompts(cast(Any, Refuses(errors)), {0: "a"}, params, lambda _, end: ends.append(end))
    (end,) = ends
    assert isinstance(end, NonFiniteLogitsError) and not end.is_transient and end.message == "the model gave NaN"


@pytest.mark.parametrize("level", ["1", "2"])
def test_unified_memory_is_refused_on_a_machine_without_it(
    level: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["generate", str(folder), "--prompt", "a", "--cache-gb", "0.01", "--unified-memory-level", level]) == 2
    assert f"--unified-memory-level {level}: unified memory needs a GPU, and the model is on cpu" in capsys.readouterr().err
