# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Witnesses: small programs that a consumer could have written, put before a type checker with the old tree and with the new one.

A suspicion about types becomes a finding only when its program passes on the old tree and fails on the new one. So variance, overloads,
generics and inheritance are judged by the type checker and need no rules here. A program that cannot be judged (a library is missing,
or it did not even pass on the old tree) leaves the suspicion standing.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tools.checks._api._finding import CheckError, Finding
from tools.checks._api._surface import Surface

_DIAGNOSTIC = re.compile(r"^w(?P<number>\d+)\.py:\d+:\d+: (?P<severity>error|fatal)\[(?P<rule>[\w-]+)\] (?P<message>.*)$")


@dataclass(frozen=True, kw_only=True)
class Program:
    """Source of one witness, without its imports."""

    code: str
    imports: frozenset[str] = frozenset()
    variables: frozenset[str] = frozenset()

    @property
    def source(self) -> str:
        modules = sorted((self.imports | {"typing"}) - {""})
        return "\n".join([*(f"import {module}" for module in modules), "", *sorted(self.variables), "", self.code, ""])


@dataclass(frozen=True, kw_only=True)
class Suspicion:
    """A finding that the type checker may dismiss.

    Args:
        finding: what is reported if it stands.
        before: program for the old tree; None if nothing can be checked there.
        after: program for the new tree; None if the suspicion cannot be checked and stands.
        otherwise: whether it stands when the programs cannot be judged.
        absence: ``after`` passes where the break is there, not where it is not.
    """

    finding: Finding
    before: Program | None
    after: Program | None
    otherwise: bool = True
    absence: bool = False


@dataclass(kw_only=True)
class Checker:
    """Runs the type checker; one run per tree however many programs there are.

    Args:
        extra: folders with further packages that annotations may name.
    """

    extra: Sequence[Path] = ()
    runs: int = field(default=0, init=False)

    def judge(self, suspicions: Sequence[Suspicion], old: Surface, new: Surface) -> list[Finding]:
        """The findings that stand."""
        before = self._check([suspicion.before for suspicion in suspicions], old)
        after = self._check([suspicion.after for suspicion in suspicions], new)
        standing = []
        for suspicion, was, now in zip(suspicions, before, after, strict=True):
            finding = suspicion.finding
            if suspicion.after is None:
                standing.append(finding)
            elif was.undecided or now.undecided or (suspicion.before is not None and not was.passed):
                if suspicion.otherwise:
                    standing.append(replace(finding, text=f"{finding.text} (the type checker could not judge it)"))
            elif now.passed is suspicion.absence:
                standing.append(replace(finding, detail=now.message if not suspicion.absence else ""))
        return standing

    def _check(self, programs: Sequence[Program | None], surface: Surface) -> list["_Outcome"]:
        outcomes = [_Outcome() for _ in programs]
        numbered = [(number, program) for number, program in enumerate(programs) if program is not None]
        if not numbered:
            return outcomes
        with tempfile.TemporaryDirectory() as folder:
            for number, program in numbered:
                Path(folder, f"w{number}.py").write_text(program.source)
            for line in self._run(Path(folder), [surface.root, *self.extra]):
                if match := _DIAGNOSTIC.match(line):
                    outcome = outcomes[int(match["number"])]
                    undecided = match["severity"] == "fatal" or match["rule"] in ("unresolved-import", "import-not-found", "invalid-syntax")
                    outcome.undecided |= undecided
                    outcome.passed = False
                    outcome.message = outcome.message or match["message"]
        return outcomes

    def _run(self, folder: Path, roots: Iterable[Path]) -> list[str]:
        self.runs += 1
        Path(folder, "ty.toml").write_text("")  # keeps settings of folders above out
        command = [_executable(), "check", "--project", ".", "--python", sys.prefix, "--output-format", "concise", "--color", "never"]
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        command += ["--no-progress", "--python-version", version]
        command += [argument for root in roots for argument in ("--extra-search-path", str(Path(root).resolve()))]
        done = subprocess.run([*command, "."], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise CheckError(f"the type checker failed with status {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
        return done.stdout.splitlines()


@dataclass
class _Outcome:
    passed: bool = True
    undecided: bool = False
    message: str = ""


def _executable() -> str:
    beside = Path(sys.executable).with_name("ty")
    if beside.is_file():
        return str(beside)
    found = shutil.which("ty")
    if found is None:
        raise CheckError("types changed and no type checker is installed to judge them; install the dependency group 'api' (it brings ty)")
    return found
