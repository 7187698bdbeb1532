# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What hooks have to do with graphs: those of autograd, in which they run, and compiled ones, out of which they stay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def in_backward() -> bool:
    """Whether a backward is running: tells a forward that recomputes activations from one that begins."""
    return torch._C._current_graph_task_id() != -1


def outside(hook: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """The hook with its first arguments, never part of what torch.compile makes."""

    def call(*args: Any) -> Any:
        return hook(*first, *args)

    found: Any = torch.compiler.disable(call)
    found.is_of_megatron_fsdp = True
    return found


def is_hooked(module: nn.Module) -> bool:
    """Whether ``outside`` made a hook of it or of a module in it."""
    hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
    return any(getattr(hook, "is_of_megatron_fsdp", False) for hook in hooks)
