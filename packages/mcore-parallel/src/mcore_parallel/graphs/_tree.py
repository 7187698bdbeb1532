# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The tensors inside tuples, dicts and dataclasses, and all the rest of them as a key."""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


class _Leaf:
    """Where a tensor was."""


_LEAF = _Leaf()


@dataclass(frozen=True)
class Tree:
    """A value taken apart."""

    tensors: list[Tensor]
    skeleton: Any
    """The value without its tensors."""
    key: Hashable
    """Equal for values that differ in the numbers of their tensors only."""

    @classmethod
    def of(cls, value: Any) -> "Tree":
        """Take apart.

        Raises:
            TypeError: something that is neither hashable nor a tuple, list, dict or dataclass.
        """
        tensors: list[Tensor] = []
        skeleton, key = _take(value, tensors)
        return cls(tensors, skeleton, key)

    @property
    def holds_function(self) -> bool:
        """Whether something in it can be called, classes aside: a recording does so once."""
        return any(callable(leaf) and not isinstance(leaf, type) for leaf in _leaves(self.skeleton))

    def rebuilt(self, tensors: Sequence[Tensor]) -> Any:
        """The value around other tensors."""
        return _put(self.skeleton, iter(tensors))


def _take(value: Any, tensors: list[Tensor]) -> tuple[Any, Hashable]:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _LEAF, (value.shape, value.dtype, value.device, value.requires_grad)
    if isinstance(value, tuple | list):
        parts = [_take(part, tensors) for part in value]
        skeletons = [skeleton for skeleton, _ in parts]
        return type(value)(skeletons) if type(value) in (tuple, list) else type(value)(*skeletons), (
            type(value),
            *(key for _, key in parts),
        )
    if isinstance(value, dict):
        taken = {name: _take(part, tensors) for name, part in value.items()}
        return {name: part[0] for name, part in taken.items()}, (dict, *((name, part[1]) for name, part in taken.items()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        taken = {field.name: _take(getattr(value, field.name), tensors) for field in dataclasses.fields(value)}
        return _Record(type(value), {name: part[0] for name, part in taken.items()}), (type(value), *(part[1] for part in taken.values()))
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"an input is a {type(value).__name__}, which has no key; pass tensors, numbers and dataclasses of them") from None
    return value, value


@dataclass
class _Record:
    """A dataclass without its tensors, which its own constructor might refuse to be without."""

    type: type
    fields: dict[str, Any]


def _leaves(skeleton: Any) -> Iterator[Any]:
    if isinstance(skeleton, _Record):
        skeleton = skeleton.fields
    if isinstance(skeleton, tuple | list | dict):
        for part in skeleton.values() if isinstance(skeleton, dict) else skeleton:
            yield from _leaves(part)
    elif skeleton is not _LEAF:
        yield skeleton


def _put(skeleton: Any, tensors: Iterator[Tensor]) -> Any:
    if skeleton is _LEAF:
        return next(tensors)
    if isinstance(skeleton, _Record):
        return skeleton.type(**{name: _put(part, tensors) for name, part in skeleton.fields.items()})
    if isinstance(skeleton, tuple | list):
        parts = [_put(part, tensors) for part in skeleton]
        return type(skeleton)(parts) if type(skeleton) in (tuple, list) else type(skeleton)(*parts)
    if isinstance(skeleton, dict):
        return {name: _put(part, tensors) for name, part in skeleton.items()}
    return skeleton
