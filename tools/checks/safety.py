# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Wheels never run what they read: no pickle family, no torch.load, no eval or exec, no unsafe YAML."""

import ast
import sys
from dataclasses import dataclass

from tools.checks._tree import ROOT, python_files, report, wheels

# Modules whose formats carry code.
MODULES = {"_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# Functions, by their full name, that run or load code.
CALLS = {
    "builtins.compile",
    "builtins.eval",
    "builtins.exec",
    "os.popen",
    "os.system",
    "torch.hub.load",
    "torch.jit.load",
    "torch.load",
    "torch.package.PackageImporter",
    "yaml.full_load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
}
BUILTINS = {"compile", "eval", "exec"}
# Collectives of torch.distributed that pickle what they carry.
OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
# Methods of sockets (zmq) that pickle what they carry.
PICKLING_METHODS = {"recv_pyobj", "send_pyobj"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A forbidden use."""

    line: int
    what: str


class _Uses(ast.NodeVisitor):
    """Collects forbidden uses, following `import x as y` and `from x import y as z`."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._names: dict[str, str] = {name: f"builtins.{name}" for name in BUILTINS}

    def _found(self, node: ast.AST, what: str) -> None:
        self.findings.append(Finding(line=getattr(node, "lineno", 0), what=what))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name.split(".")[0] in MODULES:
                self._found(node, f"import of {alias.name}")
            bound = alias.asname or alias.name.split(".")[0]
            self._names[bound] = alias.name if alias.asname else bound

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            # A wheel's own name, e.g. its own load(), hides a builtin of that name.
            for alias in node.names:
                self._names.pop(alias.asname or alias.name, None)
            return
        if node.module.split(".")[0] in MODULES:
            self._found(node, f"import from {node.module}")
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self._names[alias.asname or alias.name] = full
            if full in CALLS or alias.name in OBJECT_COLLECTIVES:
                self._found(node, f"import of {full}")

    def visit_Call(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            if keyword.arg == "allow_pickle" and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False):
                self._found(node, "allow_pickle other than False")
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        full = self._full_name(node)
        if full in CALLS or node.attr in OBJECT_COLLECTIVES | PICKLING_METHODS:
            self._found(node, f"use of {full or node.attr}")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and self._names.get(node.id) in CALLS:
            self._found(node, f"use of {self._names[node.id]}")

    def _full_name(self, node: ast.expr) -> str | None:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._names:
            return None
        return ".".join([self._names[node.id], *reversed(parts)])


def findings_in(text: str) -> list[Finding]:
    """Forbidden uses in one source text, in the order of their lines."""
    uses = _Uses()
    uses.visit(ast.parse(text))
    return sorted(uses.findings, key=lambda finding: finding.line)


def main() -> int:
    findings, num_files = [], 0
    for wheel in wheels().values():
        for path in python_files(wheel.source):
            num_files += 1
            findings += [f"{path.relative_to(ROOT)}:{finding.line}: {finding.what}" for finding in findings_in(path.read_text())]
    return report(findings, f"safety: nothing that runs foreign code in {num_files} files")


if __name__ == "__main__":
    sys.exit(main())
