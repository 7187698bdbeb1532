# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether an object has what a protocol asks for, by its running signatures."""

import inspect
from typing import Any

from torch import nn


def mismatches(provider: Any, protocol: type) -> list[str]:
    """What a provider lacks: members that are missing, and calls of the protocol that its signature refuses.

    A provider may take further arguments if they have defaults. Positional parameters of a protocol are passed by position, those
    that are keyword-only by keyword, as its owner does.
    """
    found = []
    for name, member in _members(protocol).items():
        if not hasattr(provider, name):
            found.append(f"no {name}")
        elif inspect.isfunction(member) and (reason := _refusal(_callable(provider, name), member)):
            found.append(f"{name}: {reason}")
    return found


def _members(protocol: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner in reversed(protocol.__mro__):
        if getattr(owner, "_is_protocol", False) and owner.__module__ != "typing":
            own = {name: value for name, value in vars(owner).items() if not name.startswith("_") or name == "__call__"}
            found |= {name: value for name, value in own.items() if inspect.isfunction(value) or isinstance(value, property)}
    return found


def _callable(provider: Any, name: str) -> Any:
    # The __call__ of a module takes anything and hands it to forward.
    return provider.forward if name == "__call__" and isinstance(provider, nn.Module) else getattr(provider, name)


def _refusal(call: Any, member: Any) -> str:
    parameters = list(inspect.signature(member).parameters.values())[1:]
    positional = [object() for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    keywords = {parameter.name: object() for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    try:
        inspect.signature(call).bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return ""
