# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fixtures shared by all test folders."""

import functools
import gc
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.file_order import longest_first
from tests.support.world import World, run, start_server

# Small matrices are slower on several threads. Before torch is loaded; what a test starts has it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Without bytecode on the disk each of them compiles torch anew: 10 s of a core instead of 2.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_configure(config: pytest.Config) -> None:
    """Properties are tried on the same examples in every run, however slow; ``--hypothesis-profile=default`` draws others."""
    if config.getoption("--hypothesis-profile", default="") is None:
        from hypothesis import settings

        settings.load_profile("ci")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What is loaded by then is no garbage: looking through it costs more than most tests, and commands of tests do so when they begin."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = longest_first(items)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test draws without a seed is its own, whatever ran in its process before; its fixtures' draws too."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    for name, function in (("torch", "manual_seed"), ("numpy.random", "seed")):
        if name in sys.modules:
            getattr(sys.modules[name], function)(seed)


@pytest.fixture(scope="session", autouse=True)
def _world_server(request: pytest.FixtureRequest) -> None:
    """The worlds' server is the first one, whatever starts ranks of its own before a test needs a world."""
    if any("world" in getattr(item, "fixturenames", ()) for item in request.session.items):
        start_server()


@pytest.fixture(scope="module")
def _shared_worlds() -> Iterator[dict[int, World]]:
    """By their numbers of ranks."""
    worlds: dict[int, World] = {}
    yield worlds
    for one in worlds.values():
        one.close()


@pytest.fixture
def world(request: pytest.FixtureRequest, _shared_worlds: dict[int, World]) -> Callable[..., list[object]]:
    """Run a module-level function on every rank of a gloo world; ``@pytest.mark.world(n)`` sets the number of ranks.

    The world is fresh, or with ``@pytest.mark.world(n, shared=True)`` that of the file's other shared cases of as many ranks, until one of
    them fails: for short cases that leave nothing behind.
    """
    marker = request.node.get_closest_marker("world")
    assert marker is not None, "the test needs @pytest.mark.world(number of ranks)"
    [num_ranks] = marker.args
    if not marker.kwargs.get("shared"):
        return functools.partial(run, num_ranks=num_ranks)

    def run_shared(check: Callable[..., object], **inputs: Any) -> list[object]:
        if num_ranks not in _shared_worlds:
            _shared_worlds[num_ranks] = World(num_ranks)
        try:
            return _shared_worlds[num_ranks].run(check, **inputs)
        except BaseException:
            _shared_worlds.pop(num_ranks).close()
            raise

    return run_shared
