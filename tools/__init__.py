# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The applications (``mcore_tools``), and beside them what stays in the repository: checks and benchmarks."""
