# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the values of a dataclass have the types of its fields."""

import dataclasses
import functools
import numbers
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mcore_parallel._stability import internal_api

_NUMBERS = {int: (numbers.Integral, "an integer"), float: (numbers.Real, "a number"), bool: (bool, "True or False")}


@internal_api
def check_field_types(config: Any) -> None:
    """Refuse numbers that are text, integers that are floats, lists that should be tuples.

    Configurations call it from ``__post_init__`` before they compare anything. numpy's integers and numbers pass; True is no integer.

    Args:
        config: instance of a dataclass whose annotations can be resolved.

    Raises:
        ValueError: names the first field of another type, its value and the type.
    """
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        if not _conforms(value, hint):
            raise ValueError(f"{name}={value!r} must be {_words(hint)}, not {type(value).__name__}; write {_example(value, hint)}")


@functools.cache
def _hints(cls: type) -> Mapping[str, Any]:
    hints = get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}


def _conforms(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_conforms(value, one) for one in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is tuple:
        entry = {one for one in get_args(hint) if one is not ...}
        return isinstance(value, tuple) and all(any(_conforms(one, kind) for kind in entry) for one in value)
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint][0]) and isinstance(value, bool) == (hint is bool)
    return not isinstance(hint, type) or isinstance(value, hint)


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(one) for one in get_args(hint))
    if hint in _NUMBERS:
        return _NUMBERS[hint][1]
    if hint is types.NoneType:
        return "None"
    return "text" if hint is str else getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)


def _example(value: Any, hint: Any) -> str:
    """The value as the field takes it, where that is plain."""
    for kind in (int, float, tuple):
        try:
            converted = kind(value) if not isinstance(value, str) or kind is not tuple else None
        except (TypeError, ValueError, OverflowError):
            continue
        if converted is not None and _conforms(converted, hint) and (kind is tuple or converted == float(value)):
            return repr(converted)
    return "a value of that type"
