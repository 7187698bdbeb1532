# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fixtures shared by all test folders."""

import functools
from collections.abc import Callable

import pytest

from tests.support.world import run


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Callable[..., list[object]]:
    """Run a module-level function on every rank of a fresh gloo world; ``@pytest.mark.world(n)`` sets the number of ranks."""
    marker = request.node.get_closest_marker("world")
    assert marker is not None, "the test needs @pytest.mark.world(number of ranks)"
    return functools.partial(run, num_ranks=marker.args[0])
