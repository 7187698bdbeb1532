# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A public module."""

__all__ = ["LIMIT", "polish", "sand"]

LIMIT: int = 3


def polish(x: int) -> int:
    return x


def sand(x: int) -> int:
    return x
