# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the numbers in the fields of a configuration are in their range."""

import math
from numbers import Integral, Real


def check_integers(config: object, least: int, *names: str) -> None:
    """Raises:
    ValueError: a field is no whole number of at least ``least``; names it.
    """
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, Integral):
            raise ValueError(f"{name}={value!r} must be a whole number, at least {least}")
        if value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def check_finite(config: object, least: float, *names: str) -> None:
    """Raises:
    ValueError: a field is no finite number of at least ``least``; names it.
    """
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, Real) or not least <= float(value) < math.inf:
            raise ValueError(f"{name}={value!r} must be a finite number, at least {least:g}")
