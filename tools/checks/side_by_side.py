# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Four gates over the catalogue of edits; `--write` puts the table into docs/api-side-by-side.md.

The rules of Megatron-LM's script and of OpenTelemetry's are followed here, on trees in place of commits; griffe's are its own function.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from difflib import ndiff
from pathlib import Path

import griffe

from tools.checks._api import Bump
from tools.checks._catalogue import EXPECTATIONS, CatalogueEdit, judge, read_catalogue, write_trees
from tools.checks._tree import ROOT

PAGE = ROOT / "docs" / "api-side-by-side.md"
_TABLE = re.compile(r"(<!-- table -->\n).*?(<!-- end -->)", re.DOTALL)
_EXEMPT = ("internal_api", "deprecated", "experimental_api")
_SYMBOL = re.compile(r"\+ (?:([a-zA-Z]\w+)\s=\s.+|def\s([a-zA-Z]\w+)|class\s([a-zA-Z]\w+))")


def ours(edits: Sequence[CatalogueEdit]) -> set[str]:
    """Edits in which the gate of this repository finds a break."""
    return {
        name
        for name, findings in judge(edits).items()
        if max((finding.bump for finding in findings if finding.counts), default=Bump.NONE) >= Bump.BREAK
    }


def griffe_check(edits: Sequence[CatalogueEdit]) -> set[str]:
    """Edits for which `griffe check` would fail."""
    return _griffe(edits, lambda breakage, new: True)


def megatron(edits: Sequence[CatalogueEdit]) -> set[str]:
    """Griffe without values of attributes, moved parameters of constructors, and whatever the new tree marks."""
    return _griffe(edits, _counts_for_megatron)


def _counts_for_megatron(breakage: griffe.Breakage, new: griffe.Module) -> bool:
    if breakage.kind is griffe.BreakageKind.ATTRIBUTE_CHANGED_VALUE:
        return False
    if breakage.kind is griffe.BreakageKind.PARAMETER_MOVED and ".__init__" in breakage.obj.path:
        return False
    node: griffe.Object | griffe.Alias | None = None
    parts = breakage.obj.path.split(".")[1:]
    for length in range(len(parts), 0, -1):
        try:
            node = new[".".join(parts[:length])]
        except KeyError:
            continue
        if any(word in str(decorator.value) for decorator in getattr(node, "decorators", ()) for word in _EXEMPT):
            return False
    return True


def _griffe(edits: Sequence[CatalogueEdit], counts: Callable[[griffe.Breakage, griffe.Module], bool]) -> set[str]:
    caught = set()
    with tempfile.TemporaryDirectory() as folder:
        loaded = [griffe.load("catalogue", search_paths=[root], allow_inspection=False) for root in write_trees(edits, Path(folder))]
        old, new = (tree for tree in loaded if isinstance(tree, griffe.Module))
        for edit in edits:
            # One package at a time: an alias that griffe cannot resolve ends its walk.
            breakages = []
            try:
                for breakage in griffe.find_breaking_changes(old[edit.package], new[edit.package]):
                    breakages.append(breakage)
            except griffe.AliasResolutionError:
                pass
            if any(counts(breakage, new) for breakage in breakages):
                caught.add(edit.name)
    return caught


def opentelemetry(edits: Sequence[CatalogueEdit]) -> set[str]:
    """Edits whose diff adds a public symbol; the script asks for a review of those and looks at nothing else."""
    caught = set()
    for edit in edits:
        files = {"__init__.py": (edit.old, edit.new)}
        files |= {name: (edit.old_files.get(name, ""), text) for name, text in edit.new_files.items()}
        if any(_SYMBOL.match(line) for old, new in files.values() for line in ndiff(old.splitlines(), new.splitlines())):
            caught.add(edit.name)
    return caught


GATES: Mapping[str, Callable[[Sequence[CatalogueEdit]], set[str]]] = {
    "this repository": ours,
    "griffe check": griffe_check,
    "Megatron-LM": megatron,
    "OpenTelemetry": opentelemetry,
}


def table() -> str:
    """Breaking edits found and false alarms, by topic and gate."""
    edits = read_catalogue()
    flagged = {name: gate(edits) for name, gate in GATES.items()}
    lines = [f"| topic | breaking edits | {' | '.join(GATES)} |", "|---|---:|" + "---:|" * len(GATES)]
    topics = {topic: [edit for edit in edits if edit.topic == topic] for topic in sorted({edit.topic for edit in edits})}
    for topic, members in [*topics.items(), ("all", edits)]:
        breaking = {edit.name for edit in members if EXPECTATIONS[edit.expect] >= Bump.BREAK}
        cells = [str(len(flagged[name] & breaking)) for name in GATES]
        lines.append(f"| {topic} | {len(breaking)} | {' | '.join(cells)} |")
    harmless = {edit.name for edit in edits if EXPECTATIONS[edit.expect] < Bump.BREAK}
    cells = [str(len(flagged[name] & harmless)) for name in GATES]
    lines.append(f"| flagged among {len(harmless)} that break nobody | | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    text = table()
    if options.write:
        PAGE.write_text(_TABLE.sub(lambda match: f"{match[1]}{text}{match[2]}", PAGE.read_text()))
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
