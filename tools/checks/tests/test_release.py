# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A release needs tag, version and changelog to agree, the same bytes twice, and an index that it installs from."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tools.checks._tree import Wheel, distributions, wheels
from tools.checks.publish import bill_of_materials, build, dependents, digest, needed, publish, serving
from tools.checks.release import branches_with, parse_tag, release_notes, sections

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


# ---- where the tag lies, what is built, what is published


def git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True)


def test_a_tag_is_released_from_main_or_a_release_branch_only(tmp_path):
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    git(tmp_path, "tag", "mcore-moe-v0.1.0")
    git(tmp_path, "checkout", "-q", "-b", "side")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "two")
    git(tmp_path, "tag", "mcore-moe-v0.2.0")
    assert branches_with("mcore-moe-v0.1.0", tmp_path) == ["main"]
    with pytest.raises(ValueError, match="lies on side"):
        branches_with("mcore-moe-v0.2.0", tmp_path)
    git(tmp_path, "branch", "release/0.2")
    assert branches_with("mcore-moe-v0.2.0", tmp_path) == ["release/0.2"]
    with pytest.raises(ValueError, match="not in this clone"):
        branches_with("mcore-moe-v9.9.9", tmp_path)


def test_a_wheel_is_released_with_its_siblings_before_it_and_its_dependents_gated():
    tree = wheels()
    assert needed("mcore-moe", tree) == ["mcore-parallel", "mcore-moe"]
    assert needed("mcore-ckpt", tree) == ["mcore-ckpt"]
    assert "mcore-rl" in dependents("mcore-parallel", tree) and "mcore-ckpt" not in dependents("mcore-parallel", tree)
    assert dependents("mcore-moe", tree) == []


def test_an_index_links_each_file_with_its_hash_and_never_replaces_one(tmp_path):
    wheel = tmp_path / "mcore_moe-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"one")
    publish([wheel], tmp_path / "index")
    with serving(tmp_path / "index") as address:
        page = urlopen(f"{address}mcore-moe/", timeout=10).read().decode()
        assert f"{wheel.name}#sha256={digest(wheel)}" in page and address.startswith("http://127.0.0.1:")
        assert urlopen(f"{address}mcore-moe/{wheel.name}", timeout=10).read() == b"one"
    publish([wheel], tmp_path / "index")
    wheel.write_bytes(b"two")
    with pytest.raises(ValueError, match="does not change"):
        publish([wheel], tmp_path / "index")


def test_the_bill_of_materials_names_files_and_requirements_and_no_machine(tmp_path):
    file = tmp_path / "mcore_moe-0.1.0-py3-none-any.whl"
    file.write_bytes(b"one")
    wheel = wheels()["mcore-moe"]
    bill = bill_of_materials(wheel, [file])
    assert bill["bomFormat"] == "CycloneDX" and bill["metadata"]["component"]["purl"] == f"pkg:pypi/mcore-moe@{wheel.version}"
    assert bill["metadata"]["component"]["components"][0]["hashes"][0]["content"] == digest(file)
    scopes = {component["name"]: component["scope"] for component in bill["components"]}
    assert scopes["torch"] == "required" and scopes["mcore-parallel"] == "required" and scopes["transformer-engine"] == "optional"
    assert bill == bill_of_materials(wheel, [file]) and str(tmp_path) not in json.dumps(bill)


@pytest.mark.parametrize("name", sorted(distributions()))
def test_the_bill_of_materials_has_exactly_the_requirements_of_the_project_file(name):
    wheel = distributions()[name]
    required, extras = wheel.project.get("dependencies", []), wheel.project.get("optional-dependencies", {}).values()
    bill = bill_of_materials(wheel, [])
    said = [(part["name"], each["value"]) for part in bill["components"] for each in part["properties"]]
    requirements = {str(Requirement(text)) for text in [*required, *(text for texts in extras for text in texts)]}
    assert sorted(said) == sorted((Requirement(text).name, text) for text in requirements) and len(requirements) >= 1
    names = {scope: {part["name"] for part in bill["components"] if part["scope"] == scope} for scope in ("required", "optional")}
    assert names["required"] == {Requirement(text).name for text in required} and len(bill["components"]) == sum(map(len, names.values()))
    assert bill["dependencies"][0]["dependsOn"] == sorted(part["bom-ref"] for part in bill["components"])


def test_two_builds_that_differ_are_refused(tmp_path, monkeypatch):
    fake = tmp_path / "uv"
    fake.write_text(
        f"#!{sys.executable}\nimport os, pathlib, sys\nout = pathlib.Path(sys.argv[sys.argv.index('--out-dir') + 1])\n"
        "out.mkdir(parents=True)\ndata = os.urandom(8) if os.environ.get('NOISE') else b'x'\n"
        "(out / 'a-1-py3-none-any.whl').write_bytes(data)\n"
    )
    fake.chmod(0o755)
    arguments = {"uv": str(fake), "constraints": tmp_path / "constraints.txt"}
    assert [path.name for path in build("a", tmp_path / "out", **arguments)] == ["a-1-py3-none-any.whl"]
    monkeypatch.setenv("NOISE", "1")
    with pytest.raises(ValueError, match=r"differ in a-1-py3-none-any\.whl"):
        build("a", tmp_path / "out", **arguments)
