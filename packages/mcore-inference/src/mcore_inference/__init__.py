# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""(filled in by the wheel)"""
