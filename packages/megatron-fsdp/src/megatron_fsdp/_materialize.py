# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Giving memory and values to modules built on the meta device."""

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from megatron_fsdp._parameter_grouping import UnitPlan

ResetParameters = Callable[[nn.Module], None]


def materialize(
    root: nn.Module, plans: Sequence[UnitPlan], device: torch.device, reset_parameters: ResetParameters | None = None
) -> Iterator[int]:
    """Allocate every meta parameter and buffer below ``root`` on ``device`` and let its module initialise them, in definition order.

    New memory is filled with NaN first, so that a value nobody initialised is found here and not in the loss.

    Args:
        root: module tree; tied parameters stay tied.
        plans: the units; what they say of parameters stays true of those that replace them.
        device: where the tensors go.
        reset_parameters: called with each module that owned meta tensors; default is the module's own ``reset_parameters()``.

    Yields:
        Position in ``plans`` of each unit as soon as all its parameters exist: whoever shards it then never holds more whole ones than
        those of a unit and the root.

    Raises:
        ValueError: a module cannot initialise itself, or left elements uninitialised.
    """
    waiting = {index: {id(module) for site in plan.sites for module, _ in site.slots} for index, plan in enumerate(plans)}
    if any(parameter.is_meta for parameter in root.parameters()) or any(buffer.is_meta for buffer in root.buffers()):
        for module in _materialized(root, device, reset_parameters):
            for index in [index for index, modules in waiting.items() if modules == {id(module)}]:
                del waiting[index]
                yield index
            for modules in waiting.values():
                modules.discard(id(module))
    yield from waiting


def _materialized(root: nn.Module, device: torch.device, reset_parameters: ResetParameters | None) -> Iterator[nn.Module]:
    # Weak, because what a unit sharded is to be freed.
    replaced: weakref.WeakValueDictionary[nn.Parameter, nn.Parameter] = weakref.WeakValueDictionary()
    for name, module in root.named_modules():
        parameters = [attribute for attribute, parameter in module._parameters.items() if parameter is not None and parameter.is_meta]
        buffers = [attribute for attribute, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for attribute in parameters:
            old = module._parameters[attribute]
            assert old is not None
            new = replaced.get(old)
            if new is None:
                new = replaced[old] = nn.Parameter(_poisoned(old, device), requires_grad=old.requires_grad)
            module._parameters[attribute] = new
            del new
        for attribute in buffers:
            module._buffers[attribute] = _poisoned(module._buffers[attribute], device)
        if parameters or buffers:
            _reset(name, module, reset_parameters)
            _check(name, module, [*parameters, *buffers])
        yield module


def _poisoned(like: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    assert like is not None
    tensor = torch.empty_like(like, device=device, requires_grad=False)
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()


def _reset(name: str, module: nn.Module, reset_parameters: ResetParameters | None) -> None:
    with torch.no_grad():
        if reset_parameters is not None:
            reset_parameters(module)
            return
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            kind = type(module).__name__
            raise ValueError(f"{name or 'the root'!r} ({kind}) is on the meta device and has no reset_parameters(); pass reset_parameters=")
        reset()


def _check(name: str, module: nn.Module, attributes: list[str]) -> None:
    for attribute in attributes:
        tensor = getattr(module, attribute)
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ValueError(
                f"{type(module).__name__}.{attribute} of {name or 'the root'!r} has elements that reset_parameters left uninitialised"
            )
