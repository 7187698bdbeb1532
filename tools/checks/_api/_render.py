# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A report as text, GitHub annotations, Markdown, JSON or SARIF."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tools.checks._api._finding import KINDS, Bump, Finding
from tools.checks._api._verdict import Report

_ASKS = {Bump.NONE: "nothing", Bump.ADDITION: "addition", Bump.BREAK: "break", Bump.NEVER: "never"}


def text(reports: Sequence[Report]) -> str:
    lines = []
    for report in reports:
        for finding in report.findings:
            what = "exempt" if finding.exempt else _ASKS[finding.bump]
            note = f"  [{finding.exempt}]" if finding.exempt else ""
            lines.append(f"  {what:9}{finding.kind:26}{finding.path}: {finding.text}{note}")
            lines += [f"{'':35}| {line}" for line in finding.detail.splitlines()]
        lines.append(f"{report.headline}  ({report.names[0]} -> {report.names[1]} public paths, {report.seconds:.1f} s)")
    return "\n".join(lines)


def additions(reports: Sequence[Report]) -> str:
    """What is new, one line each: a name that is out once has to be kept, so it is reviewed before."""
    lines = []
    for report in reports:
        new = [finding for finding in report.findings if finding.bump is Bump.ADDITION and finding.counts]
        lines.append(f"{report.name} {report.old_version} -> {report.new_version}: {len(new)} additions")
        lines += [f"  {finding.kind:26}{finding.path}" + (f": {finding.text}" if finding.text != "new" else "") for finding in new]
    return "\n".join(lines)


def github(reports: Sequence[Report]) -> str:
    lines = []
    for report in reports:
        for finding in report.findings:
            if finding.counts and (finding.bump >= Bump.BREAK or finding.bump > report.given):
                level = "notice" if report.passed else "error"
                place = f"file={_property(report.file_of(finding))},line={finding.line},title={_property(finding.kind)}"
                lines.append(f"::{level} {place}::{_message(f'{finding.path}: {finding.text}')}")
        lines.append(f"::{'notice' if report.passed else 'error'} title=api::{_message(report.headline)}")
    return "\n".join(lines)


def _message(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _message(value).replace(":", "%3A").replace(",", "%2C")


def markdown(reports: Sequence[Report]) -> str:
    lines = []
    for report in reports:
        lines += [f"### {report.headline}", ""]
        shown = [finding for finding in report.findings if finding.bump > Bump.NONE]
        if shown:
            lines += ["| asks for | kind | name | what | exempt |", "|---|---|---|---|---|"]
            for finding in shown:
                cells = (_ASKS[finding.bump], finding.kind, f"`{finding.path}`", finding.text, finding.exempt)
                lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
            lines.append("")
        for finding in shown:
            if finding.detail and finding.kind == "surface_stale":
                lines += [
                    f"<details><summary>{finding.path}</summary>",
                    "",
                    "~~~diff",
                    finding.detail.rstrip("\n"),
                    "~~~",
                    "",
                    "</details>",
                    "",
                ]
    return "\n".join(lines)


def as_json(reports: Sequence[Report]) -> str:
    return json.dumps([_record(report) for report in reports], indent=1)


def _record(report: Report) -> dict[str, Any]:
    return {
        "wheel": report.name,
        "old_version": str(report.old_version) if report.old_version is not None else None,
        "new_version": str(report.new_version),
        "baseline": report.baseline,
        "demanded": _ASKS[report.demanded],
        "given": _ASKS[report.given],
        "passed": report.passed,
        "headline": report.headline,
        "seconds": round(report.seconds, 3),
        "public_paths": list(report.names),
        "findings": [_finding_record(report, finding) for finding in report.findings],
    }


def _finding_record(report: Report, finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "path": finding.path,
        "asks": _ASKS[finding.bump],
        "text": finding.text,
        "detail": finding.detail,
        "file": report.file_of(finding),
        "line": finding.line,
        "exempt": finding.exempt,
    }


def sarif(reports: Sequence[Report]) -> str:
    kinds = sorted({finding.kind for report in reports for finding in report.findings})
    rules = [{"id": kind, "shortDescription": {"text": KINDS[kind][1]}} for kind in kinds]
    driver = {"name": "mcore-api", "rules": rules}
    results = [_result(report, finding) for report in reports for finding in report.findings]
    run = {"tool": {"driver": driver}, "results": results}
    return json.dumps({"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}, indent=1)


def _result(report: Report, finding: Finding) -> dict[str, Any]:
    if finding.exempt or finding.bump < Bump.BREAK:
        level = "note"
    else:
        level = "warning" if report.passed else "error"
    result: dict[str, Any] = {
        "ruleId": finding.kind,
        "level": level,
        "message": {"text": f"{finding.path}: {finding.text}"},
        "partialFingerprints": {"api/v1": f"{report.name}:{finding.kind}:{finding.path}"},
    }
    if file := report.file_of(finding):
        where: dict[str, Any] = {"artifactLocation": {"uri": file}, "region": {"startLine": max(1, finding.line)}}
        result["locations"] = [{"physicalLocation": where}]
    if finding.exempt:
        accepted = finding.exempt.startswith("accepted")
        result["suppressions"] = [{"kind": "external" if accepted else "inSource", "justification": finding.exempt}]
    return result


FORMATS: dict[str, Callable[[Sequence[Report]], str]] = {
    "text": text,
    "github": github,
    "markdown": markdown,
    "json": as_json,
    "sarif": sarif,
}
