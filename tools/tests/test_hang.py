# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""When an engine counts as one that hangs; test_serve.py has a server whose engine does."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mcore_inference import EngineDeadError, EngineHealth
from mcore_tools.serving import _hang, given_up_when_hung


class ScriptedRunner:
    """Is alive or not as told, and the last for ever; a look at it may take long."""

    def __init__(self, looks: Iterator[tuple[bool, float]]) -> None:
        self._looks, self._last = looks, (True, 0.0)
        self.num_looks = 0
        self.error: EngineDeadError | None = None
        self.has_failed = threading.Event()

    def health(self) -> EngineHealth:
        alive, seconds = self._last = next(self._looks, self._last)
        time.sleep(seconds)
        self.num_looks += 1
        return EngineHealth(alive=alive, last_step_age_s=12.0, unfinished_requests=1, failure=None)

    def fail(self, error: EngineDeadError) -> None:
        self.error = error
        self.has_failed.set()


def test_an_engine_hangs_after_many_red_looks_in_a_row_and_not_after_a_process_was_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hang, "_POLL_S", 0.001)
    monkeypatch.setattr(_hang, "_GRACE_S", 0.01)
    # Red behind a pause that is longer than the grace, then nine times, then for good.
    runner: Any = ScriptedRunner(iter([(False, 0.05), (False, 0.0), (True, 0.0), *[(False, 0.0)] * 9, (True, 0.0), (False, 0.0)]))
    with given_up_when_hung(runner):
        assert runner.has_failed.wait(30)
    assert 13 + 9 <= runner.num_looks <= 13 + 12 and "a step of 12 s hangs" in str(runner.error)
