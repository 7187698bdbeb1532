# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Layers without parallelism of their own."""

from mcore_parallel.nn._step import Step

__all__ = ["Step"]
