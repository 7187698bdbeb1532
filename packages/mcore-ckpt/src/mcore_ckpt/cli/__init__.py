# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The command ``mcore-ckpt``: inspect, verify, compare, rewrite, export and import checkpoints.

Exit status 0: done; 1: verify found damage, or diff a difference; 2: it could not be done.
"""

from mcore_ckpt.cli._main import main

__all__ = ["main"]
