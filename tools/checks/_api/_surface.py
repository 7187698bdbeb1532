# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The public surface of a package, read without importing it."""

import ast
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import griffe

from tools.checks._api._finding import CheckError

# Namespace of griffe's extra data that holds the decorators of a property.
PROPERTY_DECORATORS = "property_decorators"
# Special methods that a class has whether or not it writes them, or that nobody calls by name.
_INERT = {
    "__post_init__",
    "__repr__",
    "__str__",
    "__del__",
    "__hash__",
    "__init_subclass__",
    "__getattr__",
    "__eq__",
    "__ne__",
    "__reduce__",
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One public path.

    Args:
        path: what a user writes.
        obj: what stands behind it, re-exports followed; None if another package defines it.
        foreign: the other package's path in that case.
        inherited: a member that the class takes from a base class.
    """

    path: str
    obj: griffe.Object | None
    foreign: str = ""
    inherited: bool = False

    @property
    def rank(self) -> tuple[bool, int, int, str]:
        """Smallest for the path to report: where a member is declared, then the shortest."""
        return self.inherited, self.path.count("."), len(self.path), self.path


@dataclass(kw_only=True)
class Surface:
    """Public paths of one tree, and the tree to look things up in."""

    package: str
    root: Path
    loader: griffe.GriffeLoader
    entries: dict[str, Entry] = field(default_factory=dict)
    shortest: dict[str, str] = field(default_factory=dict)
    """canonical path -> the public path to report"""
    unresolved: list[tuple[griffe.Module, str]] = field(default_factory=list)
    without_all: list[griffe.Module] = field(default_factory=list)
    shadowed: list[tuple[griffe.Module, str]] = field(default_factory=list)
    """public names that are both a submodule and something imported, so that one hides the other"""
    moved: dict[str, str] = field(default_factory=dict)
    """public path in an earlier tree -> public path here, for what changed its place"""

    def lookup(self, path: str) -> griffe.Object | None:
        """The object at a path of this package, public or not, re-exports followed."""
        try:
            return follow(self.loader.modules_collection[path])
        except (KeyError, ValueError):
            return None

    def is_internal(self, path: str) -> bool:
        return path == self.package or path.startswith(f"{self.package}.")

    def public(self, path: str) -> str:
        """The public path of whatever stands at a path; its canonical path if it has none, the other package's if it comes from there."""
        if not self.is_internal(path):
            return path
        obj = self.lookup(path)
        if obj is not None:
            return self.shortest.get(obj.path, obj.path)
        try:
            return foreign_target(self.loader.modules_collection[path])
        except (KeyError, ValueError, griffe.GriffeError):
            return path

    def location(self, obj: griffe.Object) -> tuple[str, int]:
        """(file relative to the tree, line)."""
        return relative_file(obj, self.root), obj.lineno or 1


def relative_file(obj: griffe.Object, root: Path) -> str:
    path = obj.filepath
    return path.relative_to(root).as_posix() if isinstance(path, Path) and path.is_relative_to(root) else ""


def follow(obj: griffe.Object | griffe.Alias) -> griffe.Object | None:
    """Behind re-exports; None if the end is in another package or nowhere."""
    if not isinstance(obj, griffe.Alias):
        return obj
    try:
        end = obj.final_target
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
    return None if isinstance(end, griffe.Alias) else end


def _is_module(member: griffe.Object | griffe.Alias) -> bool:
    obj = follow(member)
    return obj is not None and obj.is_module


class _PropertyDecorators(griffe.Extension):
    """Keeps what griffe drops when it turns a property into an attribute."""

    def on_attribute_instance(self, *, node: ast.AST | griffe.ObjectNode, attr: griffe.Attribute, **_: object) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            attr.extra[PROPERTY_DECORATORS]["nodes"] = node.decorator_list


def load(package: str, root: Path) -> Surface:
    """Read a package.

    Args:
        package: import name, dotted if it lies in a namespace.
        root: folder that would be on the import path.

    Raises:
        CheckError: the package is not there, or a file of it cannot be parsed.
    """
    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    extensions = griffe.load_extensions()
    extensions.add(_PropertyDecorators())
    loader = griffe.GriffeLoader(extensions=extensions, search_paths=[root], allow_inspection=False)
    try:
        top = loader.load(package)
        loader.resolve_aliases(implicit=True, external=False)
    except (ImportError, griffe.GriffeError, SyntaxError) as error:
        raise CheckError(f"package {package!r} cannot be read under {root}: {error}") from error
    surface = Surface(package=package, root=root, loader=loader)
    module = follow(top)
    if not isinstance(module, griffe.Module):
        raise CheckError(f"{package!r} under {root} is no package")
    _refuse_skipped_files(surface)
    _add_module(surface, module)
    for entry in sorted(surface.entries.values(), key=lambda entry: entry.rank):
        if entry.obj is not None:
            surface.shortest.setdefault(entry.obj.path, entry.path)
    return surface


def _refuse_skipped_files(surface: Surface) -> None:
    # A submodule that does not parse is left out by the loader without a word; its names would look removed, or never be compared.
    folder = surface.root.joinpath(*surface.package.split("."))
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(surface.root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not all(part.isidentifier() for part in parts) or surface.lookup(name) is not None:
            continue
        try:
            ast.parse(path.read_bytes())
        except SyntaxError as error:
            raise CheckError(f"{path} line {error.lineno} cannot be parsed: {error.msg}") from error


def _add_module(surface: Surface, module: griffe.Module) -> None:
    surface.entries[module.path] = Entry(path=module.path, obj=module)
    if module.exports is None and any(not name.startswith("_") and not _is_module(member) for name, member in module.members.items()):
        surface.without_all.append(module)
    for name in sorted(public_names(module)):
        path = f"{module.path}.{name}"
        if name not in module.members:
            surface.unresolved.append((module, name))
            continue
        member = module.members[name]
        obj = follow(member)
        if obj is not None and obj.is_module:
            if module.imports.get(name, obj.path) != obj.path:
                surface.shadowed.append((module, name))
            continue
        if obj is None:
            foreign = foreign_target(member)
            if surface.is_internal(foreign):
                surface.unresolved.append((module, name))
            else:
                surface.entries[path] = Entry(path=path, obj=None, foreign=foreign)
            continue
        obj = _assigned(obj, surface)
        surface.entries[path] = Entry(path=path, obj=obj)
        if isinstance(obj, griffe.Class):
            _add_members(surface, path, obj, depth=0)
    for name, member in module.members.items():
        if isinstance(member, griffe.Module) and not name.startswith("_"):
            _add_module(surface, member)


def _assigned(obj: griffe.Object, surface: Surface) -> griffe.Object:
    """Behind ``name = _other``, where the other is a function or class of the package."""
    for _ in range(4):
        if not isinstance(obj, griffe.Attribute) or obj.annotation is not None or not isinstance(obj.value, griffe.ExprName):
            return obj
        target = surface.lookup(obj.value.canonical_path)
        if not isinstance(target, griffe.Attribute | griffe.Function | griffe.Class) or target is obj:
            return obj
        if not isinstance(target, griffe.Attribute):
            return target
        obj = target
    return obj


def foreign_target(member: griffe.Object | griffe.Alias) -> str:
    """Where a chain of re-exports leaves what was read."""
    while isinstance(member, griffe.Alias):
        try:
            member = member.target
        except (griffe.AliasResolutionError, griffe.CyclicAliasError):
            return member.target_path
    return member.path


def public_names(module: griffe.Module) -> set[str]:
    """``__all__`` where there is one; else what is defined there without an underscore or imported as itself."""
    if module.exports is not None:
        return {name if isinstance(name, str) else name.name for name in module.exports}
    names = {name for name, member in module.members.items() if not name.startswith("_") and not member.is_alias and not member.is_module}
    return names | {name for name in _imported_as_itself(module) if name in module.members}


def _imported_as_itself(module: griffe.Module) -> Iterator[str]:
    # `from .part import name as name` is how a package without __all__ says that it re-exports on purpose.
    source = "\n".join(module.lines) if isinstance(module.filepath, Path) else ""
    if not re.search(r"\b(\w+) as \1\b", source):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name and not alias.name.startswith("_"))


def _add_members(surface: Surface, path: str, cls: griffe.Class, *, depth: int) -> None:
    own = cls.members
    for name, member in members(cls).items():
        obj = follow(member)
        if obj is None or obj.is_module:
            continue
        child = f"{path}.{name}"
        surface.entries[child] = Entry(path=child, obj=obj, inherited=name not in own)
        if isinstance(obj, griffe.Class) and depth < 3:
            _add_members(surface, child, obj, depth=depth + 1)


def members(cls: griffe.Class) -> dict[str, griffe.Object | griffe.Alias]:
    """Public members by name, inherited ones of the same package included."""
    try:
        everything = cls.all_members
    except (griffe.GriffeError, ValueError):
        everything = cls.members
    return {name: member for name, member in everything.items() if _is_public_member(name, member)}


def _is_public_member(name: str, member: griffe.Object | griffe.Alias) -> bool:
    if not name.startswith("_"):
        return True
    if not (name.startswith("__") and name.endswith("__")) or name in _INERT:
        return False
    obj = follow(member)
    return obj is not None and obj.is_function
