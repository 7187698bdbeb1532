# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Measurements; each writes a JSON file with machine, versions and command."""
