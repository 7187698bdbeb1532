# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How often a run began at the step where it begins: answers that ended it once are not drawn again."""

import json
from pathlib import Path

from mcore_tools.whole_file import write_whole

_NAME = "attempts.json"
_STRIDE = 1_000_003
"""Steps between two attempts: more than most runs have."""
_MOST_ENGINES = 2**20
"""Seeds of a step, whatever the number of engines, which may be another one when the run goes on."""


def begin_attempt(output: Path, step: int) -> int:
    """Times that a run in this folder began at ``step`` before, which counts this one; for the first rank."""
    path = output / _NAME
    try:
        known = json.loads(path.read_text())
        before = int(known["attempts"]) if known["step"] == step else 0
    except (OSError, ValueError, KeyError, TypeError):
        before = 0
    write_whole(path, json.dumps({"step": step, "attempts": before + 1}))
    return before


def attempt_seed(seed: int, *, rank: int, step: int, attempt: int) -> int:
    """Of an engine: another one for each engine, step and attempt, and that of the run for the first of each."""
    return seed + rank + _MOST_ENGINES * (step + _STRIDE * attempt)


def evaluation_seed(seed: int) -> int:
    """Of the evaluations beside draws with ``attempt_seed``: no engine, step or attempt has it."""
    return -1 - seed
