# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``a.b=c``: change fields of a frozen configuration."""

import dataclasses
import difflib
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from mcore_tools.recipes._values import MismatchError, Text, dataclass_of, name_of, read_value

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe, a field or a value that does not exist."""


def override(config: T, assignments: Sequence[str]) -> T:
    """A copy of ``config`` in which all ``path=value`` hold; values are read by the type of their field.

    They take effect together, so that their order does not matter; of two for one field the later counts. A part that is None
    (``moe``) comes into being with the first field that is set in it.

    Raises:
        RecipeError: no ``=``, an unknown field (names the nearest), a value of another type, or one the configuration refuses.
    """
    values: dict[str, Text] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise RecipeError(f"--set {assignment!r} has no '='; write path.to.field=value")
        values.pop(path.strip(), None)
        values[path.strip()] = Text(text.strip())

    def describe(prefix: str, below: Mapping[str, Any]) -> str:
        return " ".join(f"--set {prefix}{path}={text}" for path, text in below.items())

    return _set(config, values, "", "--set ", describe)


def merge(config: Any, values: Mapping[str, Any], source: str) -> Any:
    """A copy of ``config`` with nested ``values``; the class of a configuration instead of one builds it from them alone.

    Args:
        config: an instance, or a dataclass.
        values: field -> value, or for a part that is a configuration itself field -> values of it.
        source: where they come from, for messages.

    Raises:
        RecipeError: as of ``override``, and a field without a default that is not there.
    """
    return _set(config, values, "", f"{source}: ", lambda prefix, _: f"{source}: {prefix.rstrip('.') or 'the run'}")


def _set(owner: Any, values: Mapping[str, Any], prefix: str, origin: str, describe: Callable[[str, Mapping[str, Any]], str]) -> Any:
    """``owner`` with ``values`` by their path below it.

    Args:
        owner: a dataclass, an instance of one, or anything else, which has no fields.
        values: by path.
        prefix: path of ``owner`` itself, for messages.
        origin: begins a message about one path.
        describe: says what was asked for below a prefix.
    """
    kind = owner if isinstance(owner, type) else type(owner)
    fields = {field.name: field for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    hints = typing.get_type_hints(kind) if fields else {}
    changed: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = str(path).partition(".")
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"fields here: {', '.join(sorted(fields)) or 'none'}"
            raise RecipeError(f"{origin}{prefix}{path}: no field {name!r}; {hint}")
        if rest:
            below.setdefault(name, {})[rest] = value
        elif isinstance(value, Mapping) and dataclass_of(hints[name]) is not None:
            below.setdefault(name, {}).update(value)
        else:
            try:
                changed[name] = read_value(value, hints[name])
            except MismatchError:
                raise RecipeError(f"{origin}{prefix}{path}={value!r} is not of type {name_of(hints[name])}") from None
    for name, inner in below.items():
        part = changed[name] if name in changed else None if owner is kind else getattr(owner, name)
        if part is None and name not in changed:
            part = dataclass_of(hints[name])
        changed[name] = _set(part, inner, f"{prefix}{name}.", origin, describe)
    if owner is kind and (missing := [name for name, field in fields.items() if name not in changed and _is_required(field)]):
        raise RecipeError(f"{describe(prefix, values)}: set {', '.join(prefix + name for name in missing)} too, without a default")
    instance: Any = owner
    try:
        return kind(**changed) if owner is kind else dataclasses.replace(instance, **changed)
    except ValueError as error:
        raise RecipeError(f"{describe(prefix, values)}: {error}") from None


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
