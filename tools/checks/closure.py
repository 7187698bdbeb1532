# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a wheel declares is what it imports: in the sources, and (--installed WHEEL) in a clean environment.

The second form uses the standard library only, because the clean environment holds nothing else.
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Distributions whose import name is not their own name.
IMPORT_NAMES = {
    "cuda-bindings": "cuda",
    "flashinfer-python": "flashinfer",
    "opentelemetry-api": "opentelemetry",
    "pyyaml": "yaml",
    "pyzmq": "zmq",
    "protobuf": "google",
}
# What every type checker knows by itself; under TYPE_CHECKING nothing has to be installed for it.
TYPE_CHECKERS_BRING = {"typing_extensions"}
# Wheel -> libraries that it can use, and that no index has: users build them from source, and no extra can name them.
FROM_SOURCE = {"mcore-inference": {"flash_attn_interface"}, "mcore-moe": {"deep_ep"}}
IMPORT_BUDGET_S = 0.3
"""Of a processor that takes ``_PACE_S`` for a million turns of a loop; a slower one has as much longer."""
_PACE_S = 0.04
_EXTRA_MARKER = re.compile(r"""\bextra\s*==\s*['"]([^'"]+)['"]""")
_TIMER = """
import gc, importlib, sys, time
import torch
gc.collect()  # of what torch leaves: 0.08 s, paid by whoever crosses the threshold
def pace():
    begin, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - begin
before = pace()
start = time.process_time()
importlib.import_module(sys.argv[1])
seconds = time.process_time() - start
print(seconds, (before + pace()) / 2)
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def import_name(distribution: str) -> str:
    return IMPORT_NAMES.get(distribution, distribution.replace("-", "_"))


def requirement_name(text: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", text)
    if match is None:
        raise ValueError(f"requirement {text!r} has no name; write it as 'name>=version'")
    return normalized(match[0])


def requirement_extras(text: str) -> list[str]:
    """Extras that a requirement asks for: name[this,that]>=version."""
    match = re.match(r"[A-Za-z0-9._-]+\s*\[([^\]]*)\]", text)
    return [normalized(extra.strip()) for extra in match[1].split(",")] if match else []


def imported(paths: Iterable[Path]) -> tuple[dict[str, str], dict[str, str]]:
    """Top-level modules that files import: (when the file is imported, only later), each with the first place."""
    eager: dict[str, str] = {}
    lazy: dict[str, str] = {}
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_import = {id(node) for node in _run_at_import(tree.body)}
        blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")]
        for_checkers = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
        for node in ast.walk(tree):
            for name in _absolute_names(node):
                if id(node) in for_checkers and name in TYPE_CHECKERS_BRING:
                    continue
                place = f"{path.name}:{getattr(node, 'lineno', 0)}"
                (eager if id(node) in at_import else lazy).setdefault(name.split(".")[0], place)
    return eager, lazy


def _absolute_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def reached(package: Path, roots: Iterable[Path]) -> set[Path]:
    """Files that run when one of ``roots`` is imported, following what they import of their own package."""
    modules: set[Path] = set()
    todo = [package / "__init__.py", *roots]
    while todo:
        path = todo.pop()
        if path in modules or not path.is_file():
            continue
        modules.add(path)
        for node in _run_at_import(ast.parse(path.read_text(encoding="utf-8")).body):
            for dotted in _own_names(node, path, package):
                parts = dotted.split(".")
                for length in range(len(parts) + 1):
                    base = package.joinpath(*parts[:length])
                    todo += [base / "__init__.py", base.with_suffix(".py")]
    return modules


def _own_names(node: ast.stmt, path: Path, package: Path) -> list[str]:
    """Modules of the own package that a statement may import, dotted and without the package's name."""
    here = list(path.parent.relative_to(package).parts)
    if isinstance(node, ast.ImportFrom) and node.level:
        base = [*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else [])]
        return [".".join([*base, alias.name]) for alias in node.names]
    names = _absolute_names(node)
    if isinstance(node, ast.ImportFrom) and names:
        names = [f"{names[0]}.{alias.name}" for alias in node.names]
    return [name.partition(".")[2] for name in names if name.split(".")[0] == package.name]


def _run_at_import(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    """Statements that run when the module is imported; what stands under TYPE_CHECKING does not."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _run_at_import(node.orelse)
            continue
        yield node
        for part in ("body", "orelse", "finalbody"):
            yield from _run_at_import(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _run_at_import(handler.body)


def source_findings(folder: Path, sources: str = "src") -> tuple[list[str], list[str]]:
    """(errors, notes) for the project of a folder: imported but not declared, declared but not imported, extras imported too early."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    name, module = project["name"], project["name"].replace("-", "_")
    core = {requirement_name(text) for text in project.get("dependencies", [])}
    extras = {
        extra: {requirement_name(text) for text in texts if requirement_name(text) != name}
        for extra, texts in project.get("optional-dependencies", {}).items()
    }
    optional = {one for names in extras.values() for one in names}
    package = folder / sources / module
    eager, lazy = imported(sorted(package.rglob("*.py")))
    own = {module, "__future__"} | sys.stdlib_module_names
    known = {import_name(one): one for one in core | optional}
    from_source = FROM_SOURCE.get(name, set())
    errors = []
    for top, place in {**lazy, **eager}.items():
        if top not in own and top not in known and top not in from_source:
            errors.append(f"{name}: {place} imports {top}, which pyproject.toml does not declare")
    # A public folder that is named like an extra is for those who installed it; everything else imports without extras.
    roots = [path for path in package.glob("[!_]*/__init__.py") if path.parent.name not in extras]
    for top, place in imported(sorted(reached(package, roots)))[0].items():
        if top in from_source or (top in known and known[top] not in core):
            origin = "from source" if top in from_source else "of an extra"
            errors.append(f"{name}: {place} imports {top} {origin} at the top of the file; import it in the function that needs it")
    used = {known[top] for top in {**lazy, **eager} if top in known}
    errors += [f"{name}: {one} is declared and never imported" for one in sorted(core - used)]
    notes = []
    for extra, names in extras.items():
        if not names & used:
            notes.append(f"note: {name}[{extra}]: no file imports it yet")
    return errors, notes


def installed_closure(wheel: str) -> tuple[set[str], set[str]]:
    """(distributions that the wheel needs, directly or not; distributions that are there)."""
    there = {normalized(one.metadata["Name"]): one for one in importlib.metadata.distributions()}
    closure: set[tuple[str, str]] = set()
    # A distribution, and one of its extras; "" for what it needs without any.
    todo = [(normalized(wheel), "")]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in closure or name not in there:
            continue
        closure.add((name, extra))
        for text in there[name].requires or []:
            of_extra = _EXTRA_MARKER.search(text)
            if (normalized(of_extra[1]) if of_extra else "") == extra:
                todo += [(requirement_name(text), one) for one in ("", *requirement_extras(text))]
    return {name for name, _ in closure}, set(there)


def installed_findings(wheel: str) -> list[str]:
    """Problems of the one wheel installed here."""
    module = wheel.replace("-", "_")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return [f"{wheel}: its module {module} is not importable"]
    package = Path(spec.origin).parent
    findings = []
    if ROOT in package.parents:
        findings.append(f"{wheel}: {module} comes from the working tree, not from the wheel")
    if not (package / "py.typed").is_file():
        findings.append(f"{wheel}: the wheel does not carry py.typed")
    files = importlib.metadata.files(wheel) or []
    if not any(file.name == "LICENSE" for file in files):
        findings.append(f"{wheel}: the wheel does not carry its LICENSE")
    if strangers := sorted({file.parts[0] for file in files} - {module} - _wheel_parts(wheel)):
        findings.append(f"{wheel}: the wheel also installs {', '.join(strangers)}")
    closure, there = installed_closure(wheel)
    if extra := sorted(there - closure - {"pip"}):
        findings.append(f"{wheel}: installed without being declared: {', '.join(extra)}")
    try:
        seconds = quickest_import(module)
    except subprocess.CalledProcessError as error:
        return [*findings, f"{wheel}: {module} does not import:\n{error.stderr}"]
    print(f"{wheel}: {len(there)} distributions, import {seconds:.2f} s above torch (at most {IMPORT_BUDGET_S})")
    if seconds > IMPORT_BUDGET_S:
        findings.append(f"{wheel}: its import takes {seconds:.2f} s above torch; import the heavy part where it is used")
    return findings


def _wheel_parts(wheel: str) -> set[str]:
    """First path parts that every installed wheel has beside its package: metadata and scripts."""
    version = importlib.metadata.version(wheel)
    return {f"{wheel.replace('-', '_')}-{version}.dist-info", ".."}


def quickest_import(module: str, tries: int = 15) -> float:
    """Of so many times the least, or the first within the budget: what else the machine does makes each longer, and none shorter."""
    least = float("inf")
    for _ in range(tries):
        least = min(least, import_seconds(module))
        if least <= IMPORT_BUDGET_S:
            break
    return least


def import_seconds(module: str) -> float:
    """Processor seconds that importing takes where torch is there already; of a slow processor, those of one at ``_PACE_S``."""
    command = [sys.executable, "-I", "-c", _TIMER, module]
    seconds, pace_s = map(float, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    return seconds / max(1.0, pace_s / _PACE_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--installed", metavar="WHEEL", help="check the one wheel installed in this environment")
    wheel = parser.parse_args().installed
    if wheel:
        findings = installed_findings(wheel)
    else:
        findings = []
        projects = [(path.parent, "src") for path in sorted(ROOT.glob("packages/*/pyproject.toml"))]
        for folder, sources in [*projects, (ROOT, "tools")]:
            errors, notes = source_findings(folder, sources)
            findings += errors
            for note in notes:
                print(note)
    print("\n".join(findings) if findings else "closure: what is imported is declared")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
