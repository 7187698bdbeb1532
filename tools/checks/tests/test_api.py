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


def verdict(findings: list[Finding], version: str) -> bool:
    return Report(name="sample", old_version=Version("0.1.0"), new_version=Version(version), baseline="", findings=findings).passed


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


BREAKS = {
    # parameters
    "parameter removed": (
        scale("(values: Sequence[int], factor: int, *, strict: bool = True) -> list[int]"),
        {("parameter_removed", "sample.scale(offset)")},
    ),
    "parameter added without default": (
        scale("(values: Sequence[int], factor: int, offset: int = 0, *, strict: bool = True, unit: str) -> list[int]"),
        {("parameter_added_required", "sample.scale(unit)")},
    ),
    "positional parameter added without default in the middle": (
        scale("(values: Sequence[int], unit: str, factor: int, offset: int = 0, *, strict: bool = True) -> list[int]"),
        {("parameter_added_required", "sample.scale(unit)")},
    ),
    "parameter with default added in the middle": (
        scale("(values: Sequence[int], factor: int, extra: int = 1, offset: int = 0, *, strict: bool = True) -> list[int]"),
        {("parameter_reordered", "sample.scale")},
    ),
    "parameters reordered": (
        scale("(factor: int, values: Sequence[int], offset: int = 0, *, strict: bool = True) -> list[int]"),
        {("parameter_reordered", "sample.scale")},
    ),
    "parameter renamed": (
        scale("(values: Sequence[int], times: int, offset: int = 0, *, strict: bool = True) -> list[int]"),
        {("parameter_removed", "sample.scale(factor)"), ("parameter_added_required", "sample.scale(times)")},
    ),
    "parameter made required": (
        scale("(values: Sequence[int], factor: int, offset: int, *, strict: bool = True) -> list[int]"),
        {("parameter_now_required", "sample.scale(offset)")},
    ),
    "parameter made keyword-only": (
        scale("(values: Sequence[int], factor: int, *, offset: int = 0, strict: bool = True) -> list[int]"),
        {("parameter_kind_changed", "sample.scale(offset)")},
    ),
    "parameter made positional-only": (
        scale("(values: Sequence[int], /, factor: int, offset: int = 0, *, strict: bool = True) -> list[int]"),
        {("parameter_kind_changed", "sample.scale(values)")},
    ),
    "variadic arguments removed": (
        function("def spread(*values: int, **options: str)", "def spread(**options: str)"),
        {("parameter_removed", "sample.spread(values)")},
    ),
    "parameter of a method removed": (
        shape("def area(self, radius: float, *, precise: bool = False)", "def area(self, radius: float)"),
        {("parameter_removed", "sample.Circle.area(precise)")},
    ),
    "parameter of an inherited constructor removed": (
        shape(
            'def __init__(self, name: str = "base") -> None:\n        self.name = name',
            'def __init__(self) -> None:\n        self.name = "base"',
        ),
        {("parameter_removed", "sample.Base(name)")},
    ),
    "constructor that needs an argument added": (
        shape("class Empty:\n    pass", "class Empty:\n    def __init__(self, x: int) -> None: ..."),
        {("parameter_added_required", "sample.Empty(x)")},
    ),
    # names
    "function removed": (
        [*without_name("bare"), Edit(FUNCTIONS, "def bare(x, y=1):\n    return x + y\n", "")],
        {("name_removed", "sample.bare")},
    ),
    "class removed": (
        [*without_name("Empty"), Edit(SHAPES, "class Empty:\n    pass\n", "")],
        {("name_removed", "sample.Empty")},
    ),
    "method removed": (
        shape("    def describe(self) -> str:\n        return self.name\n", ""),
        {("member_removed", "sample.Base.describe")},
    ),
    "class attribute removed": (shape("    sides: int = 0\n", ""), {("member_removed", "sample.Circle.sides")}),
    "instance attribute removed": (
        [*shape("        self.name = name\n", "        pass\n")],
        {("member_removed", "sample.Base.name")},
    ),
    "property removed": (
        shape("    @property\n    def label(self) -> str:\n        return self.name\n", ""),
        {("member_removed", "sample.Circle.label")},
    ),
    "method replaced by an attribute": (
        shape("    def stop(self) -> None:\n        raise NotImplementedError", "    stop: bool = True"),
        {("kind_changed", "sample.Plugin.stop")},
    ),
    "enum member removed": (shape('    BLUE = "blue"\n', ""), {("enum_member_removed", "sample.Colour.BLUE")}),
    "enum value changed": (shape('BLUE = "blue"', 'BLUE = "navy"'), {("enum_value_changed", "sample.Colour.BLUE")}),
    "name moved without a re-export": (
        [
            Edit("sample/deep/tools.py", "def sand(x: int) -> int:\n    return x\n", ""),
            Edit("sample/deep/tools.py", '"polish", "sand"', '"polish"'),
            Edit(
                "sample/deep/__init__.py",
                '__all__ = ["Circle", "polish"]',
                '__all__ = ["Circle", "polish", "sand"]\n\n\ndef sand(x: int) -> int:\n    return x\n',
            ),
        ],
        {("name_moved", "sample.deep.tools.sand")},
    ),
    "one of two re-exports removed": (
        [Edit("sample/deep/__init__.py", "from sample._shapes import Circle\n", ""), Edit("sample/deep/__init__.py", '"Circle", ', "")],
        {("name_moved", "sample.deep.Circle")},
    ),
    "re-exported from a private module and removed there": (
        function("def bare(x, y=1):\n    return x + y\n", ""),
        {("name_removed", "sample.bare"), ("export_unresolved", "sample.bare")},
    ),
    "name dropped from __all__": ([Edit(TOP, '    "bare",\n', "")], {("name_unlisted", "sample.bare")}),
    # classes
    "base class removed": (
        shape("class Circle(Base):", "class Circle:"),
        {
            ("base_removed", "sample.Circle"),
            ("parameter_removed", "sample.Circle(name)"),
            ("member_removed", "sample.Circle.describe"),
            ("member_removed", "sample.Circle.name"),
        },
    ),
    "base class replaced": (
        shape("class Circle(Base):", "class Circle(Exception):"),
        {
            ("base_removed", "sample.Circle"),
            ("member_removed", "sample.Circle.__init__"),
            ("member_removed", "sample.Circle.describe"),
            ("member_removed", "sample.Circle.name"),
        },
    ),
    "base class of another package replaced": (
        [
            Edit(SHAPES, "class Table(OrderedDict[str, int]):", "class Table(UserDict[str, int]):"),
            Edit(SHAPES, "import OrderedDict", "import UserDict"),
        ],
        {("base_removed", "sample.Table")},
    ),
    "abstract method added": (
        shape("    def stop(self) -> None:", "    @abstractmethod\n    def pause(self) -> None: ...\n\n    def stop(self) -> None:"),
        {("abstract_member_added", "sample.Plugin.pause")},
    ),
    "method made abstract": (
        shape("    def stop(self) -> None:", "    @abstractmethod\n    def stop(self) -> None:"),
        {("abstract_member_added", "sample.Plugin.stop")},
    ),
    "protocol member added": (
        shape(
            "    def draw(self, canvas: str) -> int: ...", "    def draw(self, canvas: str) -> int: ...\n    def erase(self) -> None: ..."
        ),
        {("protocol_member_added", "sample.Drawable.erase")},
    ),
    "optional parameter added to a protocol's method": (
        shape("def draw(self, canvas: str) -> int: ...", "def draw(self, canvas: str, colour: str = ...) -> int: ..."),
        {("implementer_broken", "sample.Drawable.draw")},
    ),
    "parameter of an abstract method widened": (
        shape("def run(self, task: str) -> int: ...", "def run(self, task: str | bytes) -> int: ..."),
        {("implementer_broken", "sample.Plugin.run")},
    ),
    "attribute of a protocol retyped": (
        shape("    size: int\n\n    def draw", "    size: str\n\n    def draw"),
        {("attribute_type_changed", "sample.Drawable.size"), ("implementer_broken", "sample.Drawable.size")},
    ),
    "dataclass frozen": (
        shape("@dataclass\nclass Point", "@dataclass(frozen=True)\nclass Point"),
        {("class_frozen", "sample.Point"), ("attribute_read_only", "sample.Point.x"), ("attribute_read_only", "sample.Point.y")},
    ),
    "dataclass fields reordered": (
        shape("    x: int\n    y: int = 0", "    y: int\n    x: int = 0"),
        {("parameter_reordered", "sample.Point"), ("parameter_now_required", "sample.Point(y)")},
    ),
    "class made final": (
        [Edit(SHAPES, "class Empty:", "@final\nclass Empty:"), Edit(SHAPES, "import ClassVar,", "import final, ClassVar,")],
        {("class_final", "sample.Empty")},
    ),
    "fields of a named tuple reordered": (
        shape('    left: int\n    right: str = ""', "    right: str\n    left: int = 0"),
        {("fields_reordered", "sample.Pair")},
    ),
    "typed dictionary needs its keys": (shape("(TypedDict, total=False)", "(TypedDict)"), {("key_now_required", "sample.Options[depth]")}),
    "setter removed": (
        shape("    @weight.setter\n    def weight(self, value: float) -> None:\n        pass\n", ""),
        {("attribute_read_only", "sample.Circle.weight")},
    ),
    "static method made a method": (
        shape("    @staticmethod\n    def count(items: list[int]) -> int:", "    def count(self, items: list[int]) -> int:"),
        {("binding_changed", "sample.Circle.count"), ("parameter_added_required", "sample.Circle.count(self)")},
    ),
    # types and nature
    "return type changed": (
        scale("(values: Sequence[int], factor: int, offset: int = 0, *, strict: bool = True) -> tuple[int, ...]"),
        {("return_type_changed", "sample.scale")},
    ),
    "return type widened": (
        scale("(values: Sequence[int], factor: int, offset: int = 0, *, strict: bool = True) -> list[int] | None"),
        {("return_type_changed", "sample.scale")},
    ),
    "return annotation removed": (
        scale("(values: Sequence[int], factor: int, offset: int = 0, *, strict: bool = True)"),
        {("return_type_changed", "sample.scale")},
    ),
    "parameter type changed": (
        scale("(values: Sequence[int], factor: str, offset: int = 0, *, strict: bool = True) -> list[int]"),
        {("parameter_type_changed", "sample.scale(factor)")},
    ),
    "parameter type narrowed": (
        scale("(values: list[int], factor: int, offset: int = 0, *, strict: bool = True) -> list[int]"),
        {("parameter_type_changed", "sample.scale(values)")},
    ),
    "literal narrowed": (function('Literal["fast", "exact"]', 'Literal["fast"]'), {("parameter_type_changed", "sample.pick(mode)")}),
    "callback asks for more": (
        function("apply(function: Callable[[int], int]", "apply(function: Callable[[int, int], int]"),
        {("parameter_type_changed", "sample.apply(function)")},
    ),
    "type variable replaced": (
        function("items: Sequence[T], default", "items: Sequence[int], default"),
        {("parameter_type_changed", "sample.first(items)")},
    ),
    "type of a method's parameter changed": (
        shape("def area(self, radius: float,", "def area(self, radius: str,"),
        {("parameter_type_changed", "sample.Circle.area(radius)")},
    ),
    "type of a class method's parameter changed": (
        shape("def unit(cls, name: str)", "def unit(cls, name: int)"),
        {("parameter_type_changed", "sample.Circle.unit(name)")},
    ),
    "type of a property changed": (
        shape("def label(self) -> str:", "def label(self) -> bytes:"),
        {("attribute_type_changed", "sample.Circle.label")},
    ),
    "type of a dataclass field changed": (
        shape("    width: int\n", "    width: str\n"),
        {("parameter_type_changed", "sample.DrawConfig(width)"), ("attribute_type_changed", "sample.DrawConfig.width")},
    ),
    "type of a constant changed": (
        [Edit("sample/deep/tools.py", "LIMIT: int = 3", 'LIMIT: str = "3"')],
        {("attribute_type_changed", "sample.deep.tools.LIMIT")},
    ),
    "type alias narrowed": (shape("Size = int | float", "Size = int | bool"), {("alias_narrowed", "sample.Size")}),
    "overload removed": (
        function(
            "@overload\ndef parse(text: str) -> str: ...\n@overload\ndef parse(text: bytes) -> bytes: ...\ndef parse(text):",
            "def parse(text: str) -> str:",
        ),
        {("overload_removed", "sample.parse")},
    ),
    "function made a coroutine": (function("def bare(x, y=1):", "async def bare(x, y=1):"), {("async_changed", "sample.bare")}),
    "coroutine made a function": (function("async def fetch", "def fetch"), {("async_changed", "sample.fetch")}),
    "coroutine method made a method": (shape("    async def load", "    def load"), {("async_changed", "sample.Circle.load")}),
    "function made a generator": (
        function("    return list(range(count))", "    yield from range(count)"),
        {("generator_changed", "sample.untyped_rows")},
    ),
    "context manager made a function": (function("@contextmanager\n", ""), {("wrapper_changed", "sample.opened")}),
    # stability
    "made internal in the commit that breaks it": (
        [Edit(FUNCTIONS, "def bare(x, y=1):\n    return x + y", "@internal_api\ndef bare(x):\n    return x")],
        {("stability_lowered", "sample.bare"), ("parameter_removed", "sample.bare(y)")},
    ),
    "experimental made internal": (
        function("@experimental_api\ndef trial", "@internal_api\ndef trial"),
        {("stability_lowered", "sample.trial")},
    ),
    "class made experimental": (
        shape("class Circle(Base):", "@experimental_api\nclass Circle(Base):"),
        {("stability_lowered", "sample.Circle")},
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_found_and_asks_for_a_breaking_version(name, tmp_path):
    edits, expected = BREAKS[name]
    findings = findings_after(tmp_path, *edits)
    assert counted(findings, Bump.BREAK) == expected
    assert not verdict(findings, "0.1.0") and not verdict(findings, "0.1.1")
    never = any(finding.bump is Bump.NEVER for finding in findings)
    assert verdict(findings, "0.2.0") is not never
    assert all(finding.file.startswith("sample/") for finding in findings)


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


HARMLESS = {
    "nothing": [],
    "docstring and body": function(
        '"""Scales and shifts."""\n    return [factor * value', '"""Other words."""\n    return [value * factor'
    ),
    "union spelt the old way": function("-> Base | None:", '-> "Base | None":'),
    "parameter type widened": scale("(values: Iterable[int], factor: int, offset: int = 0, *, strict: bool = True) -> list[int]"),
    "return type narrowed": function("-> Base | None:", "-> Base:"),
    "annotations added": function("def bare(x, y=1):", "def bare(x: int, y: int = 1) -> int:"),
    "literal widened": function('Literal["fast", "exact"]', 'Literal["fast", "exact", "slow"]'),
    "type alias widened": shape("Size = int | float", "Size = int | float | str"),
    "private function changed": function("def helper_of_nobody(x: int) -> int:\n    return x\n", ""),
    "private method changed": shape("    def _private(self, x: int) -> int:\n        return x\n", ""),
    "base class inserted between": [
        Edit(SHAPES, "class Circle(Base):", "class Round(Base):\n    pass\n\n\nclass Circle(Round):"),
    ],
    "base class of another package replaced by its child": shape("class Failure(OSError):", "class Failure(ConnectionError):"),
    "method left to a base class of another package": shape('    def copy(self) -> "Table":\n        return self\n', ""),
    "experimental made stable": function("@experimental_api\ndef trial", "def trial"),
    "method moved up to the base class": [
        Edit(SHAPES, "    @property\n    def label(self) -> str:\n        return self.name\n", ""),
        Edit(
            SHAPES,
            "class Circle(Base):",
            "class _Labelled(Base):\n    @property\n    def label(self) -> str:\n        return self.name\n\n\nclass Circle(_Labelled):",
        ),
    ],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_edit_asks_for_nothing(name, tmp_path):
    findings = findings_after(tmp_path, *HARMLESS[name])
    assert counted(findings, Bump.NONE) == set()


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


EXEMPT = {
    "experimental function": function("@experimental_api\ndef trial(x: int) -> int:", "@experimental_api\ndef trial(y: str) -> str:"),
    "experimental function that became stable": function("@experimental_api\ndef trial(x: int) -> int:", "def trial(y: str) -> str:"),
    "experimental function removed": [
        *without_name("trial"),
        Edit(FUNCTIONS, "@experimental_api\ndef trial(x: int) -> int:\n    return x\n", ""),
    ],
    "internal function": function("@internal_api\ndef inner(x: int) -> int:", "@internal_api\nasync def inner() -> None:"),
    "member of an experimental class": shape("    def sketch(self, x: int) -> int:\n        return x\n", "    pass\n"),
}


@pytest.mark.parametrize("name", EXEMPT)
def test_what_the_last_release_marked_may_change(name, tmp_path):
    findings = findings_after(tmp_path, *EXEMPT[name])
    assert counted(findings, Bump.BREAK) == set()
    assert any(not finding.counts and finding.exempt.endswith("in the last release") for finding in findings)


REMOVE_OLD_SCALE = [
    *without_name("old_scale"),
    Edit(
        FUNCTIONS,
        '@deprecated(version="0.1.0", removal_version="0.3.0", alternative="sample.scale")\n'
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
    source = edited(tmp_path, *function("def bare(x, y=1):", f"{decorator}\ndef bare(x, y=1):"))
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
