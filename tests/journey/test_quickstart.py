# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The quickstart as a user starts it, at a small size, and with bad input."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_tools.quickstart import main
from tests.support.commands import run_command

pytestmark = pytest.mark.timeout(300)

SMALL = [
    "train.steps=12", "train.warmup_steps=2", "train.eval_interval=6", "train.eval_batches=1", "train.seq_len=64",
    "model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=96", "model.vocab_size=384",
]  # fmt: skip


@pytest.mark.journey
def test_text_becomes_a_reinforced_model(tmp_path: Path) -> None:
    output = tmp_path / "run"
    changes = [word for change in SMALL for word in ("--set", change)]
    text = "packages/mcore-parallel/src/mcore_parallel/data"
    words = ["--text", text, "--output", str(output), "--iterations", "3", *changes]
    code, written, errors = run_command(main, words, timeout_s=280)
    assert code == 0, written + errors
    for stage in ("Text becomes tokens", "mixture of experts trains", "another layout", "safetensors", "serves", "Reinforcement"):
        assert stage in written
    page = (output / "report.html").read_text()
    assert page.count("<svg") == 4
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace("http://creativecommons.org", "")
    # The tokenizer comes out of the checkpoint.
    assert (output / "hf" / "config.json").exists() and (output / "hf" / "tokenizer.json").exists()
    assert len((output / "train.jsonl").read_text().splitlines()) == 12


@pytest.mark.parametrize(
    ("after", "remedy"),
    [
        (1.1, "before saving; leave --set train.dtype out, as narrow numbers round by layout, or report this with "),
        (1.0, "0.500 over the last; raise --iterations, which is 3, or leave --set out"),
    ],
    ids=["reload", "reward"],
)
def test_a_result_that_is_wrong_is_a_failure_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, after: float, remedy: str
) -> None:
    corpus = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=300), prefix="corpus")
    served = SimpleNamespace(http_answer="")
    results = iter([corpus, SimpleNamespace(validation_loss=1.0), after, None, served, [SimpleNamespace(mean_reward=0.5)] * 3])
    monkeypatch.setattr("mcore_tools.quickstart.Stages.run", lambda *arguments: next(results))
    monkeypatch.setattr("mcore_tools.quickstart.CheckpointManager.latest", lambda self: 1)
    assert main(["--text", __file__, "--output", str(tmp_path / "run"), "--iterations", "3"]) == 1
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "no/such/place"], "no/such/place"),
        (["--text", "EMPTY"], "no document"),
        (["--set", "train.stepz=3"], "did you mean 'steps'"),
    ],
)
def test_bad_input_is_one_clear_error(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    arguments = [str(tmp_path / "empty.txt") if word == "EMPTY" else word for word in arguments]
    assert main(["--output", str(tmp_path / "run"), *arguments]) == 2
    written = capsys.readouterr()
    assert message in written.out.replace("\n", " ") + written.err
    assert "Traceback" not in written.out + written.err
