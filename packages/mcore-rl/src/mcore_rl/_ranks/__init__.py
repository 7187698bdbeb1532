# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks of a run: who trains, who serves, who waits for whom."""
