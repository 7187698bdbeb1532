# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A few trials of each part of the campaign ``tests.campaigns.rl_trust``: nothing is lost, doubled or told too late."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns.rl_trust import main
from tests.support.commands import run_command

FAST = ["stragglers", "crashes", "conversations", "refits", "layouts", "packing"]


def rows_of(output: Path) -> list[dict[str, Any]]:
    return json.loads(output.read_text())["rows"] if output.exists() else []


# Here, where the server of its worlds runs already.
@pytest.mark.journey
@pytest.mark.timeout(600)
def test_nothing_is_lost_or_untold(tmp_path: Path) -> None:
    output = tmp_path / "trust.json"
    try:
        code = main(["--share", "0.04", "--output", str(output), "--parts", *FAST])
    finally:
        logging.disable(logging.NOTSET)
    rows = rows_of(output)
    assert code == 0, rows
    assert [row["part"] for row in rows] == FAST and all(row["ok"] for row in rows)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("parts", "share"),
    [(["resumes"], 0.03), pytest.param([*FAST, "resumes", "drift"], 0.2, marks=pytest.mark.slow)],
    ids=["resumes", "all"],
)
@pytest.mark.timeout(600)
def test_nothing_is_lost_doubled_or_untold(parts: list[str], share: float, tmp_path: Path) -> None:
    output = tmp_path / "trust.json"
    words = ["--share", str(share), "--output", str(output), "--parts", *parts]
    code, *outputs = run_command(main, words, timeout_s=580)
    rows = rows_of(output)
    assert code == 0, [words[-2000:] for words in outputs]
    assert [row["part"] for row in rows] == parts and all(row["ok"] for row in rows)
