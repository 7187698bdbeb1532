# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Long trials with figures; short forms of them run with the tests."""
