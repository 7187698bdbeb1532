# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Giving memory and values to modules built on the meta device."""

from collections.abc import Callable

import torch
from torch import nn

ResetParameters = Callable[[nn.Module], None]


def materialize(root: nn.Module, device: torch.device, reset_parameters: ResetParameters | None = None) -> None:
    """Allocate every meta parameter and buffer below ``root`` on ``device`` and let its module initialise them, in definition order.

    New memory is filled with NaN first, so that a value nobody initialised is found here and not in the loss.

    Args:
        root: module tree; tied parameters stay tied.
        device: where the tensors go.
        reset_parameters: called with each module that owned meta tensors; default is the module's own ``reset_parameters()``.

    Raises:
        ValueError: a module cannot initialise itself, or left elements uninitialised.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, module in root.named_modules():
        mine = [attribute for attribute, parameter in module._parameters.items() if parameter is not None and parameter.is_meta]
        buffers = [attribute for attribute, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for attribute in mine:
            old = module._parameters[attribute]
            assert old is not None
            if old not in replaced:
                replaced[old] = nn.Parameter(_poisoned(old, device), requires_grad=old.requires_grad)
            module._parameters[attribute] = replaced[old]
        for attribute in buffers:
            module._buffers[attribute] = _poisoned(module._buffers[attribute], device)
        if mine or buffers:
            _reset(name, module, reset_parameters)
            _check(name, module, [*mine, *buffers])


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
