# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two surfaces of one package, and what a user of the old one would notice in the new one."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import griffe
from packaging.version import Version

from tools.checks._api._classes import (
    absence_program,
    ancestors,
    compare_attribute,
    compare_attribute_for_implementers,
    compare_attribute_types,
    compare_bases,
    compare_class,
    is_abstract,
    is_enum,
    is_final,
    is_protocol,
)
from tools.checks._api._finding import Finding
from tools.checks._api._functions import (
    aligned,
    compare_decorators,
    compare_for_implementers,
    compare_nature,
    compare_parameters,
    compare_types,
)
from tools.checks._api._marks import LADDER, mark_of, own_deprecation
from tools.checks._api._signatures import Caller, Shape, signature_program, typed_parameters
from tools.checks._api._surface import Entry, Surface, follow
from tools.checks._api._types import Gone
from tools.checks._api._witness import Checker, Program, Suspicion

_REMOVALS = {"name_removed", "name_moved", "name_unlisted", "member_removed", "enum_member_removed", "module_removed"}


def compare(old: Surface, new: Surface, version: Version, checker: Checker) -> list[Finding]:
    """Every change, smallest path first.

    Args:
        old: the last release.
        new: the tree under check.
        version: version of the new tree; it decides whether a deprecated name may go.
        checker: judges what depends on types.

    Raises:
        CheckError: the type checker is needed and cannot run.
    """
    comparison = _Comparison(old=old, new=new, version=version)
    comparison.walk()
    suspicions = [comparison.judge_suspicion(suspicion) for suspicion in comparison.suspicions]
    # What is exempt needs no type checker.
    settled = [suspicion.finding for suspicion in suspicions if not suspicion.finding.counts]
    open_questions = [suspicion for suspicion in suspicions if suspicion.finding.counts]
    findings = comparison.findings + settled + checker.judge(open_questions, old, new)
    unique = {(finding.kind, finding.path): finding for finding in reversed(findings)}
    return sorted(unique.values(), key=lambda finding: (-finding.bump, finding.path, finding.kind))


@dataclass(kw_only=True)
class _Comparison:
    old: Surface
    new: Surface
    version: Version
    findings: list[Finding] = field(default_factory=list)
    suspicions: list[Suspicion] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def walk(self) -> None:
        for entry in self.old.entries.values():
            gone = entry.path not in self.new.entries and self.new.lookup(entry.path) is None
            may_move = entry.obj is not None and not entry.obj.is_module and not self._is_member(entry)
            if gone and may_move and (place := self._elsewhere(entry)) is not None:
                self.new.moved[entry.path] = place
        for entry in sorted(self.old.entries.values(), key=lambda entry: entry.rank):
            match = self.new.entries.get(entry.path)
            if match is not None:
                self._pair(entry, match)
        self._removals()
        self._additions()

    def _changed_kind(self, path: str) -> bool:
        was, now = self.old.entries[path].obj, self.new.entries[path].obj
        return was is not None and (now is None or was.kind is not now.kind)

    def _is_member(self, entry: Entry) -> bool:
        owner = self.old.entries.get(entry.path.rpartition(".")[0])
        return owner is not None and isinstance(owner.obj, griffe.Class)

    # ---- names that both have

    def _pair(self, old: Entry, new: Entry) -> None:
        if old.obj is None or new.obj is None:
            if old.foreign.rpartition(".")[2] != new.foreign.rpartition(".")[2]:
                text = f"{old.foreign or 'a name of this package'} became {new.foreign or 'a name of this package'}"
                self.findings.append(Finding(kind="kind_changed", path=old.path, text=text))
            return
        if (id(old.obj), id(new.obj)) in self.seen:
            return  # the same two objects under a longer path
        self.seen.add((id(old.obj), id(new.obj)))
        self._stability(old.path, old.obj, new.obj)
        for item in self._changes(old.path, old.obj, new.obj):
            if isinstance(item, Suspicion):
                self.suspicions.append(replace(item, finding=self._located(item.finding, old.obj, new.obj)))
            else:
                self.findings.append(self._judged(self._located(item, old.obj, new.obj), old.obj))

    def _changes(self, path: str, old: griffe.Object, new: griffe.Object) -> Iterator[Finding | Suspicion]:
        if old.kind is not new.kind:
            yield Finding(kind="kind_changed", path=path, text=f"{old.kind.value} became {new.kind.value}")
        elif isinstance(old, griffe.Function) and isinstance(new, griffe.Function):
            new = aligned(old, new)
            yield from compare_parameters(path.removesuffix(".__init__"), old, new, self.old, self.new)
            yield from compare_nature(path, old, new, self.old, self.new)
            yield from compare_types(path, old, new, self.old, self.new)
            yield from compare_decorators(path, old, new, self.old, self.new)
            if is_final(new) and not is_final(old) and old.parent is not None and old.parent.is_class:
                yield Finding(kind="method_final", path=path, text="the method is final now")
            if _is_implemented_elsewhere(old) and _is_implemented_elsewhere(new):
                yield from compare_for_implementers(path, old, new, self.old, self.new)
        elif isinstance(old, griffe.Class) and isinstance(new, griffe.Class):
            yield from compare_class(path, old, new, self.old, self.new)
            yield from compare_bases(path, old, new, self.old, self.new)
            yield from self._new_constructor(path, old, new)
        elif isinstance(old, griffe.Attribute) and isinstance(new, griffe.Attribute):
            yield from compare_attribute(path, old, new, self.old, self.new)
            yield from compare_attribute_types(path, old, new, self.old, self.new)
            if _is_implemented_elsewhere(old) and _is_implemented_elsewhere(new):
                yield from compare_attribute_for_implementers(path, old, new, self.old, self.new)

    def _new_constructor(self, path: str, old: griffe.Class, new: griffe.Class) -> Iterator[Finding]:
        # A class without a constructor of its own could be built without arguments, unless another package's base says otherwise.
        if f"{path}.__init__" in self.old.entries or f"{path}.__new__" in self.old.entries or old.bases:
            return
        entry = self.new.entries.get(f"{path}.__init__")
        if entry is not None and isinstance(entry.obj, griffe.Function):
            for parameter in list(entry.obj.parameters)[1:]:
                if parameter.required:
                    text = f"{path}() needs {parameter.name} now"
                    yield Finding(kind="parameter_added_required", path=f"{path}({parameter.name})", text=text)

    def _stability(self, path: str, old: griffe.Object, new: griffe.Object) -> None:
        was, now = mark_of(old), mark_of(new)
        own = own_deprecation(new)
        if own is not None and own_deprecation(old) is None:
            self.findings.append(self._located(Finding(kind="deprecated_added", path=path, text="deprecated now"), old, new))
        parent = self.old.entries.get(path.rpartition(".")[0])
        if parent is not None and parent.obj is not None and not parent.obj.is_module:
            above = self.new.entries.get(parent.path)
            if above is not None and above.obj is not None and mark_of(above.obj).level == now.level:
                return  # the class says it for its members
        if LADDER.index(now.level) < LADDER.index(was.level):
            text = f"{was.level} became {now.level}"
            self.findings.append(self._judged(self._located(Finding(kind="stability_lowered", path=path, text=text), old, new), old))

    # ---- names that only one has

    def _removals(self) -> None:
        gone = [entry for entry in self.old.entries.values() if entry.path not in self.new.entries]
        by_object: dict[object, list[Entry]] = {}
        for entry in sorted(gone, key=lambda entry: entry.rank):
            parent = entry.path.rpartition(".")[0]
            if parent in self.old.entries and (parent not in self.new.entries or self._changed_kind(parent)):
                continue  # its class or module is reported
            by_object.setdefault(id(entry.obj) if entry.obj is not None else entry.path, []).append(entry)
        for entries in by_object.values():
            self._removal(entries[0], [entry.path for entry in entries[1:]])

    def _removal(self, entry: Entry, others: list[str]) -> None:
        finding = self._removal_finding(entry)
        if others:
            finding = replace(finding, text=f"{finding.text}; also under {', '.join(others[:3])}{' ...' if len(others) > 3 else ''}")
        if entry.obj is None:
            self.findings.append(finding)
            return
        parent = self.new.entries.get(entry.path.rpartition(".")[0])
        finding = self._located(finding, entry.obj, parent.obj if parent is not None else None)
        owner = parent.obj if parent is not None else None
        if isinstance(owner, griffe.Class) and finding.kind == "member_removed":
            if entry.obj.name == "__init__":
                self._lost_constructor(entry, owner)
                return
            if any(not self.new.is_internal(base) for base in ancestors(owner, self.new)):
                self._member_of_base(entry, owner, finding)
                return
        self.findings.append(self._judged(finding, entry.obj))

    def _member_of_base(self, entry: Entry, owner: griffe.Class, finding: Finding) -> None:
        """A base class of another package may have a member of that name; a method of it must take the same calls."""
        absent = absence_program(entry.path, owner, self.new)
        self.suspicions.append(Suspicion(finding=finding, before=None, after=absent, absence=True))
        old = entry.obj
        if not isinstance(old, griffe.Function):
            return
        try:
            types = typed_parameters(old, self.old, self.new)
        except Gone:
            self.suspicions.append(Suspicion(finding=finding, before=None, after=None))
            return
        shape = Shape(caller=Caller.of(entry.path, old), function=old, types=types)
        self.suspicions.append(Suspicion(finding=finding, before=None, after=signature_program(shape, self.new)))
        self._accepts_anything(finding, entry.path, old, absent)

    def _accepts_anything(self, finding: Finding, call: str, old: griffe.Function, absent: Program) -> None:
        # A base class that declares *args and **kwargs accepts anything for a type checker and refuses it when it runs.
        if any(parameter.kind is griffe.ParameterKind.var_keyword for parameter in old.parameters):
            return
        head = absent.code.partition("\n\n\n")[0]
        cls, _, name = call.rpartition(".")
        use = f"_made = {call}(_no_such_argument=0)"
        if old.name != "__init__":
            use = f"def _call(given: {cls}) -> None:\n    given.{name}(_no_such_argument=0)"
        self.suspicions.append(Suspicion(finding=finding, before=None, after=replace(absent, code=f"{head}\n\n{use}"), absence=True))

    def _lost_constructor(self, entry: Entry, owner: griffe.Class) -> None:
        old = entry.obj
        if not isinstance(old, griffe.Function):
            return
        name = entry.path.removesuffix(".__init__")
        other = self.new.entries.get(f"{name}.__new__")
        if other is not None and isinstance(other.obj, griffe.Function):
            for item in compare_parameters(name, old, aligned(old, other.obj), self.old, self.new):
                self.findings.append(self._judged(self._located(item, old, owner), old))
            return
        if owner.bases:
            finding = Finding(kind="member_removed", path=entry.path, text="the constructor is gone, and that of the base class takes less")
            finding = self._judged(self._located(finding, old, owner), old)
            try:
                types = typed_parameters(old, self.old, self.new)
            except Gone:
                self.findings.append(finding)
                return
            shape = Shape(caller=Caller.of(entry.path, old), function=old, types=types)
            self.suspicions.append(Suspicion(finding=finding, before=None, after=signature_program(shape, self.new)))
            self._accepts_anything(finding, name, old, absence_program(entry.path, owner, self.new))
            return
        for parameter in list(old.parameters)[1:]:
            finding = Finding(kind="parameter_removed", path=f"{name}({parameter.name})", text="the class takes no arguments now")
            self.findings.append(self._judged(self._located(finding, old, owner), old))

    def _removal_finding(self, entry: Entry) -> Finding:
        path, obj = entry.path, entry.obj
        if obj is not None and obj.is_module:
            return Finding(kind="module_removed", path=path, text="the module is no longer public")
        parent, _, name = path.rpartition(".")
        owner = self.old.entries.get(parent)
        if owner is not None and isinstance(owner.obj, griffe.Class):
            if is_enum(owner.obj, self.old) and obj is not None and obj.is_attribute:
                return Finding(kind="enum_member_removed", path=path, text="the member is gone")
            return Finding(kind="member_removed", path=path, text=f"the {obj.kind.value if obj is not None else 'member'} is gone")
        kind = obj.kind.value if obj is not None else "name"
        module = self.new.lookup(parent)
        if isinstance(module, griffe.Module) and name in module.members and self._leads_somewhere(module.members[name]):
            return Finding(kind="name_unlisted", path=path, text=f"the {kind} is still there but no longer public under this name")
        elsewhere = self._elsewhere(entry)
        if elsewhere:
            return Finding(
                kind="name_moved", path=path, text=f"the {kind} is public as {elsewhere} now and nothing is left at the old place"
            )
        return Finding(kind="name_removed", path=path, text=f"the {kind} is gone")

    def _leads_somewhere(self, member: griffe.Object | griffe.Alias) -> bool:
        return follow(member) is not None or not self.new.is_internal(getattr(member, "target_path", self.new.package))

    def _elsewhere(self, entry: Entry) -> str | None:
        kind = entry.obj.kind if entry.obj is not None else None
        found = [
            other
            for other in self.new.entries.values()
            if other.path.rpartition(".")[2] == entry.path.rpartition(".")[2]
            and (other.obj.kind if other.obj is not None else None) is kind
            and isinstance(self.new.lookup(other.path.rpartition(".")[0]), griffe.Module)
            # Another place that the old tree had already is a move only if it was the same thing.
            and (other.path not in self.old.entries or (entry.obj is not None and self.old.entries[other.path].obj is entry.obj))
        ]
        return min(found, key=lambda other: other.rank).path if found else None

    def _additions(self) -> None:
        new_objects: set[int] = set()
        for entry in sorted(self.new.entries.values(), key=lambda entry: entry.rank):
            parent = entry.path.rpartition(".")[0]
            if entry.path in self.old.entries or (parent in self.new.entries and parent not in self.old.entries):
                continue
            if entry.obj is not None and (id(entry.obj) in new_objects or entry.obj.name in ("__init__", "__new__")):
                continue  # counted under a shorter path, or as parameters of its class
            new_objects.add(id(entry.obj))
            owner = self.new.entries.get(parent)
            kind = "name_added"
            if entry.obj is not None and entry.obj.is_module:
                kind = "module_added"
            elif owner is not None and isinstance(owner.obj, griffe.Class):
                kind = "enum_member_added" if is_enum(owner.obj, self.new) else "member_added"
            finding = Finding(kind=kind, path=entry.path, text="new")
            self.findings.append(self._located(finding, None, entry.obj) if entry.obj is not None else finding)

    # ---- where, and whether it counts

    def _located(self, finding: Finding, old: griffe.Object | None, new: griffe.Object | None) -> Finding:
        if new is not None:
            file, line = self.new.location(new)
        else:
            file, line = (self.old.location(old)[0], 1) if old is not None else ("", 1)
        return replace(finding, file=file, line=line)

    def _judged(self, finding: Finding, old: griffe.Object) -> Finding:
        """Marks of the baseline decide: a mark that arrives with the break it would excuse excuses nothing."""
        mark = mark_of(old)
        if mark.level != "stable":
            return replace(finding, exempt=f"{mark.level} in the last release")
        if finding.kind in _REMOVALS and mark.deprecation is not None and mark.deprecation.removal_version is not None:
            due = mark.deprecation.removal_version
            if Version(self.version.base_version) >= Version(due):
                return replace(finding, exempt=f"deprecated in the last release, to go in {due}")
            text = f"{finding.text}, but its removal was promised for {due} and this is {self.version}"
            return replace(finding, kind="removed_too_early", text=text)
        return finding

    def judge_suspicion(self, suspicion: Suspicion) -> Suspicion:
        path = suspicion.finding.path.partition("(")[0]
        entry = self.old.entries.get(path) or self.old.entries.get(path.partition("[")[0])
        if entry is None or entry.obj is None:
            return suspicion
        return replace(suspicion, finding=self._judged(suspicion.finding, entry.obj))


def _is_implemented_elsewhere(obj: griffe.Object) -> bool:
    return isinstance(obj.parent, griffe.Class) and (is_protocol(obj.parent) or is_abstract(obj))
