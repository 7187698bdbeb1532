# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the planner refuses."""


class PlannerError(ValueError):
    """An input that cannot be planned with; names the field, its value and what to do."""
