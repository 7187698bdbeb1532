# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Programs that write a signature down and hold a function against it."""

from collections.abc import Mapping
from dataclasses import dataclass

import griffe
from griffe import ParameterKind

from tools.checks._api._surface import Surface
from tools.checks._api._types import ANY, Type, module_of, render
from tools.checks._api._witness import Program


@dataclass(frozen=True, kw_only=True)
class Caller:
    """How a consumer reaches a function.

    Args:
        path: public path to hold against the signature.
        bound: the first parameter is filled by whatever the function hangs on.
        instance: path of the class if the function is reached through an instance of it.
        constructs: the path is that of a class, so the result is not compared.
    """

    path: str
    bound: bool = False
    instance: str = ""
    constructs: bool = False

    @staticmethod
    def of(path: str, function: griffe.Function) -> "Caller":
        if function.parent is None or not function.parent.is_class or "staticmethod" in function.labels:
            return Caller(path=path)
        if function.name in ("__init__", "__new__"):
            return Caller(path=path.removesuffix(f".{function.name}"), bound=True, constructs=True)
        if "classmethod" in function.labels:
            return Caller(path=path, bound=True)
        # Through an instance, because a special method looked up on the class may be found on its metaclass.
        return Caller(path=path, bound=True, instance=path.rpartition(".")[0])


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A function's parameters with types by slot; the slot of the result is ``"return"``.

    With ``spell_coroutine`` a coroutine function is written as a function whose result is a coroutine.
    """

    caller: Caller
    function: griffe.Function
    types: Mapping[str, Type | None]
    spell_coroutine: bool = False

    def imports(self, surface: Surface) -> frozenset[str]:
        needed = {module_of(self.caller.path, surface)}
        for annotation in self.types.values():
            if annotation is not None:
                needed |= annotation.imports(surface)
        return frozenset(needed)

    @property
    def variables(self) -> frozenset[str]:
        return frozenset(variable for annotation in self.types.values() if annotation is not None for variable in annotation.variables)

    def define(self, name: str, first: str = "") -> str:
        """Header of a function with this signature; ``first`` is put in front of the parameters."""
        parts, marker = [first] if first else [], False
        parameters = list(self.function.parameters)[1 if self.caller.bound else 0 :]
        positional_only = False
        for parameter in parameters:
            if positional_only and parameter.kind is not ParameterKind.positional_only:
                parts.append("/")
                positional_only = False
            positional_only |= parameter.kind is ParameterKind.positional_only
            stars = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}.get(parameter.kind, "")  # type: ignore[arg-type]
            if parameter.kind is ParameterKind.keyword_only and not marker:
                parts.append("*")
            marker |= parameter.kind in (ParameterKind.keyword_only, ParameterKind.var_positional)
            default = " = ..." if not parameter.required and not stars else ""
            parts.append(f"{stars}{parameter.name}: {_text(self.types.get(parameter.name))}{default}")
        if positional_only:
            parts.append("/")
        result = "typing.Any" if self.caller.constructs else _text(self.types.get("return"))
        nature = "async def" if "async" in self.function.labels else "def"
        if self.spell_coroutine and "async" in self.function.labels:
            nature, result = "def", f"typing.Coroutine[typing.Any, typing.Any, {result}]"
        return f"{nature} {name}({', '.join(parts)}) -> {result}:"


def _text(annotation: Type | None) -> str:
    return (annotation or ANY).text


def typed_parameters(function: griffe.Function, home: Surface, target: Surface) -> dict[str, Type | None]:
    """Types by slot, spelt for a tree; raises ``Gone`` as ``render`` does."""
    types = {parameter.name: render(parameter.annotation, function, home, target) for parameter in function.parameters}
    return types | {"return": render(function.returns, function, home, target)}


def signature_program(shape: Shape, surface: Surface) -> Program:
    """The function can be put where this signature is wanted."""
    wanted = f"class _Wanted(typing.Protocol):\n    {shape.define('__call__', '_witness')} ...\n\n\n"
    caller = shape.caller
    if caller.instance:
        name = caller.path.rpartition(".")[2]
        use = f"def _read(given: {caller.instance}) -> None:\n    _wanted: _Wanted = given.{name}"
    else:
        use = f"_wanted: _Wanted = {caller.path}"
    return Program(code=wanted + use, imports=shape.imports(surface), variables=shape.variables)


def assignment_program(given: Type, wanted: Type, surface: Surface) -> Program:
    """A value of one type can be put where the other is wanted."""
    code = f"def _read(given: {given.text}) -> None:\n    _wanted: {wanted.text} = given"
    imports = frozenset(given.imports(surface) | wanted.imports(surface))
    return Program(code=code, imports=imports, variables=given.variables | wanted.variables)


def implementer_program(old: Shape, new: Shape, surface: Surface) -> Program:
    """A method with the old signature can be put where the new one is wanted."""
    code = (
        f"{old.define('_written')}\n    raise NotImplementedError\n\n\n"
        f"class _Wanted(typing.Protocol):\n    {new.define('__call__', '_witness')} ...\n\n\n"
        "_wanted: _Wanted = _written"
    )
    return Program(code=code, imports=old.imports(surface) | new.imports(surface), variables=old.variables | new.variables)


def describe_type(old: Type, new: Type) -> str:
    return f"{old.text} became {new.text}"
