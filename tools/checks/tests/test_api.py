# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The API gate on single edits of a small wheel: each edit has one verdict."""

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from packaging.version import Version

from tools.checks._api import Bump, Checker, CheckError, Finding, Report, Surface, compare_surfaces, load
from tools.checks._api._policy import clock_findings, shape_findings

FIXTURE = Path(__file__).with_name("fixture_wheel") / "src"
FUNCTIONS, SHAPES, TOP = "sample/_functions.py", "sample/_shapes.py", "sample/__init__.py"


@dataclass(frozen=True)
class Edit:
    """One change of one file; ``before`` must occur in it."""

    file: str
    before: str
    after: str

    def apply(self, source: Path) -> None:
        path = source / self.file
        text = path.read_text()
        assert text.count(self.before) == 1, f"{self.before!r} occurs {text.count(self.before)} times in {self.file}"
        path.write_text(text.replace(self.before, self.after))


@cache
def released() -> Surface:
    return load("sample", FIXTURE)


def edited(folder: Path, *edits: Edit) -> Path:
    source = folder / "src"
    shutil.copytree(FIXTURE, source)
    for edit in edits:
        edit.apply(source)
    return source


def findings_after(folder: Path, *edits: Edit, version: str = "0.1.1", old: Surface | None = None) -> list[Finding]:
    new = load("sample", edited(folder, *edits))
    return compare_surfaces(old or released(), new, Version("0.1.0"), Version(version))


def verdict(findings: list[Finding], version: str, *, strict: bool = False) -> bool:
    versions = {"old_version": Version("0.1.0"), "new_version": Version(version)}
    return Report(name="sample", baseline="", findings=findings, strict=strict, **versions).passed


def counted(findings: list[Finding], at_least: Bump) -> set[tuple[str, str]]:
    return {(finding.kind, finding.path) for finding in findings if finding.counts and finding.bump >= at_least}


SCALE = "def scale(values: Sequence[int], factor: int, offset: int = 0, *, strict: bool = True) -> list[int]:"


def scale(signature: str) -> list[Edit]:
    return [Edit(FUNCTIONS, SCALE, f"def scale{signature}:")]


def function(before: str, after: str) -> list[Edit]:
    return [Edit(FUNCTIONS, before, after)]


def shape(before: str, after: str) -> list[Edit]:
    return [Edit(SHAPES, before, after)]


def without_name(name: str) -> list[Edit]:
    return [Edit(TOP, f"    {name},\n", ""), Edit(TOP, f'    "{name}",\n', "")]


def test_a_break_asks_for_a_breaking_version_and_of_a_wheel_here_for_a_deprecation_too(tmp_path):
    findings = findings_after(tmp_path, *function("def bare(x, y=1):\n    return x + y", "def bare(x):\n    return x"))
    assert counted(findings, Bump.BREAK) == {("parameter_removed", "sample.bare(y)")}
    assert [verdict(findings, version) for version in ("0.1.0", "0.1.1", "0.2.0")] == [False, False, True]
    assert not verdict(findings, "0.2.0", strict=True) and not verdict(findings, "1.0.0", strict=True)
    assert findings[0].file == "sample/_functions.py" and findings[0].line > 1


ADDITIONS = {
    "parameter with a default added": (
        scale("(values: Sequence[int], factor: int, offset: int = 0, *, strict: bool = True, unit: str = '') -> list[int]"),
        ("parameter_added", "sample.scale(unit)"),
    ),
    "default changed": (
        scale("(values: Sequence[int], factor: int, offset: int = 1, *, strict: bool = True) -> list[int]"),
        ("parameter_default_changed", "sample.scale(offset)"),
    ),
    "function added": (
        [
            Edit("sample/deep/tools.py", '"polish", "sand"', '"polish", "sand", "wax"'),
            Edit("sample/deep/tools.py", "LIMIT: int = 3", "LIMIT: int = 3\n\n\ndef wax() -> None: ..."),
        ],
        ("name_added", "sample.deep.tools.wax"),
    ),
    "method added": (
        shape("class Empty:\n    pass", "class Empty:\n    def fill(self) -> None: ..."),
        ("member_added", "sample.Empty.fill"),
    ),
    "enum member added": (
        shape('    BLUE = "blue"\n', '    BLUE = "blue"\n    GREEN = "green"\n'),
        ("enum_member_added", "sample.Colour.GREEN"),
    ),
    "name deprecated": (
        [
            Edit(FUNCTIONS, "def bare(x, y=1):", '@deprecated("0.1.1", "0.3.0", "scale")\ndef bare(x, y=1):'),
        ],
        ("deprecated_added", "sample.bare"),
    ),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_an_addition_asks_for_an_adding_version(name, tmp_path):
    edits, expected = ADDITIONS[name]
    findings = findings_after(tmp_path, *edits)
    assert counted(findings, Bump.NONE) == {expected}
    assert not verdict(findings, "0.1.0") and verdict(findings, "0.1.1") and verdict(findings, "0.2.0")


def test_a_private_module_may_be_renamed_when_the_public_names_stay(tmp_path):
    source = edited(tmp_path)
    (source / FUNCTIONS).rename(source / "sample/_other.py")
    top = source / TOP
    top.write_text(top.read_text().replace("sample._functions", "sample._other"))
    findings = compare_surfaces(released(), load("sample", source), Version("0.1.0"), Version("0.1.0"))
    assert findings == []


def test_a_type_of_another_library_may_come_by_another_import(tmp_path):
    folders = []
    for name, line in (("a", "from sample._shapes import OrderedDict as Kept"), ("b", "from collections import OrderedDict as Kept")):
        annotate = Edit(FUNCTIONS, "def untyped_rows(count):", "def untyped_rows(count: Kept[str, int]):")
        folders.append(edited(tmp_path / name, annotate, Edit(FUNCTIONS, "from contextlib", f"{line}\nfrom contextlib")))
    old, new = (load("sample", folder) for folder in folders)
    checker = Checker()
    assert compare_surfaces(old, new, Version("0.1.0"), Version("0.1.0"), checker=checker) == []
    assert checker.runs == 0


def test_unchanged_trees_never_start_the_type_checker(tmp_path):
    checker = Checker()
    new = load("sample", edited(tmp_path))
    assert compare_surfaces(released(), new, Version("0.1.0"), Version("0.1.0"), checker=checker) == []
    assert checker.runs == 0


REMOVE_OLD_SCALE = [
    *without_name("old_scale"),
    Edit(
        FUNCTIONS,
        '@deprecated(version="0.1.0", removal_version="0.3.0", alternative="sample.scale")\n@pep702_deprecated("use sample.scale")\n'
        "def old_scale(values: Sequence[int]) -> list[int]:\n    return list(values)\n",
        "",
    ),
]


@pytest.mark.parametrize(
    ("version", "early"), [("0.1.1", True), ("0.2.0", True), ("0.3.0.dev1", False), ("0.3.0", False), ("0.4.0", False)]
)
def test_a_deprecated_name_goes_at_its_removal_version(version, early, tmp_path):
    findings = [f for f in findings_after(tmp_path, *REMOVE_OLD_SCALE, version=version) if f.path == "sample.old_scale"]
    assert [(finding.kind, finding.counts) for finding in findings] == [("removed_too_early", True) if early else ("name_removed", False)]
    assert verdict(findings, version) is not early


def test_a_member_of_a_deprecated_class_keeps_the_promise_of_its_class(tmp_path):
    edits = shape("    def flatten(self, x: int) -> int:\n        return x\n", "    pass\n")
    assert counted(findings_after(tmp_path, *edits, version="0.2.0"), Bump.NEVER) == {("removed_too_early", "sample.Ellipse.flatten")}


def test_an_unmarked_removal_in_the_same_commit_is_not_excused_by_a_new_deprecation(tmp_path):
    edits = function("def bare(x, y=1):\n    return x + y", '@deprecated("0.1.0", "0.3.0")\ndef bare(x):\n    return x')
    assert ("parameter_removed", "sample.bare(y)") in counted(findings_after(tmp_path, *edits), Bump.BREAK)


def clock(source: Path, version: str) -> set[tuple[str, str]]:
    return {(finding.kind, finding.path) for finding in clock_findings(load("sample", source), Version(version))}


def test_a_deprecated_name_that_outlives_its_promise_is_overdue(tmp_path):
    assert clock(FIXTURE, "0.2.9") == set()
    assert clock(FIXTURE, "0.3.0") == {("removal_overdue", "sample.old_scale"), ("removal_overdue", "sample.Ellipse")}


@pytest.mark.parametrize(
    ("decorator", "kind"),
    [
        ('@deprecated("0.1.0", "0.2.0")', "deprecation_too_short"),
        ('@deprecated("0.1.0", REMOVAL)', "deprecation_incomplete"),
        ('@deprecated("0.1.0")', "deprecation_incomplete"),
        ('@deprecated("0.1.0", "0.3.0", "sample.nothing")', "alternative_unknown"),
        ('@deprecated("0.1.0", "0.3.0", "nothing")', "alternative_unknown"),
        ('@deprecated("0.1.0", "0.3.0", "your own loop")', ""),
        ('@deprecated("0.1.0", "0.3.0", "Circle.area")', ""),
        ('@deprecated("0.1.0", "1.0.0")', ""),
    ],
)
def test_a_deprecation_says_since_when_until_when_and_what_instead(decorator, kind, tmp_path):
    source = edited(tmp_path, *function("def bare(x, y=1):", f"{decorator}\n@pep702_deprecated('x')\ndef bare(x, y=1):"))
    assert clock(source, "0.1.0") == ({(kind, "sample.bare")} if kind else set())


def test_configurations_are_keyword_only_and_modules_say_what_they_export(tmp_path):
    source = edited(
        tmp_path,
        *shape("@dataclass(kw_only=True)\nclass DrawConfig", "@dataclass(frozen=True)\nclass DrawConfig"),
        Edit("sample/deep/tools.py", '__all__ = ["LIMIT", "polish", "sand"]\n', ""),
    )
    found = {(finding.kind, finding.path) for finding in shape_findings(load("sample", source))}
    assert found == {("config_not_keyword_only", "sample.DrawConfig"), ("all_missing", "sample.deep.tools")}
    assert not list(shape_findings(released()))


def test_a_name_that_hides_a_submodule_is_refused(tmp_path):
    source = edited(tmp_path, Edit("sample/deep/__init__.py", "import polish", "import polish, sand as tools"))
    init = source / "sample/deep/__init__.py"
    init.write_text(init.read_text().replace('"polish"]', '"polish", "tools"]'))
    assert {(finding.kind, finding.path) for finding in shape_findings(load("sample", source))} == {("name_shadowed", "sample.deep.tools")}


def test_a_type_of_a_library_that_is_not_installed_is_not_waved_through(tmp_path):
    folders = []
    for name, kind in (("a", "Sheet"), ("b", "Scroll")):
        edit = function("def bare(x, y=1):\n    return x + y", f"def bare(x: absent_library.{kind}):\n    return x")
        folders.append(edited(tmp_path / name, edit[0], Edit(FUNCTIONS, "from contextlib", "import absent_library\nfrom contextlib")))
    old, new = (load("sample", folder) for folder in folders)
    findings = compare_surfaces(old, new, Version("0.1.0"), Version("0.1.1"))
    assert counted(findings, Bump.BREAK) == {("parameter_type_changed", "sample.bare(x)")}
    assert "could not judge" in findings[0].text


def test_without_a_type_checker_changed_types_stop_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CheckError, match="no type checker is installed"):
        findings_after(tmp_path, *shape("def label(self) -> str:", "def label(self) -> bytes:"))


def test_a_file_that_does_not_parse_stops_the_check(tmp_path):
    source = edited(tmp_path)
    (source / "sample/deep/tools.py").write_text("def broken(:\n")
    with pytest.raises(CheckError, match=r"tools\.py line 1 cannot be parsed"):
        load("sample", source)


def test_a_change_reachable_by_two_paths_is_reported_once_under_the_shorter(tmp_path):
    edit = Edit("sample/deep/tools.py", "def polish(x: int) -> int:", "def polish(x: int, y: int) -> int:")
    assert counted(findings_after(tmp_path, edit), Bump.BREAK) == {("parameter_added_required", "sample.deep.polish(y)")}
