# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The bench of speculation trains, proposes and measures; it fails where proposals change a token."""

import json
import sys
from pathlib import Path

import pytest
import torch

from tools.bench import speculation


@pytest.mark.journey
def test_a_small_run_has_a_row_for_each_who_proposes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"--layers": 1, "--hidden-size": 16, "--steps": 2, "--outputs": 12, "--prompts": 1, "--output": tmp_path / "rows.json"}
    monkeypatch.setattr(sys, "argv", ["speculation", *(str(word) for pair in options.items() for word in pair)])
    threads = torch.get_num_threads()
    try:
        speculation.main()
    finally:
        torch.set_num_threads(threads)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["temperature"] for row in rows] == [0.0] * 5 + [1.0] * 5
    none, ngram, mtp, further, eagle = rows[:5]
    assert none["tokens_per_step"] == 1.0 and none["accepted_share"] is None and none["speed_up"] == 1.0
    assert all(row["tokens_per_s"] > 0 and row["tokens_per_step"] >= 1.0 for row in rows)
    assert all(0 <= row["accepted_share"] <= 1 for row in (mtp, further, eagle)) and ngram["by"] == "ngram, 4"
