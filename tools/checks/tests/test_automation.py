# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the workflows do, run here on recorded events."""

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.support.programs import REQUIRED, lacking
from tools.checks._tree import ROOT, wheels
from tools.checks.affected import affected, is_whole_run
from tools.checks.cherry_pick import pick, targets
from tools.checks.publish import dependents

EVENTS = Path(__file__).with_name("events")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def event(name: str) -> dict:
    return json.loads((EVENTS / f"{name}.json").read_text())


# ---- which wheels are tested


def test_a_change_runs_its_wheel_and_the_dependents():
    tree = wheels()
    assert affected(["packages/mcore-inference/src/x.py"], tree) == ["mcore-inference", *dependents("mcore-inference", tree)]
    assert affected(["packages/mcore-moe/README.md", "docs/index.md"], tree) == ["mcore-moe"]
    assert affected(["docs/index.md", "tools/mcore_tools/train.py"], tree) == []
    assert affected(["constraints/dev.txt"], tree) == affected(["noxfile.py"], tree) == list(tree)
    assert "megatron-fsdp" not in affected(["packages/mcore-parallel/a.py"], tree)


def test_the_label_turns_the_slim_run_into_the_whole_one():
    assert not is_whole_run(event("pull_request_opened"))
    assert is_whole_run(event("pull_request_labeled_run_tests"))
    assert is_whole_run(event("push_main"))


def test_the_command_writes_what_the_matrix_reads(tmp_path):
    command = [sys.executable, "-m", "tools.checks.affected", "--base", "HEAD", "--event"]
    slim = subprocess.run([*command, str(EVENTS / "pull_request_opened.json")], cwd=ROOT, capture_output=True, text=True, check=True)
    assert slim.stdout.splitlines() == ["wheels=[]", 'pythons=["3.11"]']
    whole = subprocess.run([*command, str(EVENTS / "push_main.json")], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = dict(line.split("=", 1) for line in whole.stdout.splitlines())
    assert json.loads(lines["wheels"]) == list(wheels()) and len(json.loads(lines["pythons"])) == 3


def test_every_session_of_the_week_is_there_and_one_audits_the_pins():
    jobs = yaml.safe_load((ROOT / ".github/workflows/weekly.yml").read_text())["jobs"]
    named = jobs["bounds"]["strategy"]["matrix"]["session"]
    sessions = re.findall(r"^def (\w+)\(session: nox\.Session", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert set(named) <= set(sessions) and "audit" in named
    # Nothing else runs what is tested beside the libraries of others.
    assert {"loggers", "peft", "ray", "trl"} <= set(named)


def test_every_test_without_a_gpu_has_one_session_and_the_gates_run_all_but_campaigns():
    source, settings = (ROOT / "noxfile.py").read_text(), tomllib.loads((ROOT / "pyproject.toml").read_text())
    options = settings["tool"]["pytest"]["ini_options"]["addopts"]
    chosen = {"tests": options.partition("-m '")[2].partition("'")[0]}
    for name in ("journeys", "campaigns"):
        [chosen[name]] = re.findall(r'"-m", "([^"]* and [^"]*)"', source.partition(f"\ndef {name}(")[2].partition("\n@nox.session")[0])
    for marks in itertools.product([False, True], repeat=3):
        marked = dict(zip(("gpu", "slow", "journey"), marks, strict=True))
        run_by = [name for name, expression in chosen.items() if eval(expression, {}, marked)]
        assert len(run_by) == (0 if marked["gpu"] else 1), marked
    gates = (ROOT / ".ci" / "run").read_text().partition("sessions=(")[2].partition(")")[0].split()
    assert gates[:2] == ["tests", "journeys"]
    # What is run beside the libraries of others, and what a release runs, has journeys too.
    for name in ("programs", "loggers", "peft", "trl", "ray", "lowest", "newest", "release", "tests_wheel"):
        assert "*WITH_JOURNEYS" in source.partition(f"\ndef {name}(")[2].partition("\n@nox.session")[0], name


def test_the_session_that_has_the_tools_of_the_site_looks_at_its_width():
    docs = (ROOT / "noxfile.py").read_text().partition("\ndef docs(")[2].partition("\n@nox.session")[0]
    named = re.findall(r'"(tools/\S+\.py)"', docs)
    assert '"docs")' in docs and named == ["tools/checks/tests/test_site_width.py"] and (ROOT / named[0]).is_file()


def test_what_needs_programs_of_the_system_is_run_where_they_may_not_lack():
    session = (ROOT / "noxfile.py").read_text().partition("PROGRAM_TESTS = [")[2].partition("]")[0]
    named = set(re.findall(r'"(\S+\.py)"', session))
    # The width of the site has a session of its own, and this file only names them.
    needs = re.compile(r"support\.(hosts|browser|programs) import")
    files = [*ROOT.glob("packages/*/tests/test_*.py"), *ROOT.glob("tools/tests/test_*.py"), *ROOT.glob("tests/*/test_*.py")]
    assert named == {str(path.relative_to(ROOT)) for path in files if needs.search(path.read_text(encoding="utf-8"))}
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["programs"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands[-2] == "sudo bash .ci/programs" and re.fullmatch(r"sudo .* nox .* -s programs", commands[-1])


@pytest.mark.parametrize(("value", "outcome"), [("", "skipped"), ("1", "failed")])
def test_what_lacks_is_skipped_or_fails(monkeypatch: pytest.MonkeyPatch, value: str, outcome: str):
    monkeypatch.setenv(REQUIRED, value)
    with pytest.raises(BaseException, match="needs a browser") as caught:
        lacking("needs a browser")
    assert caught.type.__name__.lower() == outcome


# ---- cherry-picks


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path, monkeypatch):
    for key in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(key, "t")
    for key in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(key, "t@example.com")
    origin, copy = tmp_path / "origin", tmp_path / "clone"
    origin.mkdir()
    git(origin, "init", "-q", "-b", "main")
    (origin / "a.txt").write_text("one\n")
    git(origin, "add", "-A")
    git(origin, "commit", "-q", "-m", "first")
    git(origin, "branch", "release/0.1")
    git(origin, "branch", "release/0.0")
    (origin / "b.txt").write_text("fix\n")
    git(origin, "add", "-A")
    git(origin, "commit", "-q", "-m", "Fix b")
    git(tmp_path, "clone", "-q", str(origin), str(copy))
    return copy


def merged(clone: Path) -> dict:
    record = event("pull_request_merged_cherry_pick")
    record["pull_request"]["merge_commit_sha"] = git(clone, "rev-parse", "origin/main")
    return record


def test_labels_of_a_merged_pull_request_name_the_branches():
    assert targets(event("pull_request_merged_cherry_pick")) == ["release/0.1"]
    assert targets(event("pull_request_opened")) == []
    late = event("pull_request_merged_cherry_pick") | {"action": "labeled", "label": {"name": "cherry-pick release/0.0"}}
    assert targets(late) == ["release/0.0"]
    hostile = event("pull_request_merged_cherry_pick")
    hostile["pull_request"]["labels"] = [{"name": "cherry-pick release/0.1 --exec x"}, {"name": "cherry-pick main"}]
    assert targets(hostile) == []


def test_a_merged_change_is_carried_to_the_release_branch(clone):
    made = pick(merged(clone), clone, push=True)
    assert made == [("cherry-pick/17-to-release-0.1", "release/0.1", "[release/0.1] Fix b when it is empty")]
    assert "cherry picked from commit" in git(clone, "log", "-1", "--format=%B", "origin/cherry-pick/17-to-release-0.1")
    assert git(clone, "diff", "--name-only", "origin/release/0.1", "origin/cherry-pick/17-to-release-0.1") == "b.txt"


def test_a_change_that_does_not_apply_says_so_and_pushes_nothing(clone):
    git(clone, "checkout", "-q", "-b", "other", "origin/release/0.1")
    (clone / "b.txt").write_text("another\n")
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "another b")
    git(clone, "push", "-q", "origin", "other:release/0.1")
    git(clone, "fetch", "-q")
    with pytest.raises(ValueError, match=r"does not apply to release/0\.1"):
        pick(merged(clone), clone, push=True)
    assert "cherry-pick" not in git(clone, "branch", "--remotes")


# ---- approvals, on recorded answers of the interface


def test_approvals_run_on_recorded_reviews(tmp_path):
    (tmp_path / "changed").write_text("packages/mcore-moe/src/mcore_moe/_router.py\n.github/workflows/ci.yml\n")
    command = [sys.executable, str(ROOT / "tools/checks/approvals.py"), "--codeowners", str(ROOT / ".github/CODEOWNERS")]
    command += ["--changed", str(tmp_path / "changed"), "--teams", str(EVENTS / "teams.json"), "--author", "zoe", "--head", "c" * 40]
    one = subprocess.run([*command, "--reviews", str(EVENTS / "reviews_one_area.json")], capture_output=True, text=True, check=False)
    assert one.returncode == 1 and "/.github/ waits for an approval by @mcore/infrastructure" in one.stdout
    both = subprocess.run([*command, "--reviews", str(EVENTS / "reviews_both_areas.json")], capture_output=True, text=True, check=False)
    assert both.returncode == 0, both.stdout


# ---- the files themselves


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_and_no_job_has_more_than_it_says(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", step["uses"]), step["uses"]
            # Text of others reaches a shell through the environment only.
            assert "${{" not in step.get("run", "")


def test_publishing_needs_no_secret_and_waits_for_the_gates():
    jobs = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


def test_the_image_is_pinned_by_digest_tagged_by_commit_and_not_run_by_root():
    text = (ROOT / "docker" / "Dockerfile").read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert bases and all(re.search(r"@sha256:[0-9a-f]{64}$", base) for base in bases)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "1000"
    assert 'image.revision="$COMMIT"' in text and 'f"mcore:{commit}"' in (ROOT / "noxfile.py").read_text()


def test_dependabot_watches_actions_packages_and_the_image():
    updates = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text())["updates"]
    assert {update["package-ecosystem"] for update in updates} == {"github-actions", "pip", "docker"}
