# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Long files of tests come first, whole and in their own order."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.file_order import longest_first


class FakeItem:
    """What the order looks at of a test."""

    def __init__(self, name: str, *marks: Any) -> None:
        self.name, self.path = name, Path(name.partition(":")[0])
        self._marks = {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> Any:
        return self._marks.get(name)


def test_the_longest_file_is_first_and_every_file_stays_whole() -> None:
    short = [FakeItem(f"short:{number}") for number in range(12)]
    world = [FakeItem("world:b", pytest.mark.world(4)), FakeItem("world:a", pytest.mark.world(2))]
    journey = [FakeItem("journey:a", pytest.mark.journey), FakeItem("journey:b")]
    limited = [FakeItem("limited:a", pytest.mark.timeout(600))]
    ordered = longest_first([*short, *world, *limited, *journey])  # type: ignore[list-item]
    assert [item.name for item in ordered] == [item.name for item in [*journey, *limited, *world, *short]]
