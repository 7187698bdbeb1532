# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The form that a request's output must have."""

import json
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_inference._fields import as_flag
from mcore_inference._stability import experimental_api

_MAX_CHARACTERS = 2**18
_MAX_CHOICES = 1024
_KINDS = ("json_schema", "json_object", "regex", "choices", "grammar")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """The form of an output; exactly one field is set.

    Tokens that leave the form get probability 0, and the output ends when nothing can follow. The form itself is compiled when the engine
    gets the request, which needs the extra ``structured``.

    Example:
        >>> StructuredOutput(choices=["yes", "no"]).form
        ('choices', '["yes","no"]')

    Raises:
        ValueError: none or several fields are set, a field is of another type, or longer than 262144 characters.
    """

    json_schema: Mapping[str, Any] | str | None = None
    """JSON that a schema describes; the schema as a mapping or as its text. Between the parts of the JSON stands at most one blank."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Text that an expression of Rust's ``regex`` matches from end to end: no look-around, no back references; ``\\d`` and ``\\w`` are
    Unicode's."""
    choices: Collection[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text of a context-free grammar in the Lark dialect of llguidance, whose first rule is ``start``."""

    def __post_init__(self) -> None:
        as_flag("json_object", self.json_object)
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ValueError(f"structured_output sets {given or 'nothing'}; set exactly one of {list(_KINDS)}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={str(value)[:80]!r} must be text that is not empty")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choices is not None:
            object.__setattr__(self, "choices", _choices(self.choices))
        if len(self.form[1]) > _MAX_CHARACTERS:
            raise ValueError(f"{given[0]} has {len(self.form[1])} characters; at most {_MAX_CHARACTERS} are allowed")

    @property
    def form(self) -> tuple[str, str]:
        """Name of the field that is set, and its value as text (choices as a JSON list)."""
        if self.json_object:
            return "json_object", '{"type":"object"}'
        if self.choices is not None:
            return "choices", json.dumps(list(self.choices), separators=(",", ":"))
        name, value = next((name, value) for name in ("json_schema", "regex", "grammar") if (value := getattr(self, name)) is not None)
        return name, value

    def serialize(self) -> dict[str, Any]:
        """The field that is set, as JSON-ready data."""
        name, text = self.form
        return {name: {"json_object": True, "choices": list(self.choices or ())}.get(name, text)}

    @classmethod
    def deserialize(cls, data: Mapping[str, Any]) -> "StructuredOutput":
        """A form from data; fields this version does not know are dropped with a warning."""
        return cls(**known_fields("structured_output", data, _KINDS))


def known_fields(name: str, data: object, known: Collection[str]) -> dict[str, Any]:
    """Those fields of serialized data that this version has; of the others a warning says the names.

    Raises:
        ValueError: the data are no mapping; names what they are for.
    """
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} must be a mapping of its fields and is a {type(data).__name__}")
    if unknown := sorted(str(field) for field in data if field not in known):
        warnings.warn(f"{name} of this version has no fields {unknown}; they are dropped", UserWarning, stacklevel=3)
    return {field: value for field, value in data.items() if field in known}


def _schema_text(schema: object) -> str:
    try:
        if isinstance(schema, str):
            json.loads(schema)
            return schema
        if isinstance(schema, Mapping):
            return json.dumps(schema, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema={str(schema)[:80]!r} is no JSON: {str(error)[:200]}") from error
    raise ValueError(f"json_schema is a {type(schema).__name__}; give a mapping, or its text")


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Collection):
        raise ValueError(f"choices={str(choices)[:80]!r} must be a sequence of texts; wrap it in a list")
    if not 0 < len(choices) <= _MAX_CHOICES or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError(f"choices must hold 1 to {_MAX_CHOICES} texts that are not empty")
    return tuple(choices)
