# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A release needs tag, version and changelog to agree."""

from pathlib import Path

import pytest
from packaging.version import Version

from tools.checks._tree import Wheel
from tools.checks.release import parse_tag, release_notes, sections

GOOD = "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-01)\n\n- Faster.\n\n## 0.1.0 (2026-11-21)\n\n- First.\n"


def tree(folder: Path, changelog: str = GOOD, version: str = "0.2.0") -> dict[str, Wheel]:
    (folder / "CHANGELOG.md").write_text(changelog)
    return {"mcore-moe": Wheel(folder=folder, project={"name": "mcore-moe", "version": version})}


def test_a_tag_splits_into_wheel_and_version():
    assert parse_tag("refs/tags/megatron-fsdp-v1.2.3rc1") == ("megatron-fsdp", Version("1.2.3rc1"))


@pytest.mark.parametrize("tag", ["v1.0.0", "mcore-moe-1.0.0", "mcore-moe-v", "mcore-moe-v1.x.0", "Mcore-v1.0"])
def test_other_tags_are_refused(tag):
    with pytest.raises(ValueError, match="tag"):
        parse_tag(tag)


def test_the_notes_are_the_section_of_the_version(tmp_path):
    wheel, notes = release_notes("mcore-moe-v0.2.0", tree(tmp_path))
    assert wheel.name == "mcore-moe" and notes == "- Faster."


def test_a_wheel_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no wheel here"):
        release_notes("mcore-mole-v0.2.0", tree(tmp_path))


def test_another_declared_version_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"says version 0\.1\.0"):
        release_notes("mcore-moe-v0.2.0", tree(tmp_path, version="0.1.0"))


@pytest.mark.parametrize(
    ("changelog", "reason"),
    [
        (GOOD.replace("## Unreleased\n", "## Unreleased\n\n- Later.\n"), "still has lines under Unreleased"),
        (GOOD.replace("0.2.0", "0.1.5"), r"newest version in the changelog of mcore-moe is 0\.1\.5"),
        (GOOD.replace("- Faster.\n", ""), "says nothing under"),
        (GOOD.replace("0.1.0", "0.3.0"), "newest first"),
        ("# Changelog\n\n## Unreleased\n\n- First.\n", "is none"),
    ],
)
def test_a_changelog_that_disagrees_is_refused(tmp_path, changelog, reason):
    with pytest.raises(ValueError, match=reason):
        release_notes("mcore-moe-v0.2.0", tree(tmp_path, changelog))


def test_a_heading_without_date_is_refused():
    with pytest.raises(ValueError, match="neither"):
        sections("## 0.2.0\n\n- Faster.\n")
