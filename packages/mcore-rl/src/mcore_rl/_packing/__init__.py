# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trajectories in micro-batches: bins without padding, shared prompts."""
