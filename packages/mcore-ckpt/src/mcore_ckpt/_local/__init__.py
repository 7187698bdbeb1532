# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpoints on the disks, or in the memory, of the nodes."""

from mcore_ckpt._local._checkpoints import LocalCheckpoints, PersistentSteps

__all__ = ["LocalCheckpoints", "PersistentSteps"]
