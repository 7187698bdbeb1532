# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pretraining refuses ranks that were started differently, before anything is written or allocated."""

from pathlib import Path

from mcore_parallel.data import ByteTokenizer, preprocess
from mcore_tools import train
from tests.support.commands import Command, torchrun_environment


def test_a_rank_with_another_learning_rate_is_named_on_every_rank(tmp_path: Path) -> None:
    text, corpus = tmp_path / "text.jsonl", tmp_path / "corpus"
    text.write_text('{"text": "one line"}\n')
    preprocess([text], str(corpus), ByteTokenizer())
    _store, world = torchrun_environment(2)
    words = ["--recipe", "gpt_tiny", "--set", f"data.prefix={corpus}", "--set", "data.tokenizer=byte", "--set", "plan.dp=2"]
    with (
        Command(train.main, [*words, "--set", "optimizer.lr=0.001"], {**world, "RANK": "0"}) as one,
        Command(train.main, [*words, "--set", "optimizer.lr=0.002"], {**world, "RANK": "1"}) as other,
    ):
        for rank in (one, other):
            assert rank.wait() == 2
            assert "run.optimizer.lr: 0.001 on rank 0, 0.002 on rank 1" in rank.errors
            assert "Traceback" not in rank.errors
