# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``a.b=c``: change one field of a frozen configuration."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe, a field or a value that does not exist."""


def override(config: T, assignments: Sequence[str]) -> T:
    """A copy of ``config`` in which each ``path=value`` holds; values are read by the type of their field.

    Raises:
        RecipeError: no ``=``, an unknown field (names the nearest), a value of another type, or one the configuration refuses.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise RecipeError(f"--set {assignment!r} has no '='; write path.to.field=value")
        config = _set(config, path.strip().split("."), text.strip(), path)
    return config


def _set(config: Any, names: list[str], text: str, path: str) -> Any:
    fields = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    if names[0] not in fields:
        near = difflib.get_close_matches(names[0], fields, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"fields here: {', '.join(sorted(fields)) or 'none'}"
        raise RecipeError(f"--set {path}: no field {names[0]!r}; {hint}")
    if len(names) > 1:
        value = _set(getattr(config, names[0]), names[1:], text, path)
    else:
        value = _read(text, typing.get_type_hints(type(config))[names[0]], path)
    try:
        owner: Any = config
        return dataclasses.replace(owner, **{names[0]: value})
    except ValueError as error:
        raise RecipeError(f"--set {path}={text}: {error}") from None


def _read(text: str, kind: Any, path: str) -> Any:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if text.lower() in ("none", "null") and type(None) in options:
        return None
    for option in options:
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float, str):
            try:
                return option(text)
            except ValueError:
                continue
    names = " or ".join("None" if option is type(None) else getattr(option, "__name__", str(option)) for option in options)
    raise RecipeError(f"--set {path}={text!r} is not of type {names}")
