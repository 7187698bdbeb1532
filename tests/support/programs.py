# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Programs and rights of the system that some tests need, and other machines lack."""

import os
from typing import NoReturn

import pytest

REQUIRED = "MCORE_REQUIRE_PROGRAMS"
"""In the environment: whatever is lacking is a failure (`nox -s programs`)."""


def lacking(reason: str) -> NoReturn:
    """Skip this test; fail it where the environment says that nothing lacks.

    Args:
        reason: what is needed, and how to get it.
    """
    if os.environ.get(REQUIRED):
        pytest.fail(f"{REQUIRED} is set, and {reason}")
    pytest.skip(reason)
