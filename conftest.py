# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fixtures shared by all test folders."""

import functools
import os
from collections.abc import Callable

import pytest

from tests.support.world import run, start_server

# Small matrices are slower on several threads. Before torch is loaded; what a test starts has it too.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _world_server(request: pytest.FixtureRequest) -> None:
    """The worlds' server is the first one, whatever starts ranks of its own before a test needs a world."""
    if any("world" in getattr(item, "fixturenames", ()) for item in request.session.items):
        start_server()


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Callable[..., list[object]]:
    """Run a module-level function on every rank of a fresh gloo world; ``@pytest.mark.world(n)`` sets the number of ranks."""
    marker = request.node.get_closest_marker("world")
    assert marker is not None, "the test needs @pytest.mark.world(number of ranks)"
    return functools.partial(run, num_ranks=marker.args[0])
