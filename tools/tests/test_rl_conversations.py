# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl`` in environments of several turns, with tools: iterations, where a run goes on, and what cannot run in one line."""

import json
import re
import shutil
import sys
import types
from pathlib import Path

import pytest

from mcore_ckpt.hf import import_hf
from mcore_inference.server import WeightFolders, serve
from mcore_parallel.data import train_bpe
from mcore_rl import EnvironmentServer, RemoteEnvironment
from mcore_tools import reinforce
from mcore_tools.launch import launch
from mcore_tools.recipes import RLConfig, override
from mcore_tools.rl import build_environment, reinforce_rank
from mcore_tools.serving import open_engine
from tests.support.commands import run_ranks
from tests.support.countdown import PACE, QUIET, num_taken, rows
from tests.support.environments import Nodding
from tests.support.published import TEMPLATE, write_published

NODDING = "tests.support.environments:Nodding"
FAST = (
    *PACE,
    *QUIET,
    "train.steps=2",
    "train.eval_interval=2",
    "train.seq_len=256",
    "rl.generation_args.max_tokens=24",
    "rl.cache_gb=0.05",
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template writes tools; a quarter of its tokens end a turn."""
    folder = write_published(tmp_path_factory.mktemp("published") / "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(80))}))
    (folder / "chat_template.jinja").write_text("{% for t in tools or [] %}{{ t.function.name }};{% endfor %}" + TEMPLATE)
    return folder


def words(*changes: str) -> list[str]:
    return [word for change in (*FAST, *changes) for word in ("--set", change)]


def problems(output: Path, step: int) -> list[str]:
    lines = [json.loads(line) for line in (output / "examples.jsonl").read_text().splitlines()]
    return [line["problem_id"] for line in lines if line["step"] == step]


def test_a_run_calls_tools_and_goes_on_with_the_next_problems(published: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    changes = ("rl.environment=calculator", f"output={output}")
    assert reinforce.main([str(published), *words(*changes)]) == 0
    first, second = rows(output)
    for row in (first, second):
        assert row["num_rollouts"] == 8 and row["num_dropped"] == 0 and row["logprob_mismatch"] < 1e-5
    assert "eval/reward" in second
    example = json.loads((output / "examples.jsonl").read_text().splitlines()[0])
    assert example["env_id"] == "calculator" and example["prompt"].startswith("calculate;<|im_start|>user\n")
    assert example["prompt"].endswith("<|im_start|>assistant\n")
    assert reinforce.main([str(published), *words(*changes, "train.steps=3")]) == 0
    assert num_taken(output, 3) == [6]
    posed = [set(problems(output, step)) for step in (1, 2, 3)]
    wanted = [{f"calculator/0/{number}" for number in (first, first + 1)} for first in (0, 2, 4)]
    assert all(some <= every for some, every in zip(posed, wanted, strict=True))


@pytest.mark.journey
def test_ranks_that_share_an_engine_hold_conversations(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = ("rl.environment=calculator", "plan.dp=2", "rl.engine_tp=2", f"output={tmp_path / 'run'}")
    assert [code for code, _, _ in run_ranks(reinforce.main, [str(published), *words(*changes)], 2)] == [0, 0]
    for row in rows(tmp_path / "run"):
        assert row["num_rollouts"] == 8 and row["num_dropped"] == 0 and row["logprob_mismatch"] < 1e-5
    assert "eval/reward" in rows(tmp_path / "run")[-1] and num_taken(tmp_path / "run", 2) == [4]


@pytest.mark.journey
def test_conversations_are_imitated_with_the_calls_of_tools(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = tmp_path / "model", tmp_path / "run"
    shutil.copytree(published, model)
    # No other token ends a turn than the template's.
    (model / "generation_config.json").unlink()
    changes = ("rl.environment=calculator", "rl.arithmetic.worked=1", "rl.imitation_steps=60", "rl.imitation_lr=1e-2", "train.steps=1")
    assert reinforce.main([str(model), *words(*changes, "rl.generation_args.max_tokens=128", f"output={output}")]) == 0
    # The tool is called, with the end of a turn behind the call; random weights never do so.
    assert "after 60 steps of imitation" in capsys.readouterr().out and rows(output)[0]["num_turns"] > 1.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (f"rl.environment={NODDING}", "environment 'nodding' shows no answers to imitate; set rl.imitation_steps=0"),
        ("rl.arithmetic.worked=1 train.seq_len=100", "rl.imitation_steps: the conversation about problem calculator/0/"),
    ],
)
def test_what_cannot_be_imitated_is_one_line(
    change: str, message: str, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ("rl.environment=calculator", "rl.imitation_steps=2", f"output={tmp_path / 'run'}", *change.split())
    assert reinforce.main([str(published), *words(*changes)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("judges", [(), pytest.param(("rl.judges.num_workers=1", "rl.judges.time_s=30"), marks=pytest.mark.journey)])
def test_several_turns_and_single_ones_share_a_run(judges: tuple[str, ...], published: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    mixture = f"rl.mixture=[{NODDING},arithmetic,calculator]"
    changes = (mixture, "rl.num_groups=3", "train.global_batch_size=12", f"output={output}", *judges)
    assert reinforce.main([str(published), *words(*changes)]) == 0
    for row in rows(output):
        assert row["num_rollouts"] == 12 and row["num_dropped"] == 0 and row["num_turns"] > 1 and row["logprob_mismatch"] < 1e-5
        assert {row[f"env/{name}/num_rollouts"] for name in ("nodding", "arithmetic", "calculator")} == {4}
    assert all(f"eval/{name}/reward" in row for name in ("nodding", "arithmetic", "calculator"))


def test_a_mixture_of_conversations_alone_may_be_imitated() -> None:
    assert build_environment(RLConfig(mixture=("calculator",), imitation_steps=2)).holds_conversations


def test_a_mixture_behind_http_is_known_by_its_environments(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("elsewhere")
    module.mine = lambda: RemoteEnvironment(server.url, api_key="key")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    with EnvironmentServer(build_environment(RLConfig(mixture=("calculator",))), api_key="key") as server:
        assert build_environment(RLConfig(environment="elsewhere:mine", imitation_steps=2)).holds_conversations
    with EnvironmentServer(build_environment(RLConfig(mixture=(NODDING, "arithmetic"))), api_key="key") as server:
        changes = ("train.steps=1", "rl.environment=elsewhere:mine", f"output={tmp_path}")
        assert reinforce.main([str(published), *words(*changes)]) == 0
    [row, *_] = rows(tmp_path)
    assert row["env/nodding/num_rollouts"] and row["env/arithmetic/num_rollouts"] and row["num_dropped"] == 0


@pytest.mark.journey
def test_processes_imitate_and_hold_the_same_conversations(published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = ("batch_invariant=true", "rl.environment=calculator", "rl.arithmetic.worked=1", "rl.imitation_steps=4", "train.steps=1")
    judges = ("rl.judges.num_workers=1", "rl.judges.time_s=30")
    assert reinforce.main([str(published), *words(*changes, f"output={tmp_path / 'here'}")]) == 0
    assert reinforce.main([str(published), *words(*changes, *judges, f"output={tmp_path / 'there'}")]) == 0
    check_same(tmp_path)
    written = re.findall(r"loss (\S+) after 4 steps of imitation", capsys.readouterr().out)
    assert len(written) == 2 and len(set(written)) == 1


@pytest.mark.journey
def test_an_environment_behind_http_holds_the_same_conversations(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = ("batch_invariant=true", "train.steps=1")
    assert reinforce.main([str(published), *words(*changes, f"rl.environment={NODDING}", f"output={tmp_path / 'here'}")]) == 0
    with EnvironmentServer(Nodding(), api_key="key") as server:
        module = types.ModuleType("elsewhere")
        module.mine = lambda: RemoteEnvironment(server.url, api_key="key")  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "elsewhere", module)
        assert reinforce.main([str(published), *words(*changes, "rl.environment=elsewhere:mine", f"output={tmp_path / 'there'}")]) == 0
    check_same(tmp_path)
    assert rows(tmp_path / "there")[0]["num_turns"] > 1


def check_same(folder: Path) -> None:
    """Whether two runs drew the same conversations in the first iteration, and lost none."""
    [here, *_], [there, *_] = (rows(folder / name) for name in ("here", "there"))
    assert there["num_dropped"] == 0 and there["loss"] == pytest.approx(here["loss"], abs=1e-3)
    assert [there[name] for name in ("reward", "num_turns", "answer_length")] == [
        here[name] for name in ("reward", "num_turns", "answer_length")
    ]


@pytest.mark.slow
def test_engines_that_are_ahead_hold_conversations(published: Path, tmp_path: Path) -> None:
    apart = ("rl.placement.num_engines=1", "rl.placement.timeout_s=30", "rl.rollout_timeout_s=27")
    changes = (f"rl.environment={NODDING}", *apart, f"output={tmp_path / 'run'}")
    config = override(reinforce.base_config(None, str(published)), [*FAST, *changes])
    assert [done.num_iterations for done in launch(reinforce_rank, 2, config=config, kind="cpu")] == [2, 0]
    first, second = rows(tmp_path / "run")
    assert first["num_turns"] > 1 and second["num_turns"] > 1 and second["num_dropped"] == 0 and first["logprob_mismatch"] < 1e-5
    assert num_taken(tmp_path / "run", 2) == [4]


def test_servers_hold_conversations(published: Path, tmp_path: Path) -> None:
    root, secret = tmp_path / "shared", tmp_path / "secret"
    root.mkdir()
    secret.write_text("key")
    engine = open_engine(published, "cpu", cache_gb=0.05, max_length=256)
    with serve(engine, token="key", weights=WeightFolders(root=root, read=lambda folder: import_hf(folder).tensors)) as server:
        served = (f"rl.served.urls=[{server.url}]", f"rl.served.folder={root / 'run'}", f"rl.served.api_key_file={secret}")
        assert (
            reinforce.main([str(published), *words(f"rl.environment={NODDING}", "rl.cache_gb=1", *served, f"output={tmp_path / 'run'}")])
            == 0
        )
    for row in rows(tmp_path / "run"):
        assert row["num_turns"] > 1 and row["num_dropped"] == 0 and row["logprob_mismatch"] < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.tokenizer=byte", "environment 'calculator' holds conversations, and data.tokenizer=byte has no chat template; name a"),
        ("data.tokenizer=bare", "environment 'calculator' holds conversations, and data.tokenizer=bare has no chat template; name a"),
        (
            "rl.environment=countdown rl.mixture=[calculator,arithmetic] rl.imitation_steps=2",
            "rl.imitation_steps is for single answers or for conversations, and environment 'multi_task' has both; leave it out",
        ),
        pytest.param(
            "train.seq_len=32",
            "train.seq_len=32 must hold a problem, and none of the first 2 fits: the last has",
            marks=pytest.mark.journey,
        ),
    ],
)
def test_what_cannot_run_is_refused_by_name(
    change: str, message: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train_bpe(["1+2=3 " * 20], 300, tmp_path / "bare")
    changes = ("rl.environment=calculator", "output=run", *change.split())
    assert reinforce.main([str(published), *words(*changes)]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "run").exists()
