# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a hook sees of a module's call: the tensors in it, whether a backward runs, and how to stay out of compiled graphs."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors inside containers, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name, None))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors inside lists, tuples and dictionaries; leave everything else."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value


def in_backward() -> bool:
    """Whether a backward is running: tells a forward that recomputes activations from one that begins."""
    return torch._C._current_graph_task_id() != -1


def outside(hook: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """The hook with its first arguments, never part of what torch.compile makes."""

    def call(*args: Any) -> Any:
        return hook(*first, *args)

    hooked: Any = torch.compiler.disable(call)
    hooked.is_of_megatron_fsdp = True
    return hooked


def is_hooked(module: nn.Module) -> bool:
    """Whether ``outside`` made a hook of it or of a module in it."""
    hooks = (hook for part in module.modules() for hook in part._forward_pre_hooks.values())
    return any(getattr(hook, "is_of_megatron_fsdp", False) for hook in hooks)
