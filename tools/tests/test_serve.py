# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A checkpoint alone is enough to generate and to serve: it keeps the run's settings and the tokenizer."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_ckpt import CheckpointingException, CheckpointManager
from mcore_inference import DynamicInferenceEngine, SamplingParams
from mcore_inference.decoder import fp8_parameters
from mcore_inference.engine import _runner
from mcore_inference.server import serve
from mcore_parallel import ProcessGroups
from mcore_parallel.data import train_bpe
from mcore_parallel.models import TransformerConfig
from mcore_parallel.models.eagle import DraftVocabulary, EagleConfig, EagleHead, save_published
from mcore_parallel.nn import Step
from mcore_parallel.training import model_state
from mcore_tools import cli
from mcore_tools.assembly import build_model, open_tokenizer
from mcore_tools.recipes import DataConfig, RunConfig, override, recipe
from mcore_tools.serve import main
from mcore_tools.serving import EngineRanks, _hang, build_engine, open_engine
from mcore_tools.training import run_assets, run_checkpoints
from tests.support.commands import Command, run_ranks, torchrun_environment

TEXT = "what a checkpoint keeps is all that a server needs to know. "


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A run with two saved steps; the tokenizer that it was told of is gone."""
    folder = tmp_path_factory.mktemp("run")
    train_bpe([TEXT * 20], 290, folder / "words")
    sizes = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.seq_len=48")
    config = override(recipe("gpt_tiny"), [*sizes, "train.dtype=float32"])
    config = dataclasses.replace(config, data=DataConfig(tokenizer=str(folder / "words")))
    manager = CheckpointManager(folder / "checkpoints", assets=run_assets(config))
    for step in (1, 2):
        seeded = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=step))
        manager.save(step, model_state(build_model(seeded, ProcessGroups.single(), "cpu"), ProcessGroups.single()))
    shutil.move(folder / "words", folder / "elsewhere")
    return dataclasses.replace(config, data=DataConfig(tokenizer=str(folder / "elsewhere"))), folder / "checkpoints"


def expected(config: RunConfig, seed: int, prompt: str, **settings: Any) -> str:
    """What the model of a seed says, built without a checkpoint."""
    seeded = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed))
    engine = build_engine(seeded, open_tokenizer(config.data.tokenizer, config.model.vocab_size), "cpu")
    return engine.generate([prompt], SamplingParams(temperature=0, num_tokens_to_generate=8, **settings))[0].generated_text


def test_prompts_are_continued_by_the_newest_step_or_the_one_named(
    saved_run: tuple[RunConfig, Path], capsys: pytest.CaptureFixture
) -> None:
    config, folder = saved_run
    continuations = [expected(config, seed, "what a") for seed in (1, 2)]
    assert continuations[0] != continuations[1]
    assert main([str(folder), "--prompt", "what a", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == f"what a{continuations[1]}\n"
    assert main([str(folder / "step_00000001"), "--prompt", "what a", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == f"what a{continuations[0]}\n"
    words = (continuations[1][:4], continuations[1][0])
    other = expected(config, 2, "what a", bad_words=words)
    assert other != continuations[1]
    assert main([str(folder), "--prompt", "what a", "--max-tokens", "8", "--bad-word", words[0], "--bad-word", words[1]]) == 0
    assert capsys.readouterr().out == f"what a{other}\n"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("coordinator", [False, pytest.param(True, marks=pytest.mark.journey)])
def test_prompts_of_a_file_are_continued_once(
    coordinator: bool, saved_run: tuple[RunConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = saved_run
    monkeypatch.setenv("USE_COORDINATOR", str(int(coordinator)))
    prompts = ["what a", "that a\u2028server", "x" * 400, "needs"]
    source, target = tmp_path / "prompts.jsonl", tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts), encoding="utf-8")
    words = ["generate", str(folder), "--max-tokens", "8", "--input", str(source), "--output", str(target)]
    # One was refused: the longest.
    assert cli.main(words) == 1 and "4 of 4 prompts" in capsys.readouterr().err
    whole = target.read_text(encoding="utf-8")
    entries = {entry["number"]: entry for entry in map(json.loads, whole.removesuffix("\n").split("\n"))}
    assert sorted(entries) == [0, 1, 2, 3] and "max_sequence_length" in entries[2]["error"] and "text" not in entries[2]
    for number in (0, 1, 3):
        text = expected(config, 2, prompts[number])
        assert entries[number] == {"number": number, "prompt": prompts[number], "text": text, "finish_reason": "length", "tokens": 8}
    # Killed in the middle of its last line: that one is continued again, and no other.
    target.write_text(whole[: whole.rindex("{") + 9], encoding="utf-8")
    assert cli.main(words) == 1 and target.read_text(encoding="utf-8") == whole
    before = target.stat().st_mtime_ns
    assert cli.main(words) == 1 and target.stat().st_mtime_ns == before
    capsys.readouterr()
    assert cli.main([*words, "--temperature", "1"]) == 2 and target.stat().st_mtime_ns == before
    assert "--temperature is 1.0, and was 0.0 for the texts" in capsys.readouterr().err
    source.write_text(json.dumps({"prompt": "another"}) + "\n", encoding="utf-8")
    assert cli.main(words) == 2 and f"line 1 of {target} is no continuation of this --input" in capsys.readouterr().err
    assert target.read_text(encoding="utf-8") == whole
    source.write_text("no object\n")
    assert cli.main(words) == 2 and "line 1 of" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_file_that_goes_on_gets_the_draws_of_one_that_was_not_ended(
    saved_run: tuple[RunConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    _, folder = saved_run
    source, target = tmp_path / "prompts.txt", tmp_path / "texts.jsonl"
    source.write_text("what a\n" * 6)
    words = ["generate", str(folder), "--max-tokens", "8", "--temperature", "1", "--input", str(source), "--output", str(target)]
    assert cli.main(words) == 0
    lines = target.read_text().splitlines(keepends=True)
    texts = {entry["number"]: entry["text"] for entry in map(json.loads, lines)}
    assert len(set(texts.values())) == 6
    target.write_text("".join(lines[:2]))
    assert cli.main(words) == 0
    assert {entry["number"]: entry["text"] for entry in map(json.loads, target.read_text().splitlines())} == texts
    # By --prompt the same, and by another seed others.
    capsys.readouterr()
    prompts = ["--max-tokens", "8", "--temperature", "1", *["--prompt", "what a"] * 6]
    assert main([str(folder), *prompts]) == 0
    drawn = capsys.readouterr().out
    assert drawn == "".join(f"what a{texts[number]}\n" for number in range(6))
    assert main([str(folder), *prompts, "--seed", "1"]) == 0 and capsys.readouterr().out != drawn
    target.write_text("".join(lines[:2]))
    assert cli.main([*words, "--seed", "1"]) == 2 and "--seed is 1, and was 0 for the texts" in capsys.readouterr().err


@pytest.mark.journey
@pytest.mark.timeout(120)
def test_one_engine_behind_a_coordinator_says_the_same(
    saved_run: tuple[RunConfig, Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = saved_run
    monkeypatch.setenv("USE_COORDINATOR", "1")
    assert main([str(folder), "--prompt", "what a", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out == f"what a{expected(config, 2, 'what a')}\n"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([str(folder), "--prompt", "what a"]) == 2
    assert "leave torchrun out" in capsys.readouterr().err
    monkeypatch.setenv("USE_COORDINATOR", "yes")
    assert main([str(folder), "--prompt", "what a"]) == 2
    assert "USE_COORDINATOR=yes must be 0 or 1" in capsys.readouterr().err


def test_weights_of_a_checkpoint_are_rounded(saved_run: tuple[RunConfig, Path], capsys: pytest.CaptureFixture) -> None:
    _, folder = saved_run
    wide, engine = open_engine(folder, "cpu", cache_gb=0.01), open_engine(folder, "cpu", cache_gb=0.01, weight_dtype="fp8_weight_only")
    rounded, stored = fp8_parameters(engine.model), dict(engine.model.named_parameters())
    assert len(rounded) == 8
    for name, parameter in wide.model.named_parameters():
        scales = rounded.get(stored[name])
        if scales is None:
            assert torch.equal(parameter, stored[name]), name
            continue
        values = scales.widened(stored[name].flatten(0, -2), torch.float32).view(parameter.shape)
        error = (values - parameter).abs()
        assert error.max() > 0 and (error <= parameter.abs() / 16 + parameter.abs().max() * 2**-15).all(), name
    for choice in ("fp8", "fp8_weight_only"):
        assert main([str(folder), "--prompt", "what a", "--max-tokens", "8", "--weight-dtype", choice]) == 0
        assert capsys.readouterr().out.startswith("what a")


def test_a_run_keeps_the_steps_that_it_is_told_to(saved_run: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config = override(saved_run[0], [f"output={tmp_path}", "train.checkpoints_kept=1", "train.checkpoint_keep_interval=2"])
    manager = run_checkpoints(config)
    for step in range(1, 6):
        manager.save(step, {"w": torch.ones(2)})
    assert manager.steps() == [2, 4, 5]
    assert run_checkpoints(override(config, ["train.checkpoints_kept=0"])).keep is None


def test_it_answers_over_http(saved_run: tuple[RunConfig, Path]) -> None:
    config, folder = saved_run
    body = json.dumps({"model": "run", "prompt": "what a", "max_tokens": 8, "temperature": 0}).encode()
    with serve(open_engine(folder, "cpu", cache_gb=0.01), model_name="run") as server:
        request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["choices"][0]["text"] == expected(config, 2, "what a")


def ask(url: str, **headers: str) -> str:
    """The continuation of a prompt, of a service at ``url``."""
    body = json.dumps({"prompt": "what a", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert all(response.headers[name] == value for name, value in headers.items())
        return json.load(response)["choices"][0]["text"]


def url_of(command: Command) -> str:
    return command.until("serving ").split(" on ")[1].split(";")[0]


@pytest.mark.timeout(180)
def test_a_signal_ends_the_command_in_order(saved_run: tuple[RunConfig, Path]) -> None:
    with Command(main, [str(saved_run[1]), "--port", "0", "--cache-gb", "0.01"]) as command:
        ask(url_of(command), **{"X-Request-Id": "night-shift"})
        command.terminate()
        assert command.wait() == 0 and "Traceback" not in command.errors
        assert "request_id=night-shift POST '/v1/completions' 200" in command.errors


@pytest.mark.journey
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("split", "number", "what"),
    [
        ([], signal.SIGKILL, "ended with exit code -9"),
        pytest.param(["--tp", "2"], signal.SIGKILL, "ended with exit code -9", marks=pytest.mark.slow),
        pytest.param([], signal.SIGSTOP, "though its process lives, and was ended", marks=pytest.mark.slow),
    ],
    ids=["killed", "split and killed", "stopped"],
)
def test_engines_of_their_own_processes_answer_while_one_is_killed_or_hangs_and_comes_back(
    saved_run: tuple[RunConfig, Path], split: list[str], number: int, what: str
) -> None:
    config, folder = saved_run
    with Command(main, [str(folder), "--port", "0", "--cache-gb", "0.01", "--data-parallel", "2", *split]) as command:
        url = url_of(command)

        def engines() -> int:
            with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics", timeout=60) as response:
                lines = response.read().decode().splitlines()
            return int(float(next(line.split()[1] for line in lines if line.startswith("mcore_inference_engines "))))

        wanted = expected(config, 2, "what a")
        assert [ask(url) for _ in range(4)] == [wanted] * 4 and engines() == 2
        children = command.children()
        os.kill(children[0], number)
        # The coordinator has lost one that ended when this line is written, not when its silence is too long.
        while f"{what} and is started again" not in command.errors:
            assert ask(url) == wanted
            time.sleep(0.1)
        # Of two engines one was started again, with all of its ranks; what the server knows of them is a moment old.
        num_started = 3 * (int(split[-1]) if split else 1)
        while engines() == 1 or len({*children, *command.children()}) < num_started:
            assert ask(url) == wanted
            time.sleep(0.1)
        assert engines() == 2
        children += command.children()
        command.terminate()
        assert command.wait() == 0 and "Traceback" not in command.errors, command.errors
    assert len(set(children)) == num_started and not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.mark.journey
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_several_api_servers_answer_at_one_port_and_end_with_the_command(saved_run: tuple[RunConfig, Path], number: int) -> None:
    config, folder = saved_run
    words = [str(folder), "--port", "0", "--cache-gb", "0.01", "--api-server-count", "2"]
    with Command(main, words, {"USE_COORDINATOR": "1"}) as command:
        url = url_of(command)
        assert [ask(url) for _ in range(6)] == [expected(config, 2, "what a")] * 6
        children = command.children()
        # Two that answer and an engine.
        assert len(children) >= 3
        os.kill(command.pid, number)
        code = command.wait()
        assert number == signal.SIGKILL or (code == 0 and "Traceback" not in command.errors), command.errors
        deadline = time.monotonic() + 30
        while any(Path(f"/proc/{pid}").exists() for pid in children):
            assert time.monotonic() < deadline, "none outlives the command"
            time.sleep(0.05)


def test_api_servers_need_engines_of_their_own_processes(
    saved_run: tuple[RunConfig, Path], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USE_COORDINATOR", "0")
    words = [str(saved_run[1]), "--api-server-count", "2"]
    assert main([*words, "--port", "0"]) == 2
    assert "--api-server-count 2 needs engines in processes of their own; set USE_COORDINATOR=1" in capsys.readouterr().err
    assert main([*words, "--prompt", "x"]) == 2
    assert "--api-server-count is of a server over HTTP, and --prompt starts none" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_server_whose_only_engine_dies_again_and_again_ends_with_its_exit_code(saved_run: tuple[RunConfig, Path]) -> None:
    words = [str(saved_run[1]), "--port", "0", "--cache-gb", "0.01"]
    with Command(main, words, {"USE_COORDINATOR": "1"}) as command:
        url_of(command)
        killed: set[int] = set()
        while command.errors.count("ended with exit code -9") < 3:
            for pid in set(command.children()) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            time.sleep(0.05)
        assert command.wait() == 75
        assert "all engines are given up; the reasons stand above" in command.errors


def hanging(words: list[str]) -> int:
    """``mcore serve`` whose third step has no end."""
    _hang._GRACE_S, _runner._LAST_STEP_S = 0.5, 0.1
    step, steps = DynamicInferenceEngine.step, itertools.count(1)

    def hang(engine: DynamicInferenceEngine) -> Any:
        if next(steps) == 3:
            threading.Event().wait()
        return step(engine)

    DynamicInferenceEngine.step = hang
    return main(words)


@pytest.mark.timeout(120)
def test_a_server_whose_engine_hangs_answers_and_ends_for_a_supervisor(saved_run: tuple[RunConfig, Path]) -> None:
    with Command(hanging, [str(saved_run[1]), "--port", "0", "--cache-gb", "0.01", "--stall-seconds", "0.5"]) as command:
        with pytest.raises(urllib.error.HTTPError, match="503") as caught:
            ask(url_of(command))
        error = json.loads(caught.value.read())["error"]
        assert error["code"] == "EngineDeadError" and re.search("a step of [12] s hangs", error["message"]), error
        assert command.wait() == 75 and "error: the engine failed: EngineDeadError: a step of" in command.errors, command.errors


def test_engines_of_their_own_processes_get_the_layout(
    saved_run: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def refuse(words: list[str], **options: Any) -> None:
        raise ValueError(f"{' '.join(words[-4:])} takes {options['layout'].ranks_each} GPUs each of {options['count']} times")

    monkeypatch.setattr("mcore_tools.serving._coordinated.Replicas", refuse)
    assert main([str(saved_run[1]), "--port", "0", "--data-parallel", "4", "--tp", "2", "--pp", "2"]) == 2
    assert "--tp 2 --pp 2 takes 4 GPUs each of 4 times" in capsys.readouterr().err


def split_commands(stack: contextlib.ExitStack, words: list[str], started_by: str) -> list[Command]:
    """Two processes of one model: the second is started by the first, and not in the list, or both are by torchrun."""
    if started_by == "first":
        return [stack.enter_context(Command(main, words))]
    store, environment = torchrun_environment(2)
    stack.callback(lambda: store)
    return [stack.enter_context(Command(main, words, {**environment, "RANK": rank, "LOCAL_RANK": rank})) for rank in ("0", "1")]


@pytest.mark.journey
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way_to_end", ["signal", "killed rank"])
@pytest.mark.parametrize(
    ("split", "lost", "started_by"),
    [
        ("--tp", "tp rank 1", "torchrun"),
        pytest.param("--tp", "tp rank 1", "first", marks=pytest.mark.slow),
        ("--pp", "rank 1 (tp 0 of stage 1)", "torchrun"),
        pytest.param("--pp", "rank 1 (tp 0 of stage 1)", "first", marks=pytest.mark.slow),
    ],
)
def test_two_processes_serve_one_model_and_all_end_when_one_is_killed(
    saved_run: tuple[RunConfig, Path], split: str, lost: str, started_by: str, way_to_end: str
) -> None:
    config, folder = saved_run
    with contextlib.ExitStack() as stack:
        first, *others = split_commands(stack, [str(folder), "--port", "0", "--cache-gb", "0.01", split, "2"], started_by)
        assert ask(url_of(first)) == expected(config, 2, "what a")
        [second] = children = [other.pid for other in others] or first.children()
        if way_to_end == "signal":
            first.terminate()
            assert first.wait() == 0 and "Traceback" not in first.errors, first.errors
            assert [other.wait() for other in others] == [0] * len(others)
        else:
            os.kill(second, signal.SIGKILL)
            assert first.wait() == 75 and f"error: the engine failed: RankFailedError: {lost} is gone" in first.errors, first.errors
        assert others or not any(Path(f"/proc/{pid}").exists() for pid in children)


@pytest.mark.journey
@pytest.mark.timeout(240)
def test_a_mixture_generates_on_several_processes_what_it_does_on_one(
    saved_run: tuple[RunConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = override(recipe("moe_tiny"), ["train.dtype=float32", "train.seq_len=48", "model.hidden_size=32", "model.vocab_size=320"])
    config = dataclasses.replace(config, data=saved_run[0].data)
    model = build_model(config, ProcessGroups.single(), "cpu").eval()
    CheckpointManager(tmp_path / "mixture", assets=run_assets(config)).save(1, model_state(model, ProcessGroups.single()))
    words = ["generate", str(tmp_path / "mixture"), "--prompt", "what a", "--max-tokens", "8"]
    assert cli.main([*words, "--tp", "1"]) == 0
    whole = capsys.readouterr().out
    assert len(whole) > len("what a\n")
    # The second process is started by the first, and is gone with it.
    with Command(cli.main, [*words, "--tp", "2"]) as command:
        assert (command.wait(), command.output) == (0, whole), command.errors
    first, *others = run_ranks(cli.main, [*words, "--tp", "2", "--pp", "2"], 4)
    assert first[:2] == (0, whole), first
    assert all(other[:2] == (0, "") for other in others), others


def test_a_layout_that_the_model_has_not_is_refused_before_a_process_is_started(
    saved_run: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for split, reason in ((["--tp", "3"], "tp=3 must divide"), (["--pp", "3"], "num_layers=2 are fewer than pp*vpp=3*1")):
        assert main([str(saved_run[1]), "--port", "0", *split]) == 2
        assert reason in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([str(saved_run[1]), "--port", "0", "--tp", "3", "--pp", "2"]) == 2
    assert "--tp 3 --pp 2 in a world of 2 processes" in capsys.readouterr().err


def test_only_who_starts_the_other_ranks_reads_the_model_before_it_connects(
    saved_run: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    reads: list[str] = []

    def read(checkpoint: str) -> tuple[TransformerConfig, None]:
        reads.append(checkpoint)
        return saved_run[0].model, None

    def connect(ranks: EngineRanks) -> None:
        raise ValueError("connects")

    monkeypatch.setattr("mcore_tools.generate.served_model", read)
    monkeypatch.setattr(EngineRanks, "__enter__", connect)
    monkeypatch.delenv("RANK", raising=False)
    words = ["generate", str(saved_run[1]), "--prompt", "a", "--tp", "2"]
    assert cli.main(words) == 2 and len(reads) == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(words) == 2 and len(reads) == 1
    assert capsys.readouterr().err == "error: connects\n" * 2


def test_ranks_that_were_started_refuse_a_layout_that_the_model_has_not(saved_run: tuple[RunConfig, Path]) -> None:
    for split, reason in (("--tp", "tp=3 must divide"), ("--pp", "num_layers=2 must be at least the number of pipeline stages 3")):
        for code, output, errors in run_ranks(cli.main, ["generate", str(saved_run[1]), "--prompt", "a", split, "3"], 3):
            assert (code, output) == (2, "") and reason in errors and "Traceback" not in errors, errors


@pytest.mark.parametrize(("given", "kept"), [(None, "0"), ("1", "1")])
def test_libraries_trace_no_errors_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "RUST_BACKTRACE": "1"})
    os.environ.pop("RUST_LIB_BACKTRACE", None)
    if given is not None:
        os.environ["RUST_LIB_BACKTRACE"] = given
    assert main(["nowhere", "--prompt", "x", "--port", "1"]) != 0
    assert os.environ["RUST_LIB_BACKTRACE"] == kept


def test_what_cannot_be_served_is_named(saved_run: tuple[RunConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    _, folder = saved_run
    CheckpointManager(tmp_path / "bare").save(1, {"w": torch.ones(2)})
    with pytest.raises(CheckpointingException, match=r"step_00000001 keeps no run\.yaml and no tokenizer/; save it with"):
        open_engine(tmp_path / "bare", "cpu")
    shutil.copytree(folder, tmp_path / "damaged")
    (asset,) = (tmp_path / "damaged" / "step_00000002").glob("*-asset-tokenizer+tokenizer.json")
    asset.write_bytes(asset.read_bytes().replace(b"what", b"that", 1))
    for arguments, words in (
        ([str(tmp_path / "damaged"), "--prompt", "a"], "the file is damaged"),
        ([str(tmp_path / "none"), "--prompt", "a"], "is not a checkpoint"),
        ([str(folder), "--host", "0.0.0.0"], "give --token-file"),
        ([str(folder), "--prompt", "what a " * 40], "48"),
        ([str(folder), "--port", "0", "--tool-call-parser", "hermes"], "no chat template that writes tools"),
    ):
        # A prompt that is too long is found by the engine.
        assert main(arguments) == (1 if words == "48" else 2), arguments
        assert words in capsys.readouterr().err


def test_a_run_of_a_hybrid_model_generates(saved_run: tuple[RunConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = override(recipe("hybrid_tiny"), ["train.dtype=float32", "train.seq_len=48", "model.hidden_size=64", "model.vocab_size=320"])
    config = dataclasses.replace(config, data=saved_run[0].data)
    model = build_model(config, ProcessGroups.single(), "cpu").eval()
    CheckpointManager(tmp_path, assets=run_assets(config)).save(1, model_state(model, ProcessGroups.single()))
    assert main([str(tmp_path), "--prompt", "what a", "--max-tokens", "6"]) == 0
    engine = open_engine(tmp_path, "cpu", cache_gb=0.01)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.tokenize("what a")
    record = engine.generate([prompt], SamplingParams(temperature=0, num_tokens_to_generate=6))[0]
    assert capsys.readouterr().out == f"what a{record.generated_text}\n"
    tokens = list(prompt)
    with torch.no_grad():
        for token in record.generated_tokens:
            logits = model(torch.tensor(tokens), Step.causal(1, len(tokens)))[0].logits()
            assert token == int(logits[-1, : engine.vocab_size].argmax())
            tokens.append(token)


def test_proposed_tokens_change_no_text_and_what_cannot_propose_is_refused(
    saved_run: tuple[RunConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, folder = saved_run
    words = [str(folder), "--prompt", "what a", "--prompt", "needs", "--max-tokens", "12", "--cache-gb", "0.01"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    architecture = EagleConfig.of_target(config.model, draft_vocab_size=100)
    changes = {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False, "add_qkv_bias": False}
    architecture = dataclasses.replace(architecture, transformer=dataclasses.replace(architecture.transformer, **changes))
    vocabulary = DraftVocabulary(torch.arange(100), config.model.vocab_size)
    save_published(EagleHead(architecture, ProcessGroups.single(), vocabulary=vocabulary), tmp_path / "head")
    for choice in (["ngram"], [str(tmp_path / "head"), "--speculation-tokens", "2"]):
        assert main([*words, "--speculation", *choice]) == 0
        assert capsys.readouterr().out == plain
    description = json.loads((tmp_path / "head/config.json").read_text())
    (tmp_path / "head/config.json").write_text(json.dumps({**description, "vocab_size": 640}))
    refused = {
        "mtp": "mtp_num_layers=0",
        str(tmp_path): "is neither ngram, mtp, nor the folder of a draft head",
        str(tmp_path / "head"): "vocab_size=640 and the model 320",
    }
    for choice, reason in refused.items():
        assert main([*words, "--speculation", choice]) == 2
        assert reason in capsys.readouterr().err
    assert main([*words, "--speculation-tokens", "2"]) == 2
    assert "--speculation-tokens needs --speculation" in capsys.readouterr().err
