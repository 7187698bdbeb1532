# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Python's object stream read and written as plain records: names stay names, nothing is imported and nothing is called.

Other readers want their metadata as such streams. Reading here cannot run code, because there is no code to run: an object comes
back as the name of what would be called and its arguments.
"""

import argparse
import pickletools
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

__all__ = ["Call", "Name", "Persistent", "Table", "decode_records", "encode_records"]

_MAX_OPERATIONS = 200_000_000


@dataclass(frozen=True)
class Name:
    """Something that would be imported: ``module.attribute``."""

    text: str


@dataclass(frozen=True)
class Persistent:
    """A reference to something outside the stream."""

    value: Any


@dataclass(eq=False)
class Table:
    """A dict; a list of pairs, because keys may be records."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def by_text(self) -> dict[str, Any]:
        """The entries whose key is a string."""
        return {key: value for key, value in self.pairs if isinstance(key, str)}


@dataclass(eq=False)
class Call:
    """An object: what would be called, with what, and the state it would be given afterwards."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    make: bool = False
    """Whether the class is asked for a blank object, as for most classes, rather than called."""


class _Mark:
    pass


def decode_records(content: bytes) -> Any:
    """The value of a stream: None, bool, int, float, str, bytes, tuple, list, and the records of this module.

    Raises:
        ValueError: not a sound stream, or one that uses what no checkpoint needs.
    """
    machine = _Machine()
    try:
        for number, (operation, argument, _) in enumerate(pickletools.genops(content)):
            if number > _MAX_OPERATIONS:
                raise ValueError("more operations than a checkpoint has")
            if operation.name == "STOP":
                break
            machine.step(operation.name, argument)
        if len(machine.stack) != 1:
            raise ValueError(f"{len(machine.stack)} values at the end")
        return machine.stack[0]
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error) as error:
        raise ValueError(f"not a sound object stream: {type(error).__name__} {error}") from error


class _Machine:
    """The stack and memo of one stream."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def step(self, name: str, argument: Any) -> None:
        if name in _IGNORED:
            return
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
            top.arguments = (*top.arguments, *pairs)
        else:
            self._top(Table).pairs.extend(pairs)

    def _since_mark(self) -> list[Any]:
        for place in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[place], _Mark):
                items = self.stack[place + 1 :]
                del self.stack[place:]
                return items
        raise ValueError("no mark")


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
        "MARK": _Mark,
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
    else:
        raise ValueError(f"{type(value).__name__} has no place in an object stream")
