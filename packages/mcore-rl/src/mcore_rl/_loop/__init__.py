# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Iterations: roll out, judge, update, refit."""
