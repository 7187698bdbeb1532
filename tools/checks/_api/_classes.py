# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What changed in a class as a whole, and in its attributes."""

import ast
from collections.abc import Iterator

import griffe

from tools.checks._api._finding import Finding
from tools.checks._api._signatures import assignment_program
from tools.checks._api._surface import Surface, follow, members
from tools.checks._api._traits import dataclass_options, lost_traits
from tools.checks._api._types import Gone, Type, module_of, render, resolve
from tools.checks._api._values import enum_values, is_assigned_to_self, is_literal, literal_type, value_of
from tools.checks._api._witness import Program, Suspicion

_ENUMS = {f"enum.{name}" for name in ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag", "ReprEnum")}
_PROTOCOLS = {"typing.Protocol", "typing_extensions.Protocol"}
_TYPED_DICTS = {"typing.TypedDict", "typing_extensions.TypedDict"}
# Bases that say how a class is made, not what its instances are.
_NO_PROMISE = {"object", "abc.ABC", "typing.Generic", *_PROTOCOLS}


def direct_bases(cls: griffe.Class) -> list[str]:
    """Paths of the bases as written, subscripts left out."""
    found = []
    for base in cls.bases:
        head = str(base).partition("[")[0]
        first, _, rest = head.partition(".")
        path = resolve(cls, first) or first
        found.append(f"{path}.{rest}" if rest else path)
    return found


def ancestors(cls: griffe.Class, surface: Surface) -> set[str]:
    """Public paths of all classes above, as far as the package's own files tell."""
    found: set[str] = set()
    pending = [cls]
    while pending:
        for path in direct_bases(pending.pop()):
            base = surface.lookup(path) if surface.is_internal(path) else None
            name = surface.public(path)
            if name not in found:
                found.add(name)
                if isinstance(base, griffe.Class):
                    pending.append(base)
    return found


def is_enum(cls: griffe.Class, surface: Surface) -> bool:
    return bool(ancestors(cls, surface) & _ENUMS)


def is_protocol(cls: griffe.Class) -> bool:
    return bool(set(direct_bases(cls)) & _PROTOCOLS)


def is_abstract(obj: griffe.Object) -> bool:
    """Whether a member is decorated as abstract."""
    return any(decorator.callable_path.rpartition(".")[2] == "abstractmethod" for decorator in getattr(obj, "decorators", ()))


def compare_class(path: str, old: griffe.Class, new: griffe.Class, before: Surface, after: Surface) -> Iterator[Finding]:
    """Changes that no single member shows."""
    was, now = dataclass_options(old) or {}, dataclass_options(new) or {}
    if now.get("frozen") and not was.get("frozen"):
        yield Finding(kind="class_frozen", path=path, text="the dataclass is frozen now")
    for trait, effect in lost_traits(old, new, before, after):
        yield Finding(kind="trait_lost", path=f"{path}[{trait}]", text=effect)
    if is_final(new) and not is_final(old):
        yield Finding(kind="class_final", path=path, text="the class is final now")
    if is_enum(old, before) and is_enum(new, after):
        values = dict(enum_values(old, before)), dict(enum_values(new, after))
        for name in sorted(set(values[0]) & set(values[1])):
            if values[0][name] != values[1][name]:
                yield Finding(
                    kind="enum_value_changed", path=f"{path}.{name}", text=f"{_shown(values[0][name])} became {_shown(values[1][name])}"
                )
    wanted = "protocol_member_added" if is_protocol(new) else "abstract_member_added"
    for name in sorted(_must_define(new) - _must_define(old)):
        yield Finding(kind=wanted, path=f"{path}.{name}", text=f"implementations must now define {name}")
    bases_was, bases_now = set(direct_bases(old)), set(direct_bases(new))
    fields_was, fields_now = _fields(old), _fields(new)
    still_there = [name for name in fields_was if name in fields_now]
    if any(base.rpartition(".")[2] == "NamedTuple" for base in bases_was) and fields_now[: len(still_there)] != still_there:
        yield Finding(kind="fields_reordered", path=path, text=f"{fields_was} became {fields_now}")
    elif any(base.rpartition(".")[2] == "NamedTuple" for base in bases_was) and len(fields_now) != len(fields_was):
        yield Finding(kind="trait_lost", path=f"{path}[length]", text=f"unpacking gives {len(fields_now)} values, not {len(fields_was)}")
    if bases_was & _TYPED_DICTS and bases_now & _TYPED_DICTS:
        for name in sorted(_required_keys(new) - _required_keys(old)):
            yield Finding(kind="key_now_required", path=f"{path}[{name}]", text="the key must be given now")
        for name in sorted((_required_keys(old) - _required_keys(new)) & set(fields_now)):
            yield Finding(kind="key_not_promised", path=f"{path}[{name}]", text="the key may be missing now")


def _shown(value: object) -> str:
    return str(value[1]) if isinstance(value, tuple) and len(value) == 2 else getattr(value, "text", str(value))


def is_final(obj: griffe.Class | griffe.Function) -> bool:
    """Whether a class or method is decorated as final."""
    return any(decorator.callable_path in ("typing.final", "typing_extensions.final") for decorator in obj.decorators)


def _must_define(cls: griffe.Class) -> set[str]:
    if is_protocol(cls):
        return set(members(cls))
    try:
        everything = cls.all_members
    except (griffe.GriffeError, ValueError):
        everything = cls.members
    return {name for name, member in everything.items() if (obj := follow(member)) is not None and is_abstract(obj)}


def _fields(cls: griffe.Class) -> list[str]:
    return [name for name, member in cls.members.items() if member.is_attribute and not name.startswith("_")]


def _required_keys(cls: griffe.Class) -> set[str]:
    total = not any(str(value) == "False" for name, value in getattr(cls, "keywords", {}).items() if name == "total")
    required = set()
    for name in _fields(cls):
        annotation = str(getattr(cls.members[name], "annotation", ""))
        if "NotRequired[" not in annotation and (total or "Required[" in annotation):
            required.add(name)
    return required


def compare_bases(path: str, old: griffe.Class, new: griffe.Class, before: Surface, after: Surface) -> Iterator[Suspicion]:
    """Suspicions that an instance no longer is what it was."""
    bases_now = ancestors(new, after)
    for base in sorted({after.moved.get(name, name) for name in ancestors(old, before)} - bases_now):
        if any(part.startswith("_") for part in base.split(".")) or base in _NO_PROMISE:
            continue
        text = f"derived from {base}, derives from {', '.join(direct_bases(new)) or 'nothing'} now"
        finding = Finding(kind="base_removed", path=path, text=text)
        foreign = any(not after.is_internal(name) for name in bases_now)
        if not foreign or (before.is_internal(base) and (after.lookup(base) is None or before.lookup(base) is None)):
            yield Suspicion(finding=finding, before=None, after=None)
            continue
        code = f"def _read(given: {path}) -> None:\n    _wanted: {base} = given"
        programs = [Program(code=code, imports=frozenset({module_of(path, tree), module_of(base, tree)})) for tree in (before, after)]
        yield Suspicion(finding=finding, before=programs[0], after=programs[1])


def compare_attribute(path: str, old: griffe.Attribute, new: griffe.Attribute, before: Surface, after: Surface) -> Iterator[Finding]:
    """Changes of an attribute that types do not show."""
    cls = old.parent
    if isinstance(cls, griffe.Class) and is_enum(cls, before):
        return  # its values are judged together
    if _is_init_only(new) and not _is_init_only(old):
        yield Finding(kind="member_removed", path=path, text="the field is handed to __post_init__ and not kept")
    elif is_writable(old) and not is_writable(new):
        yield Finding(kind="attribute_read_only", path=path, text="can no longer be assigned")
    elif _is_constant(old) and _is_constant(new):
        values = value_of(old.value, old, before), value_of(new.value, new, after)
        if (
            values[0] != values[1]
            and is_literal(values[0])
            and is_literal(values[1])
            and literal_type(old, before) == literal_type(new, after)
        ):
            yield Finding(kind="constant_changed", path=path, text=f"{old.value} became {new.value}")


def _is_init_only(attribute: griffe.Attribute) -> bool:
    return str(attribute.annotation or "").partition("[")[0].rpartition(".")[2] == "InitVar"


def _is_constant(attribute: griffe.Attribute) -> bool:
    """Whether the value is that of every user: not a field's default, not what a constructor assigns."""
    cls = attribute.parent
    if attribute.value is None or is_assigned_to_self(attribute) or cls is None:
        return False
    return cls.is_module or (isinstance(cls, griffe.Class) and dataclass_options(cls) is None and not attribute.annotation)


def is_writable(attribute: griffe.Attribute) -> bool:
    """Whether ``x.name = value`` is allowed."""
    if "property" in attribute.labels:
        return "writable" in attribute.labels
    if str(attribute.annotation or "").partition("[")[0].rpartition(".")[2] == "Final":
        return False
    cls = attribute.parent
    # A frozen class is reported once, as a class.
    return not (isinstance(cls, griffe.Class) and (dataclass_options(cls) or {}).get("frozen"))


def compare_attribute_types(
    path: str, old: griffe.Attribute, new: griffe.Attribute, before: Surface, after: Surface
) -> Iterator[Suspicion]:
    """Suspicions about reading, assigning and, for a type alias, naming an attribute."""
    was, now = render(old.annotation, old, before, before), render(new.annotation, new, after, after)
    alias = [render(str(a.value), a, home, home) if _may_be_alias(a) else None for a, home in ((old, before), (new, after))]
    if alias[0] is not None and alias[1] is not None:
        yield from _compare_alias(path, old, alias[0], alias[1], before, after)
        return
    inferred = literal_type(old, before), literal_type(new, after)
    bare = was is None
    if bare and now is None and inferred[0] not in ("", "None") and inferred[1]:
        if inferred[0] != inferred[1] and inferred not in (("float", "int"), ("int", "bool")):
            yield _certain(Finding(kind="attribute_type_changed", path=path, text=f"{inferred[0]} became {inferred[1]}"))
        return
    if bare and inferred[0] not in ("", "None"):
        was = render(inferred[0], old, before, before)
    if now is None and inferred[1]:
        now = render(inferred[1], new, after, after)
    if was is None and _makes_type(old) and str(old.value) != str(new.value) and _makes_type(new):
        yield _certain(Finding(kind="attribute_type_changed", path=path, text=f"{old.value} became {new.value}"))
    if was is None or now is None or was.text.endswith("TypeAlias") or (bare and was.text == now.text):
        return
    finding = Finding(kind="attribute_type_changed", path=path, text=f"{was.text} became {now.text}")
    try:
        promised = was if bare else render(old.annotation, old, before, after)
    except Gone as gone:
        yield Suspicion(finding=_note(finding, gone), before=None, after=None)
        return
    if promised is None or promised.normal() == now.normal():
        return
    writable = is_writable(old) and is_writable(new) and not bare
    yield Suspicion(
        finding=finding,
        before=_use_program(path, old, was, before, writable=writable),
        after=_use_program(path, new, promised, after, writable=writable),
    )


def compare_attribute_for_implementers(
    path: str, old: griffe.Attribute, new: griffe.Attribute, before: Surface, after: Surface
) -> Iterator[Suspicion]:
    """Whether a class that declares the attribute as the old protocol did still fits the new one."""
    was, now = render(old.annotation, old, before, before), render(new.annotation, new, after, after)
    if was is None or now is None or was.normal() == now.normal():
        return
    finding = Finding(kind="implementer_broken", path=path, text=f"{was.text} became {now.text}")
    try:
        written = render(old.annotation, old, before, after)
    except Gone as gone:
        yield Suspicion(finding=_note(finding, gone), before=None, after=None)
        return
    if written is not None:
        yield Suspicion(finding=finding, before=None, after=assignment_program(written, now, after))


def _note(finding: Finding, gone: Gone) -> Finding:
    return Finding(kind=finding.kind, path=finding.path, text=f"{finding.text} ({gone} is gone)")


def _certain(finding: Finding) -> Suspicion:
    return Suspicion(finding=finding, before=None, after=None)


def _may_be_alias(attribute: griffe.Attribute) -> bool:
    if attribute.parent is None or not attribute.parent.is_module or attribute.value is None:
        return False
    if attribute.annotation is not None:
        return str(attribute.annotation).rpartition(".")[2] == "TypeAlias"
    if not isinstance(attribute.value, griffe.Expr):
        return False
    node = ast.parse(str(attribute.value), mode="eval").body
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr))


def _makes_type(attribute: griffe.Attribute) -> bool:
    return str(attribute.value).partition("(")[0].rpartition(".")[2] == "NewType"


def _compare_alias(path: str, old: griffe.Attribute, was: Type, now: Type, before: Surface, after: Surface) -> Iterator[Suspicion]:
    finding = Finding(kind="alias_narrowed", path=path, text=f"{was.text} became {now.text}")
    try:
        promised = render(str(old.value), old, before, after)
    except Gone as gone:
        yield Suspicion(finding=_note(finding, gone), before=None, after=None)
        return
    if promised is None or promised.normal() == now.normal():
        return
    programs = []
    for written, surface in ((was, before), (promised, after)):
        code = f"def _read(given: {written.text}) -> None:\n    _wanted: {path} = given"
        programs.append(Program(code=code, imports=frozenset(written.imports(surface) | {module_of(path, surface)})))
    # A value that merely looks like an alias fails on the old tree too, and is no type then.
    yield Suspicion(finding=finding, before=programs[0], after=programs[1], otherwise=False)


def _use_program(path: str, attribute: griffe.Attribute, annotation: Type, surface: Surface, *, writable: bool) -> Program:
    imports = annotation.imports(surface) | {module_of(path, surface)}
    if attribute.parent is None or not attribute.parent.is_class:
        return Program(code=f"_read: {annotation.text} = {path}", imports=frozenset(imports), variables=annotation.variables)
    cls, _, name = path.rpartition(".")
    lines = [f"def _read(given: {cls}) -> None:", f"    _value: {annotation.text} = given.{name}"]
    if writable:
        lines += ["", "", f"def _write(given: {cls}, value: {annotation.text}) -> None:", f"    given.{name} = value"]
    return Program(code="\n".join(lines), imports=frozenset(imports), variables=annotation.variables)


def absence_program(path: str, new: griffe.Class, surface: Surface) -> Program:
    """A member that the package's own files no longer show is not there from a base class of another package either.

    A base class with ``__getattr__`` seems to have every member. The probe overrides it: a name that only ``__getattr__`` answers has the
    probe's type and no other.
    """
    cls, _, name = path.rpartition(".")
    foreign = [base for base in ancestors(new, surface) if not surface.is_internal(base)]
    imports = {module_of(cls, surface), *(module_of(base, surface) for base in foreign)}
    lines = [f"_base_{number} = {base}" for number, base in enumerate(sorted(foreign))]
    lines += ["", "", "class _Absent: ...", "", "", f"class _Probe({cls}):  # type: ignore"]
    lines += ["    def __getattr__(self, name: str) -> _Absent: ...  # type: ignore", "", ""]
    lines += ["def _read(given: _Probe) -> None:", f"    typing.assert_type(given.{name}, _Absent)"]
    return Program(code="\n".join(lines), imports=frozenset(imports))
