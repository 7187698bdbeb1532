# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Values of fields: from text and plain data by the type of the field, and back to plain data."""

import collections.abc
import dataclasses
import types
import typing
from typing import Any

import torch
import yaml


class Text(str):
    """A value as it was typed, which its field's type tells how to read."""

    __slots__ = ()


class MismatchError(TypeError):
    """A value that is not of the type of its field."""


def read_value(value: Any, kind: Any) -> Any:
    """``value`` as ``kind``; numbers, booleans, None, dtypes and lists are also read from text.

    Raises:
        MismatchError: it is no such value.
    """
    options = _options(kind)
    if type(None) in options and (value is None or (isinstance(value, str) and value.lower() in ("none", "null"))):
        return None
    # Everything is text: that comes last.
    for option in sorted((option for option in options if option is not type(None)), key=lambda option: option is str):
        try:
            return _read(value, option)
        except (MismatchError, ValueError, RecursionError, yaml.YAMLError):
            continue
    raise MismatchError(f"{value!r} is not of type {name_of(kind)}")


def plain(value: Any, path: str = "") -> Any:
    """``value`` as mappings, lists, text, numbers, booleans and None; ``read_value`` reads it back.

    Args:
        value: a configuration or a value of one.
        path: of the value, for messages.

    Raises:
        ValueError: a value that cannot be written, such as a function.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        below = f"{path}." if path else ""
        return {field.name: plain(getattr(value, field.name), below + field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, collections.abc.Mapping):
        return {str(key): plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{path}={value!r} is no value that a file can hold; set it in a recipe, and leave it out of the file")


def dataclass_of(kind: Any) -> type | None:
    """The configuration among the types that a field may have, None if there is none."""
    return next((option for option in _options(kind) if isinstance(option, type) and dataclasses.is_dataclass(option)), None)


def name_of(kind: Any) -> str:
    """A type in words."""
    return " or ".join("None" if option is type(None) else _name(option) for option in _options(kind))


def _options(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union else (kind,)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind).replace("typing.", "")


def _read(value: Any, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is str and isinstance(value, str):
        return str(value)
    if kind is bool:
        return _read_bool(value)
    if kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        if kind is int and isinstance(value, float):
            raise MismatchError
        return kind(value)
    if kind is torch.dtype and isinstance(value, str):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    if origin is typing.Literal and value in arguments:
        return next(argument for argument in arguments if argument == value)
    if origin in (tuple, list):
        return origin(_read_items(value, origin, arguments))
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, collections.abc.Mapping):
        hints = typing.get_type_hints(kind)
        if not set(value) <= set(hints):
            raise MismatchError
        return kind(**{name: read_value(item, hints[name]) for name, item in value.items()})
    raise MismatchError


def _read_bool(value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise MismatchError
    return value


def _items_of(text: str) -> Any:
    """A list as it was typed; items may have characters that YAML takes for its own, as patterns of names do (`[layers.1?.mlp.*]`)."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        if text[:1] != "[" or text[-1:] != "]" or set("\"'{}") & set(text):
            raise
        return [item.strip() for item in text[1:-1].split(",")]


def _read_items(value: Any, origin: type, arguments: tuple[Any, ...]) -> list[Any]:
    items = _items_of(value) if isinstance(value, Text) else value
    if not isinstance(items, list | tuple):
        raise MismatchError
    if origin is list or (len(arguments) == 2 and arguments[1] is ...):
        return [read_value(item, arguments[0]) for item in items]
    if len(items) != len(arguments):
        raise MismatchError
    return [read_value(item, kind) for item, kind in zip(items, arguments, strict=True)]
