# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The workspace check against small trees with one fault each."""

from pathlib import Path

import pytest

from tools.checks._tree import Wheel, distributions, wheels
from tools.checks.workspace import dependency_findings, file_findings, group_findings, member_findings, trace_findings


def wheel(name: str, version: str = "0.1.0", dependencies: tuple[str, ...] = (), **more: object) -> Wheel:
    project = {"name": name, "version": version, "requires-python": ">=3.11", "dependencies": list(dependencies), **more}
    return Wheel(folder=Path("packages") / name, project=project)


def tree(*members: Wheel) -> dict[str, Wheel]:
    return {member.name: member for member in members}


def test_a_range_that_admits_the_sibling_passes():
    assert not dependency_findings(tree(wheel("trunk", "0.1.7"), wheel("leaf", dependencies=("trunk>=0.1,<0.2", "torch>=2.11"))))


def test_a_sibling_outside_the_range_is_found():
    (finding,) = dependency_findings(tree(wheel("trunk", "0.2.0"), wheel("leaf", dependencies=("trunk>=0.1,<0.2",))))
    assert "excludes the trunk 0.2.0" in finding


@pytest.mark.parametrize(
    ("requirement", "problem"),
    [
        ("numpy", "no lower bound"),
        ("numpy<3", "no lower bound"),
        ("trunk>=0.1", "no upper bound"),
        ("torch>=2.11,<3", "upper bound"),
    ],
)
def test_a_missing_or_superfluous_bound_is_found(requirement, problem):
    (finding,) = dependency_findings(tree(wheel("trunk"), wheel("leaf", dependencies=(requirement,))))
    assert finding.startswith("leaf: ") and problem in finding


def test_extras_are_checked_like_dependencies():
    (finding,) = dependency_findings(tree(wheel("leaf", **{"optional-dependencies": {"fast": ["triton"]}})))
    assert "'triton' has no lower bound" in finding


def test_a_forgotten_member_and_another_python_are_found():
    root = {"project": {"requires-python": ">=3.11"}, "tool": {"uv": {"sources": {}}}}
    findings = member_findings(tree(wheel("leaf", **{"requires-python": ">=3.10"})), root)
    assert [finding.partition(":")[0] for finding in findings] == ["pyproject.toml", "leaf"]


def test_a_tool_without_lower_bound_is_found():
    assert len(group_findings({"dependency-groups": {"test": ["pytest>=9", "hypothesis", {"include-group": "x"}]}})) == 1


@pytest.mark.parametrize(
    "line",
    [
        "find-links = " + "/" + "opt/wheels",
        'open("' + "/" + 'tmp/x")',
        "see https://" + "registry.internal/simple",
        "url = http://" + "10.0.0.7:8000/",
        "pip install --extra-" + "index-url x",
        "from py" + "pi.org",
    ],
)
def test_traces_of_machines_are_found(line):
    assert trace_findings("nothing\n" + line)[0][0] == 2


@pytest.mark.parametrize(
    "line",
    [
        "server at http://127.0.0.1:8000/v1",
        "https://arxiv.org/abs/2104.04473",
        "packages/work/file",
        "model.layers/opt/step",
        "a/b",
        "tmp_path / 'x'",
    ],
)
def test_ordinary_text_is_no_trace(line):
    assert trace_findings(line) == []


def test_binary_files_are_passed_over(tmp_path):
    (tmp_path / "data.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.txt").write_text("/" + "home/me")
    assert len(file_findings(sorted(tmp_path.iterdir()), tmp_path)) == 1


def test_this_tree_has_six_wheels():
    assert len(wheels()) == 6


def test_the_application_is_released_like_the_wheels_that_it_brings():
    released = distributions()
    assert [name for name in released if name not in wheels()] == ["mcore-tools"]
    application = released["mcore-tools"]
    assert (application.source / "py.typed").is_file() and (application.folder / "CHANGELOG.md").is_file()
    assert {one.name for one in application.dependencies} > set(wheels())
