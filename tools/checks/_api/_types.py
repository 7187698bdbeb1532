# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Annotations with every name spelt from the root, so that two trees can be compared and a third file can write them."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import griffe

from tools.checks._api._marks import mark_of
from tools.checks._api._surface import Surface

_WRAPPERS = {"dataclasses.InitVar"} | {
    f"{module}.{name}"
    for module in ("typing", "typing_extensions")
    for name in ("ClassVar", "Final", "NotRequired", "ReadOnly", "Required")
}
_SELF = {"typing.Self", "typing_extensions.Self"}
_OLD_GENERICS = {"typing.List": "list", "typing.Dict": "dict", "typing.Tuple": "tuple", "typing.Set": "set", "typing.Type": "type"}
_ABC = {"Callable", "Iterable", "Iterator", "Sequence", "Mapping", "MutableMapping", "Generator", "Awaitable", "Coroutine", "AsyncIterator"}


class Gone(Exception):
    """A stable name of the old tree that nothing in the new tree answers to."""


@dataclass(frozen=True, kw_only=True)
class Type:
    """An annotation as a consumer could write it.

    Args:
        text: expression in which each name is spelt from its top package.
        paths: the dotted names in it, builtins left out.
        variables: definitions of the type variables in it; they go by their own name, wherever the package keeps them.
    """

    text: str
    paths: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()

    def normal(self) -> str:
        """Spelling in which unions are sorted and old generics renamed; equal texts mean equal types."""
        return ast.unparse(_Normal().visit(ast.parse(self.text, mode="eval")))

    def imports(self, surface: Surface) -> set[str]:
        """Modules to import before the text means something."""
        return {module for path in self.paths if (module := module_of(path, surface))}


def canonical(types: Mapping[str, Type | None], order: Mapping[str, object]) -> dict[str, str]:
    """Normal texts by slot, with type variables numbered in the order in which they first occur, whatever their names.

    Args:
        types: types by slot.
        order: slots to visit; those that it lacks are left out.
    """
    numbers: dict[str, str] = {}
    texts = {}
    for slot in sorted(set(types) & set(order)):
        annotation = types[slot]
        if annotation is None:
            continue
        definitions = dict(variable.split(" = ", 1) for variable in annotation.variables)
        tree = ast.parse(annotation.normal(), mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in definitions:
                maker = definitions[node.id].partition("(")[0].replace(".", "_")
                node.id = numbers.setdefault(node.id, f"{maker}_{len(numbers)}")
        texts[slot] = ast.unparse(tree)
    return texts


ANY = Type(text="typing.Any", paths=frozenset({"typing.Any"}))


def render(annotation: str | griffe.Expr | None, scope: griffe.Object, home: Surface, target: Surface) -> Type | None:
    """Spell an annotation written in the tree ``home`` so that it can be read against the tree ``target``.

    Args:
        annotation: as griffe holds it.
        scope: object whose annotation it is.
        home: tree it was written in.
        target: tree it will be checked against; types are named by their public path there, and what was experimental and went is anything.

    Returns:
        The type; None if there is no annotation or it is no expression.

    Raises:
        Gone: it names a stable type of the package that the target does not have.
    """
    if annotation is None:
        return None
    spelling = _Spelling(scope=scope, home=home, target=target)
    try:
        tree = ast.parse(str(annotation).strip(), mode="eval").body
    except SyntaxError:
        return None
    text = ast.unparse(spelling.visit(tree))
    return Type(text=text, paths=frozenset(spelling.paths), variables=frozenset(spelling.variables))


@dataclass
class _Spelling(ast.NodeTransformer):
    scope: griffe.Object
    home: Surface
    target: Surface
    paths: set[str] = field(default_factory=set)
    variables: set[str] = field(default_factory=set)
    around: frozenset[str] = frozenset()
    """aliases that are being spelt out"""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        return self.visit(ast.parse(node.value.strip(), mode="eval").body)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return self._spell([node.id])

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        parts: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            return self.generic_visit(node)
        return self._spell([inner.id, *reversed(parts)])

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        head = self.visit(node.value)
        name = ast.unparse(head)
        if name.rpartition(".")[2] == "Literal":
            return ast.Subscript(value=head, slice=node.slice, ctx=ast.Load())
        if name.rpartition(".")[2] == "Annotated" and isinstance(node.slice, ast.Tuple):
            return self.visit(node.slice.elts[0])
        if name in _WRAPPERS:
            return self.visit(node.slice)
        return ast.Subscript(value=head, slice=self.visit(node.slice), ctx=ast.Load())

    def _spell(self, parts: list[str]) -> ast.expr:
        first = resolve(self.scope, parts[0]) or parts[0]
        if (maker := self._type_variable(first)) is not None:
            name = first.rpartition(".")[2]
            self.variables.add(f'{name} = typing.{maker}("{name}")')
            return ast.parse(".".join([name, *parts[1:]]), mode="eval").body
        path = ".".join([first, *parts[1:]])
        if path in _SELF and (cls := self.scope.parent) is not None and cls.is_class:
            path = cls.path
        if self.home.is_internal(path):
            if (spelt_out := self._private_alias(path)) is not None:
                return spelt_out
            written, path = path, self.home.public(path)
            if self.target is not self.home:
                path = self.target.moved.get(path, path)
            if self.home.is_internal(path) and self.target is not self.home and path not in self.target.entries:
                old = self.home.lookup(written)
                if old is not None and mark_of(old).level != "stable":
                    path = "typing.Any"  # nobody was promised it
                elif self.target.lookup(path) is None:
                    raise Gone(path)
        if "." in path:
            self.paths.add(path)
        return ast.parse(path, mode="eval").body

    def _type_variable(self, path: str) -> str | None:
        obj = self.home.lookup(path) if self.home.is_internal(path) else None
        if not isinstance(obj, griffe.Attribute) or not isinstance(obj.value, griffe.ExprCall):
            return None
        maker = str(obj.value.function).rpartition(".")[2]
        return maker if maker in ("TypeVar", "ParamSpec", "TypeVarTuple") else None

    def _private_alias(self, path: str) -> ast.expr | None:
        # A public alias is compared where it stands. Users of a private one, and of one that went, have nothing but what it means.
        alias = self.home.lookup(path)
        if not isinstance(alias, griffe.Attribute) or not alias.value or isinstance(alias.value, griffe.ExprCall):
            return None
        public = self.home.shortest.get(alias.path)
        if alias.path in self.around or (public is not None and self.target.lookup(self.target.moved.get(public, public)) is not None):
            return None
        inner = _Spelling(
            scope=alias,
            home=self.home,
            target=self.target,
            paths=self.paths,
            variables=self.variables,
            around=self.around | {alias.path},
        )
        return inner.visit(ast.parse(str(alias.value), mode="eval").body)


class _Normal(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if not isinstance(node.op, ast.BitOr):
            return node
        return self._union(list(_alternatives(node)))

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        head = ast.unparse(node.value)
        if head == "typing.Optional":
            return self._union([*_alternatives(node.slice), ast.Constant(value=None)])
        if head == "typing.Union":
            elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return self._union([part for element in elements for part in _alternatives(element)])
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        path = ast.unparse(node)
        if path in _OLD_GENERICS:
            return ast.Name(id=_OLD_GENERICS[path], ctx=ast.Load())
        if path.startswith("typing.") and path.removeprefix("typing.") in _ABC:
            return ast.parse(f"collections.abc.{path.removeprefix('typing.')}", mode="eval").body
        return node

    def _union(self, parts: list[ast.expr]) -> ast.AST:
        return ast.parse(" | ".join(sorted({ast.unparse(self.visit(part)) for part in parts})), mode="eval").body


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    else:
        yield node


def resolve(scope: griffe.Object, name: str) -> str | None:
    """Path that a bare name stands for where an object is written; None for a builtin."""
    place: griffe.Object | griffe.Alias | None = scope if isinstance(scope, griffe.Class | griffe.Module) else scope.parent
    if isinstance(place, griffe.Class) and name in place.members and not place.members[name].is_class:
        # A method or field that happens to be called like a type does not hide it.
        place = place.module
    if place is None:
        return None
    try:
        return place.resolve(name)
    except griffe.NameResolutionError:
        return None


def module_of(path: str, surface: Surface) -> str:
    """Module to import so that a dotted path can be written; empty for a builtin."""
    parts = path.split(".")
    if surface.is_internal(path):
        while parts and not isinstance(surface.lookup(".".join(parts)), griffe.Module):
            parts.pop()
        return ".".join(parts)
    parts.pop()
    while len(parts) > 1 and parts[-1][:1].isupper():  # a class inside a class
        parts.pop()
    return ".".join(parts)
