# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore rl`` whose engines are servers: they take each iteration's weights, and what they cannot do is one line."""

from pathlib import Path

import pytest

from mcore_ckpt.hf import import_hf
from mcore_inference.server import WeightFolders, serve
from mcore_tools import reinforce
from mcore_tools import serve as serving
from mcore_tools.assembly import open_tokenizer
from mcore_tools.recipes import override, recipe
from mcore_tools.serving import build_engine
from tests.support.countdown import PACE, QUIET, SIZES, countdown_words, rows

TINY = (
    *SIZES,
    *PACE,
    *QUIET,
    *("model.vocab_size=264", "data.tokenizer=byte", "train.seq_len=64", "train.steps=2", "train.eval_interval=2"),
    *("rl.imitation_steps=2", "rl.generation_args.max_tokens=6"),
)


def run(output: Path, *changes: str) -> int:
    return reinforce.main(countdown_words(*TINY, f"output={output}", *changes))


@pytest.mark.journey
def test_a_run_learns_from_a_server_that_takes_its_weights(tmp_path: Path) -> None:
    root, secret, trainer, output = tmp_path / "shared", tmp_path / "secret", tmp_path / "trainer", tmp_path / "run"
    root.mkdir()
    secret.write_text("key\n")
    trainer.write_text("trainer-key\n")
    config = override(recipe("countdown_tiny"), list(TINY))
    engine = build_engine(config, open_tokenizer("byte", config.model.vocab_size), "cpu", max_length=config.train.seq_len)
    weight_folders = WeightFolders(root=root, read=lambda folder: import_hf(folder).tensors, token="trainer-key")
    with serve(engine, token="key", weights=weight_folders) as server:
        changes = (f"rl.served.urls=[{server.url}]", f"rl.served.folder={root / 'run'}", f"rl.served.api_key_file={secret}")
        # The key that draws answers gives no weights.
        assert run(tmp_path / "refused", *changes) == 1
        changes += (f"rl.served.weights_key_file={trainer}",)
        assert run(output, *changes) == 0
        assert engine.weight_version == 3
        # On with the next numbers, whatever the server had.
        assert run(output, *changes, "train.steps=3") == 0
    first, second, third = rows(output)
    assert all(row["logprob_mismatch"] < 1e-4 and row["num_rollouts"] == 8 for row in (first, second, third))
    assert "eval/reward" in second and first["loss"] != second["loss"]
    assert [path.name for path in (root / "run").iterdir()] == ["version-00000005"] and engine.weight_version == 5


@pytest.mark.journey
def test_evaluations_of_a_server_change_nothing_that_is_trained(tmp_path: Path) -> None:
    """Nor do requests of others that it had before."""
    # What is batched together depends on the time that it takes, and must not change a bit here.
    shared = ("batch_invariant=true", "train.steps=3", "rl.countdown.num_numbers=2")
    config = override(recipe("countdown_tiny"), [*TINY, *shared])
    for key in ("key", "trainer"):
        (tmp_path / key).write_text(key)
    examples = []
    for name, often in {"with": ("train.eval_interval=1", "rl.eval_samples=2", "rl.eval_on_start=true"), "without": ()}.items():
        engine = build_engine(config, open_tokenizer("byte", config.model.vocab_size), "cpu", max_length=config.train.seq_len)
        engine.generate(["1 2=3:"] * len(often))
        weight_folders = WeightFolders(root=tmp_path, read=lambda folder: import_hf(folder).tensors, token="trainer")
        with serve(engine, token="key", weights=weight_folders) as server:
            served = [f"rl.served.urls=[{server.url}]", f"rl.served.folder={tmp_path / name / 'served'}", "train.eval_interval=0"]
            served += [f"rl.served.{field}_file={tmp_path / key}" for field, key in (("api_key", "key"), ("weights_key", "trainer"))]
            assert run(tmp_path / name, *shared, *served, *often) == 0
        examples.append((tmp_path / name / "examples.jsonl").read_text())
    assert examples[0] == examples[1] and len(examples[0].splitlines()) == 6


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("rl.served.urls=[]", "served.urls=[] must name at least one server"),
        ("rl.served.urls=[http://127.0.0.1:9] rl.served.kind=tgi", "served.kind='tgi' must be one of mcore, vllm, sglang"),
        ("rl.served.urls=[http://127.0.0.1:9] rl.memory.suspend_engine=true", "memory.suspend_engine needs engines of the run itself"),
        (
            "rl.served.urls=[http://127.0.0.1:9] rl.cache_gb=3",
            "rl.cache_gb=3: it has no effect beside rl.served, whose servers have limits",
        ),
        ("rl.served.urls=[http://127.0.0.1:9] rl.served.timeout_s=inf", "served.timeout_s=inf a finite number above 0"),
        ("rl.served.urls=[http://127.0.0.1:9] rl.max_requests=7", "rl.max_requests=7: it has no effect beside rl.served"),
        ("rl.served.urls=[http://127.0.0.1:9] rl.placement.num_engines=1", "placement needs engines of the run itself"),
        ("rl.served.urls=[http://127.0.0.1:9] rl.served.timeout_s=5", "http://127.0.0.1:9 was lost"),
        ("rl.served.urls=[http://127.0.0.1:9] rl.served.api_key_file=nowhere", "rl.served.api_key_file='nowhere' cannot be read"),
        ("rl.served.urls=[http://127.0.0.1:9] rl.served.weights_key_file=nowhere", "rl.served.weights_key_file='nowhere' cannot be read"),
    ],
)
def test_what_servers_cannot_do_is_one_line(change: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A server that does not answer is asked as the work begins.
    assert run(tmp_path / "run", *change.split()) == (1 if "was lost" in reason else 2)
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1 and reason in message


def test_a_server_takes_weights_only_with_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serving.main([str(tmp_path), "--weights-folder", str(tmp_path)]) == 2
    assert "--weights-folder lets a client of the server replace the model; give --token-file" in capsys.readouterr().err
    secret = tmp_path / "secret"
    secret.write_text("s")
    assert serving.main([str(tmp_path), "--weights-token-file", str(secret)]) == 2
    assert "--weights-token-file guards --weights-folder" in capsys.readouterr().err
    words = [str(tmp_path), "--weights-folder", str(tmp_path), "--token-file", str(secret)]
    assert serving.main([*words, "--host", "0.0.0.0"]) == 2
    assert "--weights-folder on --host 0.0.0.0 lets other machines replace the model; give --weights-token-file" in capsys.readouterr().err
    assert serving.main([*words, "--weights-token-file", str(secret)]) == 2
    assert "--weights-token-file has the secret of --token-file" in capsys.readouterr().err
