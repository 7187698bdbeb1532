# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The table of families in the documentation, made of the references and the errors that were measured."""

import json
import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from mcore_ckpt.hf._families import NOT_COVERED
from tests.parity.references import REFERENCES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "docs" / "benchmarks" / "parity.json"
_BEGIN, _END = "<!-- families: made by `nox -s parity -- --write-table` -->", "<!-- end of families -->"

Results = Mapping[str, Mapping[str, Mapping[str, float]]]


def commands(source: str, ignored: Sequence[str] = ()) -> tuple[str, str]:
    """How the model in a folder comes in, without entries of its config.json, and how it goes out again."""
    checkpoint = f"checkpoints/{source}"
    options = "".join(f" --ignore {entry}" for entry in ignored)
    return f"mcore-ckpt import-hf {source} {checkpoint}{options}", f"mcore-ckpt export-hf {checkpoint} {source}-out"


def write_results(results: Results) -> None:
    """The measured errors, with the versions that they were measured with, and the page from them.

    Raises:
        ValueError: not all references in all of their layouts were measured.
    """
    missing = [f"{name} in {layout}" for name, one in REFERENCES.items() for layout in one.layouts if layout not in results.get(name, {})]
    if missing:
        raise ValueError(f"--write-table: not measured: {', '.join(missing)}; run the whole of `nox -s parity`")
    facts = {
        "command": "nox -s parity -- --write-table",
        "machine": {"gpu": None, "cpu": platform.processor() or platform.machine(), "system": platform.system()},
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in ("torch", "transformers")}},
    }
    rounded = {
        name: {layout: {kind: float(f"{error:.1e}") for kind, error in results[name][layout].items()} for layout in one.layouts}
        for name, one in REFERENCES.items()
    }
    RESULTS.write_text(json.dumps({**facts, "results": rounded}, indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), render(rounded)))


def read_results() -> Results:
    """The committed errors."""
    return json.loads(RESULTS.read_text())["results"]


def with_table(page: str, table: str) -> str:
    """The page with ``table`` between its marks."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{table}\n{_END}{after}"


def render(results: Results) -> str:
    """Markdown: a row for each family that is shown, then what is tested beside, then what is not covered."""
    lines = [
        "| model | family | layouts compared | logits | gradients | conversion |",
        "|---|---|---|---:|---:|---|",
    ]
    for name, one in REFERENCES.items():
        if one.shown:
            logits, gradients = (_worst(results[name], kind) for kind in ("logits", "gradients"))
            command = commands(one.published, one.ignored)[0]
            lines.append(f"| {one.title} | `{one.family}` | {', '.join(one.layouts)} | {logits} | {gradients} | `{command}` |")
    notes: dict[str, list[str]] = {}
    for one in REFERENCES.values():
        if one.shown and one.note:
            notes.setdefault(one.note, []).append(f"`{one.family}`")
    lines += ["", *(f"{', '.join(families)}: {note}." for note, families in notes.items())]
    variants = "; ".join(one.title for one in REFERENCES.values() if not one.shown)
    lines += ["", f"Compared in the same way, without a row: {variants}.", "", "Not covered, and refused by name:", ""]
    lines += [f"- `{kind}`: {why}" for kind, why in NOT_COVERED.items()]
    return "\n".join(lines) + "\n"


def _worst(layouts: Mapping[str, Mapping[str, float]], kind: str) -> str:
    """The largest error over the layouts, rounded up to one digit: a table that changes only when something did."""
    error = max(one[kind] for one in layouts.values())
    if error == 0.0:
        return "0"
    exponent = math.floor(math.log10(error))
    return f"{math.ceil(round(error / 10.0**exponent, 6)):d}e{exponent:+03d}"
