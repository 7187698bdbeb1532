# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What changed in a function or method: parameters by griffe, the rest here."""

import ast
import textwrap
from collections.abc import Iterator, Sequence

import griffe
from griffe import BreakageKind, ParameterKind

from tools.checks._api._finding import Finding
from tools.checks._api._signatures import (
    Caller,
    Shape,
    assignment_program,
    describe_type,
    implementer_program,
    signature_program,
    typed_parameters,
)
from tools.checks._api._surface import Surface
from tools.checks._api._types import Gone, canonical, render
from tools.checks._api._values import value_of
from tools.checks._api._witness import Suspicion

_PARAMETER_KINDS = {
    BreakageKind.PARAMETER_REMOVED: "parameter_removed",
    BreakageKind.PARAMETER_CHANGED_KIND: "parameter_kind_changed",
    BreakageKind.PARAMETER_CHANGED_DEFAULT: "parameter_default_changed",
    BreakageKind.PARAMETER_CHANGED_REQUIRED: "parameter_now_required",
    BreakageKind.PARAMETER_ADDED_REQUIRED: "parameter_added_required",
}
_WRAPPERS = {"contextmanager", "asynccontextmanager"}
_POSITIONAL = (ParameterKind.positional_only, ParameterKind.positional_or_keyword)
_VARIADIC = (ParameterKind.var_positional, ParameterKind.var_keyword)
_ITERATORS = {"Iterable", "Iterator", "AsyncIterable", "AsyncIterator", "Generator", "AsyncGenerator"}
# Decorators whose effect is judged elsewhere, or that change no call.
_TRANSPARENT = {
    "abstractmethod", "asynccontextmanager", "cached_property", "classmethod", "contextmanager", "deprecated", "experimental_api",
    "final", "internal_api", "overload", "override", "pep702_deprecated", "property", "setter", "staticmethod",
}  # fmt: skip


def aligned(old: griffe.Function, new: griffe.Function) -> griffe.Function:
    """The new function with the old names where no caller can write one: ``self``, positional-only, ``*`` and ``**``."""
    names: dict[str, str] = {}
    bound = _is_bound(old) and _is_bound(new)
    for place, (was, now) in enumerate(zip(old.parameters, new.parameters, strict=False)):
        nameless = was.kind is ParameterKind.positional_only and now.kind in _POSITIONAL
        if (now.name not in old.parameters and (nameless or (bound and place == 0))) or (
            nameless and now.kind is ParameterKind.positional_only and now.name != was.name
        ):
            names[now.name] = was.name
    for kind in (ParameterKind.var_positional, ParameterKind.var_keyword):
        pair = [next((p.name for p in function.parameters if p.kind is kind), None) for function in (old, new)]
        if pair[0] is not None and pair[1] is not None:
            names[pair[1]] = pair[0]
    unmoved = [p.name for p in new.parameters if p.name not in names]
    if all(new_name == old_name for new_name, old_name in names.items()) or set(unmoved) & set(names.values()):
        return new
    copy = griffe.Function(
        new.name, lineno=new.lineno, endlineno=new.endlineno, returns=new.returns, decorators=new.decorators, parent=new.parent
    )
    copy.labels = set(new.labels)
    copy.overloads = new.overloads
    copy.parameters = griffe.Parameters(
        *(griffe.Parameter(names.get(p.name, p.name), annotation=p.annotation, kind=p.kind, default=p.default) for p in new.parameters)
    )
    return copy


def _is_bound(function: griffe.Function) -> bool:
    return binding(function) in ("method", "classmethod")


def _unbound(function: griffe.Function) -> griffe.Function:
    """A function as a caller sees it who reaches it through an instance."""
    if not _is_bound(function):
        return function
    copy = griffe.Function(function.name, parent=function.parent)
    copy.parameters = griffe.Parameters(*list(function.parameters)[1:])
    return copy


def compare_parameters(path: str, old: griffe.Function, new: griffe.Function, before: Surface, after: Surface) -> Iterator[Finding]:
    """Changes that a call would notice whatever the types are."""
    if binding(old) != binding(new):
        old, new = _unbound(old), _unbound(new)
    for breakage in _breakages(old, new):
        kind = _PARAMETER_KINDS.get(breakage.kind)
        if kind is None or kind == "parameter_default_changed":
            continue  # order and defaults are judged below, types by witnesses
        parameter = breakage.old_value or breakage.new_value
        yield Finding(kind=kind, path=f"{path}({parameter.name})", text=_difference(breakage.old_value, breakage.new_value))
    order = [p.name for p in old.parameters if p.kind in _POSITIONAL]
    order_now = [p.name for p in new.parameters if p.kind in _POSITIONAL]
    still_there = [name for name in order if name in order_now]
    if still_there != order_now[: len(still_there)] and not any(
        p.required for p in new.parameters if p.name not in old.parameters and p.kind in _POSITIONAL
    ):
        yield Finding(kind="parameter_reordered", path=path, text=f"({', '.join(order)}) became ({', '.join(order_now)})")
    for was in old.parameters:
        now = next((parameter for parameter in new.parameters if parameter.name == was.name), None)
        if now is not None and was.kind is ParameterKind.positional_only is not now.kind and _takes_keywords(old):
            text = f"a keyword {was.name} went into the variadic keywords before"
            yield Finding(kind="parameter_kind_changed", path=f"{path}({was.name})", text=text)
        if now is not None and was.default is not None and now.default is not None and was.kind not in _VARIADIC:
            values = value_of(was.default, old, before), value_of(now.default, new, after)
            if values[0] != values[1]:
                shown = _difference(was, now) if str(was.default) != str(now.default) else f"{was.default} has another value"
                yield Finding(kind="parameter_default_changed", path=f"{path}({was.name})", text=shown)
    for parameter in new.parameters:
        if parameter.name not in old.parameters and not parameter.required:
            yield Finding(kind="parameter_added", path=f"{path}({parameter.name})", text=f"new: {_spell(parameter)}")


def _breakages(old: griffe.Function, new: griffe.Function) -> list[griffe.Breakage]:
    # griffe compares containers. A container of one function keeps a failure elsewhere in the tree from ending its walk early.
    boxes = []
    for function in (old, new):
        box = griffe.Module("box")
        box.members["function"] = function
        boxes.append(box)
    public, old.public = old.public, True
    try:
        return list(griffe.find_breaking_changes(*boxes))
    finally:
        old.public = public


def _takes_keywords(function: griffe.Function) -> bool:
    return any(parameter.kind is ParameterKind.var_keyword for parameter in function.parameters)


def _spell(parameter: griffe.Parameter) -> str:
    stars = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}.get(parameter.kind, "")  # type: ignore[arg-type]
    annotation = f": {parameter.annotation}" if parameter.annotation is not None else ""
    default = f" = {parameter.default}" if parameter.default is not None and not stars else ""
    return f"{stars}{parameter.name}{annotation}{default}"


def _difference(old: griffe.Parameter | None, new: griffe.Parameter | None) -> str:
    if old is None or new is None:
        return f"new: {_spell(new)}" if new is not None else f"was: {_spell(old)}" if old is not None else ""
    kinds = (old.kind.value, new.kind.value) if old.kind is not None and new.kind is not None else ("", "")
    return f"{_spell(old)} became {_spell(new)}" + (f" ({kinds[0]} became {kinds[1]})" if kinds[0] != kinds[1] else "")


def compare_nature(path: str, old: griffe.Function, new: griffe.Function, before: Surface, after: Surface) -> Iterator[Finding | Suspicion]:
    """Coroutine, generator, binding, context manager: what a call gives back or how it is reached."""
    if ("async" in old.labels) != ("async" in new.labels):
        finding = Finding(kind="async_changed", path=path, text=f"{_nature(old)} became {_nature(new)}")
        if "async" in old.labels and any(word in str(new.returns) for word in ("Coroutine", "Awaitable")):
            yield _whole_signature(finding, path, old, before, after)
        else:
            yield finding
    promised = all(str(f.returns).partition("[")[0].rpartition(".")[2] in _ITERATORS for f in (old, new))
    if is_generator(old) != is_generator(new) and not promised:
        yield Finding(
            kind="generator_changed", path=path, text="generator became function" if is_generator(old) else "function became generator"
        )
    bindings = binding(old), binding(new)
    if bindings[0] != bindings[1] and "method" in bindings:
        yield Finding(kind="binding_changed", path=path, text=f"{bindings[0]} became {bindings[1]}")
    if _wrappers(old) != _wrappers(new):
        yield Finding(
            kind="wrapper_changed", path=path, text=f"{sorted(_wrappers(old)) or 'plain'} became {sorted(_wrappers(new)) or 'plain'}"
        )


def _nature(function: griffe.Function) -> str:
    return "async def" if "async" in function.labels else "def"


def binding(function: griffe.Function) -> str:
    """How a function hangs on its class."""
    if function.parent is None or not function.parent.is_class:
        return "function"
    return next((label for label in ("staticmethod", "classmethod") if label in function.labels), "method")


def _wrappers(function: griffe.Function) -> set[str]:
    return {decorator.callable_path.rpartition(".")[2] for decorator in function.decorators} & _WRAPPERS


def is_generator(function: griffe.Function) -> bool:
    """Whether the body itself yields."""
    source = function.source
    if "yield" not in source:
        return False
    tree = ast.parse(textwrap.dedent(source)).body[0]
    pending = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            pending.extend(ast.iter_child_nodes(node))
    return False


def compare_types(path: str, old: griffe.Function, new: griffe.Function, before: Surface, after: Surface) -> Iterator[Suspicion]:
    """Suspicions about parameter and return types, for annotations whose text changed."""
    if ("async" in old.labels) != ("async" in new.labels) or binding(old) != binding(new):
        return  # reported already, and every type would seem to change with it
    overloads = list(old.overloads or ())
    if overloads:
        if [_text(signature) for signature in overloads] != [_text(signature) for signature in new.overloads or ()]:
            yield from _compare_overloads(path, overloads, new, before, after)
        return
    was = Shape(caller=Caller.of(path, old), function=old, types=typed_parameters(old, before, before))
    now = Shape(caller=Caller.of(path, new), function=new, types=typed_parameters(new, after, after))
    if was.types == now.types:
        return
    spellings = canonical(was.types, now.types), canonical(now.types, was.types)
    for slot, type_now in now.types.items():
        type_was = was.types.get(slot)
        if type_was is not None and spellings[0].get(slot) == spellings[1].get(slot):
            continue
        if type_was is None or type_now is None:
            if slot == "return" and type_was is not None:
                yield Suspicion(finding=_type_finding(path, slot, f"-> {type_was.text} is no longer declared"), before=None, after=None)
            continue
        annotation = old.returns if slot == "return" else old.parameters[slot].annotation
        try:
            promised = render(annotation, old, before, after)
        except Gone as gone:
            text = f"{type_was.text} became {type_now.text} ({gone} is gone)"
            yield Suspicion(finding=_type_finding(path, slot, text), before=None, after=None)
            continue
        if promised is None or promised.normal() == type_now.normal():
            continue
        finding = _type_finding(path, slot, describe_type(type_was, type_now))
        if promised.variables != type_now.variables and type_now.text not in ("typing.Any", "object"):
            # Which call binds a type variable to what is more than a single assignment shows.
            yield Suspicion(finding=finding, before=None, after=None)
            continue
        if _is_wrapped(old) or _is_wrapped(new):
            # What the decorator makes of the signature is not known, the types of its parts are.
            given, wanted = (type_now, promised) if slot == "return" else (promised, type_now)
            yield Suspicion(finding=finding, before=None, after=assignment_program(given, wanted, after))
            continue
        changed = Shape(caller=now.caller, function=new, types={**now.types, slot: promised})
        yield Suspicion(finding=finding, before=signature_program(was, before), after=signature_program(changed, after))


def _is_wrapped(function: griffe.Function) -> bool:
    return any(decorator.callable_path.rpartition(".")[2] not in _TRANSPARENT - _WRAPPERS for decorator in function.decorators)


def _type_finding(path: str, slot: str, text: str) -> Finding:
    if slot == "return":
        return Finding(kind="return_type_changed", path=path, text=text)
    return Finding(kind="parameter_type_changed", path=f"{path.removesuffix('.__init__')}({slot})", text=text)


def _text(function: griffe.Function) -> str:
    return f"({', '.join(_spell(parameter) for parameter in function.parameters)}) -> {function.returns}"


def _compare_overloads(
    path: str, overloads: Sequence[griffe.Function], new: griffe.Function, before: Surface, after: Surface
) -> Iterator[Suspicion]:
    for overload in overloads:
        # Members of an overload are resolved where the function stands: griffe gives overloads no parent of their own.
        overload.parent = overload.parent or new.parent
        finding = Finding(kind="overload_removed", path=path, text=_text(overload))
        was = Shape(caller=Caller.of(path, overload), function=overload, types=typed_parameters(overload, before, before))
        try:
            types = typed_parameters(overload, before, after)
        except Gone:
            yield Suspicion(finding=finding, before=None, after=None)
            continue
        now = Shape(caller=Caller.of(path, overload), function=overload, types=types)
        yield Suspicion(finding=finding, before=signature_program(was, before), after=signature_program(now, after))


def compare_for_implementers(path: str, old: griffe.Function, new: griffe.Function, before: Surface, after: Surface) -> Iterator[Suspicion]:
    """Whether a class written against the old method still fits the new one."""
    if _text(old) == _text(new) and _nature(old) == _nature(new):
        return
    finding = Finding(kind="implementer_broken", path=path, text=f"{_text(old)} became {_text(new)}")
    try:
        was = Shape(caller=Caller.of(path, old), function=old, types=typed_parameters(old, before, after))
    except Gone:
        yield Suspicion(finding=finding, before=None, after=None)
        return
    now = Shape(caller=Caller.of(path, new), function=new, types=typed_parameters(new, after, after))
    yield Suspicion(finding=finding, before=None, after=implementer_program(was, now, after))


def compare_decorators(
    path: str, old: griffe.Function, new: griffe.Function, before: Surface, after: Surface
) -> Iterator[Finding | Suspicion]:
    """Whether a decorator that was not there before accepts every call that the bare function accepted."""
    known = {decorator.callable_path for decorator in old.decorators}
    for decorator in new.decorators:
        if decorator.callable_path in known or decorator.callable_path.rpartition(".")[2] in _TRANSPARENT:
            continue
        finding = Finding(kind="decorator_narrowed", path=path, text=f"@{decorator.callable_path} does not accept every call")
        inner = _untyped_wrapper(after.lookup(decorator.callable_path))
        if inner is None:
            yield _whole_signature(finding, path, old, before, after)
        elif not (inner.vararg and inner.kwarg):
            taken = {argument.arg for argument in (*inner.posonlyargs, *inner.args, *inner.kwonlyargs)}
            lost = [p.name for p in list(old.parameters)[_is_bound(old) :] if p.name not in taken and p.kind not in _VARIADIC]
            if lost:
                yield finding


def _untyped_wrapper(decorator: griffe.Object | None) -> ast.arguments | None:
    """Parameters of the function that an unannotated decorator of the package gives back."""
    if not isinstance(decorator, griffe.Function) or decorator.returns is not None:
        return None
    definition = ast.parse(textwrap.dedent(decorator.source)).body[0]
    returned = {node.value.id for node in ast.walk(definition) if isinstance(node, ast.Return) and isinstance(node.value, ast.Name)}
    inner = (node for node in ast.walk(definition) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node is not definition)
    return next((node.args for node in inner if node.name in returned), None)


def _whole_signature(finding: Finding, path: str, old: griffe.Function, before: Surface, after: Surface) -> Suspicion:
    """The suspicion that the new function can no longer be put where the old signature is wanted."""
    was = Shape(caller=Caller.of(path, old), function=old, types=typed_parameters(old, before, before), spell_coroutine=True)
    try:
        now = Shape(caller=Caller.of(path, old), function=old, types=typed_parameters(old, before, after), spell_coroutine=True)
    except Gone:
        return Suspicion(finding=finding, before=None, after=None)
    return Suspicion(finding=finding, before=signature_program(was, before), after=signature_program(now, after))
