# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What hooks have to do with graphs: those of autograd, in which they run, and compiled ones, out of which they stay."""

from collections.abc import Callable
from typing import Any

import torch


def in_backward() -> bool:
    """Whether a backward is running: tells a forward that recomputes activations from one that begins."""
    return torch._C._current_graph_task_id() != -1


def outside(hook: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """The hook with its first arguments, never part of what torch.compile makes."""

    def call(*args: Any) -> Any:
        return hook(*first, *args)

    found: Any = torch.compiler.disable(call)
    return found
