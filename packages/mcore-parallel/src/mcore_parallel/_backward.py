# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether a forward runs inside a backward."""

import torch

from mcore_parallel._stability import internal_api


@internal_api
def in_backward() -> bool:
    """Whether this thread runs a backward: a forward in it is a recomputation, whose first run has been seen."""
    return torch._C._current_graph_task_id() != -1
