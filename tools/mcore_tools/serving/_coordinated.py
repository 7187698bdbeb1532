# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines of a command in processes of their own, behind a coordinator of this process."""

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence

from mcore_inference.coordinator import CoordinatedRunner, CoordinatorConfig, CoordinatorSecurity, DataParallelInferenceCoordinator
from mcore_tools.serving._layout import EngineLayout
from mcore_tools.serving._replicas import Replicas

_POLL_S = 0.05
_VARIABLE = "USE_COORDINATOR"


def uses_coordinator() -> bool:
    """Whether the environment asks for a coordinator where one engine would do: ``USE_COORDINATOR=1``.

    Raises:
        ValueError: the variable is neither 0 nor 1, or asks for it under torchrun.
    """
    asked = os.environ.get(_VARIABLE, "0")
    if asked not in ("0", "1"):
        raise ValueError(f"{_VARIABLE}={asked} must be 0 or 1: whether requests go through a coordinator")
    if asked == "1" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(f"{_VARIABLE}=1 starts the processes of its engines itself; leave torchrun out")
    return asked == "1"


@contextlib.contextmanager
def coordinated(
    command: Sequence[str], *, count: int, layout: EngineLayout, is_stopped: Callable[[], bool] = lambda: False
) -> Iterator[Callable[[], CoordinatedRunner] | None]:
    """Start engines and a coordinator for them.

    Args:
        command: of a process, as of ``Replicas``.
        count: engines.
        layout: of each engine, or of all that share experts.
        is_stopped: asked while they start.

    Returns:
        What makes a runner over all of them; None once it was stopped.

    Raises:
        ValueError: there are too few GPUs, or an engine ended at its start.
    """
    security = CoordinatorSecurity(secret=secrets.token_hex(32))
    with (
        DataParallelInferenceCoordinator(CoordinatorConfig(security=security)) as coordinator,
        Replicas(command, count=count, coordinator=coordinator, layout=layout) as replicas,
    ):
        while coordinator.num_engines < count and not is_stopped():
            if replicas.num_given_up:
                raise ValueError("an engine ended at its start; the reason stands above")
            time.sleep(_POLL_S)
        yield None if coordinator.num_engines < count else lambda: CoordinatedRunner(coordinator.address, security=security)
