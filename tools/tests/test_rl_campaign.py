# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A few trials of each part of the campaign ``tests.campaigns.rl_trust``: nothing is lost, doubled or told too late."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAST = ["stragglers", "crashes", "refits", "layouts", "packing"]


@pytest.mark.parametrize(
    ("parts", "share"),
    [(FAST, 0.04), (["resumes"], 0.03), pytest.param([*FAST, "resumes", "drift"], 0.2, marks=pytest.mark.slow)],
    ids=["fast", "resumes", "all"],
)
@pytest.mark.timeout(600)
def test_nothing_is_lost_doubled_or_untold(parts: list[str], share: float, tmp_path: Path) -> None:
    output = tmp_path / "trust.json"
    command = [sys.executable, "-m", "tests.campaigns.rl_trust", "--share", str(share), "--output", str(output), "--parts", *parts]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, env=environment)
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [row["part"] for row in rows] == parts and all(row["ok"] for row in rows)
