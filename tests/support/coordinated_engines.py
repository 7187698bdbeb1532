# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines of a coordinator over real sockets."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from mcore_inference import EngineRunner, SamplingParams
from mcore_inference.coordinator import (
    CoordinatedRunner,
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
)

__all__ = ["LONG", "PATIENT", "QUICK", "TEN", "join", "serve", "start", "ten", "until"]

TEN = SamplingParams(num_tokens_to_generate=10, seed=1, ignore_eos=True)
LONG = SamplingParams(num_tokens_to_generate=400, seed=1, ignore_eos=True)
# A busy machine is silent for a second now and then; only who looks at silence has a short time-out.
QUICK = {"heartbeat_s": 0.05, "engine_timeout_s": 20.0, "client_timeout_s": 20.0, "signal_timeout_s": 5.0}
# An engine that is silent is lost long after each test.
PATIENT = {"heartbeat_s": 0.05, "engine_timeout_s": 100.0}


def serve(stack: ExitStack, runners: list[EngineRunner], **settings: Any) -> DataParallelInferenceCoordinator:
    coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**{**QUICK, **settings})))
    for index, runner in enumerate(runners):
        security = coordinator.config.security
        stack.enter_context(EngineWorker(runner, coordinator.address, name=f"dp-{index}", security=security, heartbeat_s=0.05))
    coordinator.wait_for_engines(len(runners))
    return coordinator


def start(stack: ExitStack, **settings: Any) -> DataParallelInferenceCoordinator:
    return stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**{**PATIENT, **settings})))


def join(stack: ExitStack, runner: EngineRunner, to: DataParallelInferenceCoordinator, name: str = "dp-0", **options: Any) -> EngineWorker:
    security = CoordinatorSecurity(secret=to.config.security.secret)
    worker = stack.enter_context(EngineWorker(runner, to.address, name=name, heartbeat_s=0.05, security=security, **options))
    return worker


def until(holds: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


async def ten(runner: CoordinatedRunner, count: int = 1) -> None:
    streams = [await runner.submit(f"prompt {number}", TEN) for number in range(count)]
    for stream in streams:
        assert len((await stream.record()).generated_tokens) == 10
