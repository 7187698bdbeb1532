# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Configurations as flat fields that can be compared between processes."""

import dataclasses
import functools
import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def config_fields(configs: Mapping[str, Any]) -> dict[str, str]:
    """Dotted field name -> its value as text, the same in every process that holds an equal value.

    Dataclasses and mappings are opened, sequences where they hold such; functions and classes stand for themselves by name, other
    objects by their ``repr`` without memory addresses. A dataclass also has an entry of its own with its class.

    Example:
        >>> config_fields({"run": {"steps": 3, "lr": 0.1}})
        {'run.lr': '0.1', 'run.steps': '3'}
    """
    return dict(sorted(_flat("", dict(configs))))


def version_fields(distributions: Sequence[str]) -> dict[str, str]:
    """Versions of Python, torch and installed distributions, as fields."""
    fields = {"versions.python": platform.python_version(), "versions.torch": str(torch.__version__)}
    for name in distributions:
        try:
            fields[f"versions.{name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            fields[f"versions.{name}"] = "not installed"
    return fields


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path, type(value).__qualname__
        members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        members = {str(key): member for key, member in value.items()}
    elif isinstance(value, list | tuple) and any(_opens(member) for member in value):
        members = {str(index): member for index, member in enumerate(value)}
    else:
        yield path, _text(value)
        return
    if not members and path:
        yield path, "empty"
    for name, member in members.items():
        yield from _flat(f"{path}.{name}" if path else name, member)


def _opens(value: Any) -> bool:
    return isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _text(value: Any) -> str:
    if isinstance(value, functools.partial):
        return f"partial({_text(value.func)}, {_text(list(value.args))}, {_text(sorted(value.keywords.items()))})"
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return _qualified(value)
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_text, value))) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_text, value)) + ")"
    return _ADDRESS.sub("", repr(value))


def _qualified(value: type | Callable[..., Any]) -> str:
    return f"{value.__module__}.{value.__qualname__}"
