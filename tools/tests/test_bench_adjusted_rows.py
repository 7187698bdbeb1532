# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The bench of requests whose scores are adjusted steps an engine of today."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tools.bench import adjusted_rows


def test_a_small_run_has_a_row_for_each_kind_of_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"--vocab-sizes": 64, "--requests": 4, "--steps": 12, "--output": tmp_path / "rows.json"}
    monkeypatch.setattr(sys, "argv", ["adjusted_rows", *(str(word) for pair in options.items() for word in pair)])
    threads = torch.get_num_threads()
    try:
        adjusted_rows.main()
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["adjusted"] for row in rows] == ["none", *adjusted_rows._KINDS, "all kinds in turn"]
    assert [row["requests"] for row in rows] == [4, 5, 5, 5, 5, 4]
    assert all(0 < row["min_ms"] <= row["ms"] <= row["max_ms"] for row in rows)
