# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The end of an engine of this process whose step hangs: nothing ends such a step but the end of the process."""

import contextlib
import threading
from collections.abc import Iterator

from mcore_inference import EngineDeadError, EngineRunner

_POLL_S = 0.2
_GRACE_S = 10.0
"""That an engine may make no progress beyond its ``stall_timeout_s``."""


@contextlib.contextmanager
def given_up_when_hung(runner: EngineRunner) -> Iterator[None]:
    """Give the engine up (``EngineRunner.fail``) once it made no progress for ten seconds more than its health allows.

    Its requests end with ``EngineDeadError``; who waits for ``runner.failure`` ends the process, for a supervisor to start again.

    Args:
        runner: of an engine whose process nobody else looks after.
    """
    closing = threading.Event()

    def watch() -> None:
        # Counted by looks, not by a clock: a process that was frozen for a while has made no progress, and goes on.
        num_red = 0
        while not closing.wait(_POLL_S):
            health = runner.health()
            num_red = 0 if health.alive else num_red + 1
            if num_red * _POLL_S > _GRACE_S:
                age = f" of {health.last_step_age_s:.0f} s" if health.last_step_age_s is not None else ""
                runner.fail(EngineDeadError(f"a step{age} hangs; the process ends, start it again"))
                return

    thread = threading.Thread(target=watch, name="mcore-hang", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()
