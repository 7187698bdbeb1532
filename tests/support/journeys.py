# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Cases of a test, of which the long ones are journeys."""

from collections.abc import Iterable
from typing import Any

import pytest

TWO_RANKS = (
    pytest.param({"tp": 2}, marks=pytest.mark.journey),
    pytest.param({"tp": 2, "sequence_parallel": False}, marks=pytest.mark.journey),
    {"dp": 2},
)
"""Plans of two ranks that are compared with one."""


def journeys_among(cases: Iterable[Any], *long: str) -> list[Any]:
    """The cases as parameters, each named by a text or a ``__name__``; the long ones are marked journey.

    Raises:
        ValueError: a long one is no case.
    """
    named = {case if isinstance(case, str) else case.__name__: case for case in cases}
    if unknown := set(long) - set(named):
        raise ValueError(f"long={sorted(unknown)} are no cases; they are {sorted(named)}")
    return [pytest.param(case, marks=pytest.mark.journey) if name in long else case for name, case in named.items()]
