# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Nested states, ``{"model": ..., "optimizer": ...}``: tensors under dotted names, and the values beside them."""

from collections.abc import Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt._core._sharded import entries
from mcore_ckpt._errors import CheckpointingException, list_names

VALUES = "state_values"
"""Name in the extra values of a checkpoint under which those of its state are kept."""
_PLAIN = (str, int, float, bool, type(None))


@dataclass
class FlatState:
    """A state without its nesting."""

    tensors: dict[str, Any] = field(default_factory=dict)
    """Name -> what `save` and `load` take for one tensor."""
    values: dict[str, Any] = field(default_factory=dict)
    """Name -> number, string, bool, None, or a list of these."""
    places: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Container and key of each value."""

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Put stored values into the containers that the state came in; a tuple stays a tuple."""
        for name, (container, key) in self.places.items():
            if name in stored:
                container[key] = tuple(stored[name]) if isinstance(self.values[name], tuple) else stored[name]


def flatten_state(state: Any) -> FlatState:
    """The tensors and values of a state, by the path to each, its parts joined by dots.

    Mappings are entered; a list or tuple is entered when a mapping, list or tensor is in it, but one of nothing but tensors (or shards) is
    the parts of one tensor.

    Raises:
        CheckpointingException: no mapping, a key that is neither string nor integer, or one name for two things.
    """
    flat = FlatState()
    for name, value in entries(state):
        _enter(flat, name, value, state, name)
    return flat


def with_values(extra: Mapping[str, Any], flat: FlatState) -> Mapping[str, Any]:
    """The extra values of a checkpoint with those of its state.

    Raises:
        ValueError: ``extra`` uses that name itself.
    """
    if VALUES in extra:
        raise ValueError(f"extra has an entry {VALUES!r}, under which the values of the state are kept; give it another name")
    return {**extra, VALUES: flat.values} if flat.values else extra


def check_values(flat: FlatState, stored: Mapping[str, Any], *, missing: bool) -> None:
    """Refuse values that the checkpoint lacks (if ``missing``), and those that cannot be filled.

    Raises:
        CheckpointingException: names them.
    """
    if missing and (absent := flat.values.keys() - stored.keys()):
        raise CheckpointingException(f"the checkpoint has no value for {list_names(absent, stored)}; leave it out of the state")
    for name, (container, _) in flat.places.items():
        if not isinstance(container, MutableMapping | MutableSequence):
            raise CheckpointingException(f"{name} stands in a {type(container).__name__}, which cannot be filled; use a dict or a list")


def _enter(flat: FlatState, name: str, value: Any, container: Any, key: Any) -> None:
    if isinstance(value, Mapping) and value:
        for inner, item in value.items():
            if not isinstance(inner, str | int):
                raise CheckpointingException(f"{name} has a key {inner!r}, which is {type(inner).__name__}; keys are strings or integers")
            _enter(flat, f"{name}.{inner}", item, value, inner)
        return
    is_list = isinstance(value, list | tuple)
    if is_list and any(isinstance(item, Mapping | list | tuple) for item in value):
        for place, item in enumerate(value):
            _enter(flat, f"{name}.{place}", item, value, place)
        return
    if name in flat.tensors or name in flat.values:
        raise CheckpointingException(f"two entries of the state are called {name} once their keys are joined by dots; rename one")
    is_empty = isinstance(value, Mapping)
    if is_empty or isinstance(value, _PLAIN) or (is_list and all(isinstance(item, _PLAIN) for item in value)):
        flat.values[name] = {} if is_empty else value
        if not is_empty:
            flat.places[name] = (container, key)
    else:
        flat.tensors[name] = value
