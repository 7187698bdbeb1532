# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The bench of streams steps an engine of today."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tools.bench import streaming_rows


def test_a_small_run_has_a_row_for_each_kind_of_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"--requests": 3, "--steps": 14, "--answer-tokens": 16, "--device-ms": 1, "--output": tmp_path / "rows.json"}
    monkeypatch.setattr(sys, "argv", ["streaming_rows", *(str(word) for pair in options.items() for word in pair)])
    threads = torch.get_num_threads()
    try:
        streaming_rows.main()
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    kinds = [(text, streams) for text in (False, True) for streams in (False, True)]
    assert [(row["tokens"], row["text"], row["streams"]) for row in rows] == [(14, *kind) for kind in kinds] + [
        (16, *kind) for kind in kinds[2:]
    ]
    assert all(0 < row["min_engine_ms"] <= row["engine_ms"] and row["wall_ms"] > 0 for row in rows)
