# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The order of the files of tests: long ones first, so that no process is left with one when the others have ended."""

from collections import Counter
from collections.abc import Sequence

import pytest

_LONG_S, _RANK_S, _TEST_S = 20.0, 0.5, 0.1


def longest_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The tests by what their files are expected to cost; those of one file stay together and as they were."""
    costs: Counter[object] = Counter()
    for item in items:
        costs[item.path] += _expected_s(item)
    return sorted(items, key=lambda item: -costs[item.path])


def _expected_s(item: pytest.Item) -> float:
    # A test whose time limit is its own takes long.
    if item.get_closest_marker("journey") or item.get_closest_marker("timeout"):
        return _LONG_S
    world = item.get_closest_marker("world")
    return _RANK_S * world.args[0] if world else _TEST_S
