# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Small environments without dependencies."""

from mcore_rl.envs._character_share import CharacterShare

__all__ = ["CharacterShare"]
