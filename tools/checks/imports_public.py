# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Wheels, tools and rooms use each other's public names only.

Between wheels: no private module, no name outside `__all__`. Inside a wheel a private file belongs to its folder: modules of that
folder and of the folders inside it may import it, every other room takes the names that the folder re-exports. No modules import each
other in a circle, imports inside functions and for types counted.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools.checks._tree import ROOT, distributions, python_files, report


def exported(module_file: Path) -> set[str] | None:
    """Names in a module's `__all__`; None where it has none that can be read."""
    names: set[str] | None = None
    for node in ast.parse(module_file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(node, "value", None)
            if isinstance(value, ast.List | ast.Tuple):
                names = {element.value for element in value.elts if isinstance(element, ast.Constant) and isinstance(element.value, str)}
    return names


def module_file(sources: dict[str, Path], dotted: str) -> Path | None:
    """File of a sibling's module by its dotted name; None where there is none."""
    top, *rest = dotted.split(".")
    base = sources[top].joinpath(*rest)
    for candidate in (base / "__init__.py", base.with_suffix(".py")):
        if candidate.is_file() and (rest or candidate.name == "__init__.py"):
            return candidate
    return None


def problems_in(text: str, sources: dict[str, Path], own: str | None) -> Iterator[tuple[int, str]]:
    """Line and reason of each import that reaches into a sibling; `own` is the module the text belongs to."""
    siblings = sources.keys() - {own}
    tree = ast.parse(text)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in siblings:
                    modules[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
                    yield from _module_problems(node.lineno, alias.name, sources)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module.split(".")[0] in siblings:
            problems = list(_module_problems(node.lineno, node.module, sources))
            yield from problems
            if not problems:
                for alias in node.names:
                    yield from _name_problems(node.lineno, node.module, alias.name, sources)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield from _name_problems(node.lineno, modules[node.value.id], node.attr, sources)


def _module_problems(line: int, dotted: str, sources: dict[str, Path]) -> Iterator[tuple[int, str]]:
    if any(part.startswith("_") for part in dotted.split(".")):
        yield line, f"{dotted} is a private module"
    elif module_file(sources, dotted) is None:
        yield line, f"there is no module {dotted}"


def _name_problems(line: int, dotted: str, name: str, sources: dict[str, Path]) -> Iterator[tuple[int, str]]:
    if name == "*":
        yield line, f"wildcard import from {dotted}; name what is used"
        return
    if not name.startswith("_") and module_file(sources, f"{dotted}.{name}") is not None:
        return
    file = module_file(sources, dotted)
    names = exported(file) if file is not None else None
    if names is None:
        yield line, f"{dotted} has no __all__, so nothing in it is public"
    elif name not in names and name not in {"__version__", "__all__"}:
        yield line, f"{name} is not in __all__ of {dotted}"


def room_problems_in(text: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and reason of each import of another room's private file; `package` is the folder that the text lies in, dotted."""
    top = package.split(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            depth = next((i for i, part in enumerate(parts) if part.startswith("_") and not part.startswith("__")), None)
            if parts[0] != top or depth is None:
                continue
            room = ".".join(parts[:depth])
            if not f"{package}.".startswith(f"{room}."):
                yield node.lineno, f"{target} is private to {room}; import a name of its __all__"


def _dotted(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circle_in(texts: Mapping[str, str]) -> list[str]:
    """Modules, by dotted names, that import each other in a circle, the first one repeated at the end; empty where there is none."""
    graph: dict[str, set[str]] = {}
    for module, text in texts.items():
        edges = graph.setdefault(module, set())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                edges.update(alias.name for alias in node.names if alias.name in texts)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = (f"{node.module}.{alias.name}" for alias in node.names)
                edges.update(name if name in texts else node.module for name in names if name in texts or node.module in texts)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main() -> int:
    tree = distributions()
    sources = {wheel.module: wheel.source for wheel in tree.values()}
    files = [(path, wheel.module) for wheel in tree.values() for path in python_files(wheel.source)]
    owned = {path for path, _ in files}
    files += [(path, None) for path in python_files(ROOT / "tools") if "tests" not in path.parts and path not in owned]
    findings = []
    for path, own in files:
        text = path.read_text()
        problems = list(problems_in(text, sources, own))
        if own is not None:
            package = ".".join(path.relative_to(sources[own].parent).parent.parts)
            problems += room_problems_in(text, package)
        findings += [f"{path.relative_to(ROOT)}:{line}: {reason}" for line, reason in problems]
    for wheel in tree.values():
        circle = circle_in({_dotted(path, wheel.source): path.read_text() for path in python_files(wheel.source)})
        if circle:
            findings.append(f"{wheel.module}: imports in a circle: {' <- '.join(circle)}; move what both need below them")
    return report(findings, f"imports: public names only in {len(files)} files")


if __name__ == "__main__":
    sys.exit(main())
