# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``a.b=c``: change one field of a frozen configuration."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe, a field or a value that does not exist."""


def override(config: T, assignments: Sequence[str]) -> T:
    """A copy of ``config`` in which all ``path=value`` hold; values are read by the type of their field.

    They take effect together, so that their order does not matter; of two for one field the later counts.

    Raises:
        RecipeError: no ``=``, an unknown field (names the nearest), a value of another type, or one the configuration refuses.
    """
    values: dict[str, str] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise RecipeError(f"--set {assignment!r} has no '='; write path.to.field=value")
        values.pop(path.strip(), None)
        values[path.strip()] = text.strip()
    return _set(config, "", values)


def _set(config: Any, prefix: str, values: Mapping[str, str]) -> Any:
    """``config`` with ``values`` by their path below it; ``prefix`` is the path of ``config`` itself, for messages."""
    fields = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    changed: dict[str, Any] = {}
    for path, text in values.items():
        name, _, rest = path.partition(".")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields here: {', '.join(sorted(fields)) or 'none'}"
            raise RecipeError(f"--set {prefix}{path}: no field {name!r}; {hint}")
        if not rest:
            changed[name] = _read(text, typing.get_type_hints(type(config))[name], prefix + path)
    for name in dict.fromkeys(path.partition(".")[0] for path in values if "." in path):
        below = {path.partition(".")[2]: text for path, text in values.items() if path.startswith(f"{name}.")}
        changed[name] = _set(changed.get(name, getattr(config, name)), f"{prefix}{name}.", below)
    try:
        owner: Any = config
        return dataclasses.replace(owner, **changed)
    except ValueError as error:
        given = " ".join(f"--set {prefix}{path}={text}" for path, text in values.items())
        raise RecipeError(f"{given}: {error}") from None


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
