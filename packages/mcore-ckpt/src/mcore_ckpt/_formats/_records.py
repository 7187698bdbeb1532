# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Python's object stream read and written as plain records: names stay names, nothing is imported and nothing is called.

Other readers want their metadata as such streams. Reading here cannot run code, because there is no code to run: an object comes
back as the name of what would be called and its arguments.
"""

import argparse
import pickletools
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

__all__ = ["Call", "Name", "Persistent", "Table", "decode_records", "encode_records"]

_EXPANSION = 16
_SMALL = 2**16
"""A stream of n bytes may stand for ``_EXPANSION * n + _SMALL`` values: what is referred to twice counts twice."""
_MIN_CONTAINER_BYTES = 3
_FEW_CONTAINERS = 2**17
"""A stream of n bytes may make ``n / _MIN_CONTAINER_BYTES + _FEW_CONTAINERS`` containers: an empty one is a byte there, 100 in memory."""
_BYTES_A_VALUE = 16
"""Of text, which count as one value."""


@dataclass(frozen=True)
class Name:
    """Something that would be imported: ``module.attribute``."""

    text: str


@dataclass(frozen=True)
class Persistent:
    """A reference to something outside the stream."""

    value: Any


@dataclass(eq=False, slots=True)
class Table:
    """A dict; a list of pairs, because keys may be records."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def by_text(self) -> dict[str, Any]:
        """The entries whose key is a string."""
        return {key: value for key, value in self.pairs if isinstance(key, str)}


@dataclass(eq=False, slots=True)
class Call:
    """An object: what would be called, with what, and the state it would be given afterwards."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    make: bool = False
    """Whether the class is asked for a blank object, as for most classes, rather than called."""
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    """Of a dict of a class of its own, what it is given item by item."""


class _Mark:
    pass


_MARK = _Mark()


def decode_records(content: bytes) -> Any:
    """The value of a stream: None, bool, int, float, str, bytes, tuple, list, and the records of this module.

    Raises:
        ValueError: not a sound stream, one that uses what no checkpoint needs, or one that stands for far more than it holds.
    """
    machine = _Machine(len(content) // _MIN_CONTAINER_BYTES + _FEW_CONTAINERS)
    try:
        for operation, argument, _ in pickletools.genops(content):
            if operation.name == "STOP":
                break
            machine.step(operation.name, argument)
        if len(machine.stack) != 1:
            raise ValueError(f"{len(machine.stack)} values at the end")
        _check_expansion(machine.stack[0], _EXPANSION * len(content) + _SMALL)
        return machine.stack[0]
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"not a sound object stream: {type(error).__name__} {error}") from error


class _Machine:
    """The stack and memo of one stream, which may make so many containers."""

    def __init__(self, max_containers: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self._containers_left = max_containers

    def step(self, name: str, argument: Any) -> None:
        if name in _IGNORED:
            return
        if name in _CONTAINERS:
            self._containers_left -= 1
            if self._containers_left < 0:
                raise ValueError("more containers than a stream of its length needs")
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _FRESH:
            self.stack.append(_FRESH[name]())
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(argument)] = self.stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = self.stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self.stack.append(self.memo[int(argument)])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self.stack.append(tuple(self._pop(int(name[-1]))))
        elif name in ("TUPLE", "LIST"):
            items = self._since_mark()
            self.stack.append(tuple(items) if name == "TUPLE" else items)
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._since_mark()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS", "DICT"):
            items = self._pop(2) if name == "SETITEM" else self._since_mark()
            if name == "DICT":
                self.stack.append(Table())
            self._set(list(zip(items[::2], items[1::2], strict=True)))
        elif name == "GLOBAL":
            self.stack.append(Name(argument.replace(" ", ".")))
        elif name == "STACK_GLOBAL":
            module, attribute = self._pop(2)
            self.stack.append(Name(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = self._pop(2)
            if not isinstance(function, Name) or not isinstance(arguments, tuple):
                raise ValueError("a call of something that is no name")
            self.stack.append(Call(function.text, arguments, make=name == "NEWOBJ"))
        elif name == "BUILD":
            (state,) = self._pop(1)
            self._top(Call).state = state
        elif name == "BINPERSID":
            self.stack.append(Persistent(self._pop(1)[0]))
        else:
            raise ValueError(f"operation {name} has no place in a checkpoint")

    def _pop(self, number: int) -> list[Any]:
        if len(self.stack) < number:
            raise ValueError("the stack is empty")
        items = self.stack[-number:]
        del self.stack[-number:]
        return items

    def _top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"{kind.__name__} expected, found {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _set(self, pairs: list[tuple[Any, Any]]) -> None:
        top = self.stack[-1]
        if isinstance(top, Call) and top.name == "collections.OrderedDict":
            top.pairs.extend(pairs)
        else:
            self._top(Table).pairs.extend(pairs)

    def _since_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if self.stack[place] is _MARK:
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        raise ValueError("no mark")


def _check_expansion(root: Any, limit: int) -> None:
    """Count the values of a tree, each as often as it is referred to: what walks, hashes or prints the tree meets as many.

    Raises:
        ValueError: more than ``limit``, or a value that holds itself.
    """
    if not isinstance(root, _HOLDERS):
        return
    # 0 while the values inside are counted.
    counts: dict[int, int] = {}
    path = [root]
    while path:
        value = path[-1]
        count = counts.get(id(value))
        if count:
            path.pop()
            continue
        inside = _inside(value)
        if count is None:
            counts[id(value)] = 0
            for item in inside:
                if isinstance(item, _HOLDERS):
                    inner = counts.get(id(item))
                    if inner == 0:
                        raise ValueError("a value that holds itself")
                    if inner is None:
                        path.append(item)
            if path[-1] is not value:
                continue
            inside = _inside(value)
        total = 1
        for item in inside:
            if isinstance(item, _HOLDERS):
                total += counts[id(item)]
            elif isinstance(item, str | bytes | Name):
                total += 1 + len(item.text if isinstance(item, Name) else item) // _BYTES_A_VALUE
            else:
                total += 1
        if total > limit:
            raise ValueError(f"it stands for more than {limit} values, by references to the same ones")
        counts[id(value)] = total
        path.pop()


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Table):
        return chain.from_iterable(value.pairs)
    if isinstance(value, Call):
        return chain((value.name, value.arguments, value.state), chain.from_iterable(value.pairs))
    return (value.value,) if isinstance(value, Persistent) else value


_HOLDERS = (tuple, list, Table, Call, Persistent)
_CONTAINERS = frozenset({"EMPTY_DICT", "EMPTY_LIST", "LIST", "DICT", "REDUCE", "NEWOBJ", "BINPERSID", "TUPLE1", "TUPLE2", "TUPLE3"})
_IGNORED = frozenset({"PROTO", "FRAME"})
_LITERALS = frozenset(
    {
        *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT", "FLOAT"),
        *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "UNICODE"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING", "SHORT_BINSTRING", "STRING"),
    }
)
_FRESH: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "MARK": lambda: _MARK,
        "NONE": lambda: None,
        "NEWTRUE": lambda: True,
        "NEWFALSE": lambda: False,
        "EMPTY_DICT": Table,
        "EMPTY_LIST": list,
        "EMPTY_TUPLE": tuple,
    }
)


def encode_records(value: Any) -> bytes:
    """Inverse of `decode_records`, in protocol 2; a dict is taken for a `Table`, and an ``argparse.Namespace`` as it is.

    Raises:
        ValueError: a value that has no place in a stream.
    """
    parts: list[bytes] = [b"\x80\x02"]
    _encode(value, parts)
    return b"".join([*parts, b"."])


def _encode(value: Any, parts: list[bytes]) -> None:
    if value is None or type(value) is bool:
        parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
    elif type(value) is int:
        size = (value.bit_length() + 8) // 8
        small = -(2**31) <= value < 2**31
        parts.append(b"J" + struct.pack("<i", value) if small else b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True))
    elif type(value) is float:
        parts.append(b"G" + struct.pack(">d", value))
    elif type(value) is str:
        text = value.encode("utf-8", "surrogatepass")
        parts.append(b"X" + struct.pack("<I", len(text)) + text)
    elif isinstance(value, tuple | list):
        parts.append(b"(" if isinstance(value, tuple) else b"](")
        for item in value:
            _encode(item, parts)
        parts.append(b"t" if isinstance(value, tuple) else b"e")
    elif isinstance(value, Table | Mapping):
        parts.append(b"}(")
        for key, item in value.pairs if isinstance(value, Table) else value.items():
            _encode(key, parts)
            _encode(item, parts)
        parts.append(b"u")
    elif isinstance(value, Name):
        module, _, attribute = value.text.rpartition(".")
        parts.append(b"c" + f"{module}\n{attribute}\n".encode())
    elif isinstance(value, Persistent):
        _encode(value.value, parts)
        parts.append(b"Q")
    elif isinstance(value, argparse.Namespace):
        _encode(Call("argparse.Namespace", (), vars(value), make=True), parts)
    elif isinstance(value, Call):
        _encode(Name(value.name), parts)
        _encode(value.arguments, parts)
        parts.append(b"\x81" if value.make else b"R")
        if value.state is not None:
            _encode(value.state, parts)
            parts.append(b"b")
        if value.pairs:
            parts.append(b"(")
            for item in chain.from_iterable(value.pairs):
                _encode(item, parts)
            parts.append(b"u")
    else:
        raise ValueError(f"{type(value).__name__} has no place in an object stream")
