# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The API gate as a command: where the last release is found, what may be accepted, what it prints, how it ends."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools.checks import api
from tools.checks._api import FORMATS, KINDS, CheckError, Finding, Report, given_bump, read_acceptances
from tools.checks._api._verdict import Bump, Version

FIXTURE = Path(__file__).with_name("fixture_wheel")
BARE = "def bare(x, y=1):\n    return x + y"


class Repository:
    """A repository with the fixture as its only wheel."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wheel = root / "packages" / "sample"
        shutil.copytree(FIXTURE, self.wheel, ignore=shutil.ignore_patterns("__pycache__"))
        self.git("init", "-q", "-b", "main")
        self.run("--write-surface")
        self.commit("first")

    def git(self, *arguments: str) -> str:
        settings = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(self.root), *settings, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, message: str) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")

    def replace(self, file: str, before: str, after: str) -> None:
        path = self.wheel / file
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))

    def set_version(self, version: str) -> None:
        self.replace("pyproject.toml", f'version = "{self.version}"', f'version = "{version}"')

    @property
    def version(self) -> str:
        return (self.wheel / "pyproject.toml").read_text().rpartition('version = "')[2].partition('"')[0]

    def release(self, version: str) -> str:
        """Commit of a release: version, changelog, tag."""
        self.set_version(version)
        self.replace("CHANGELOG.md", "## Unreleased\n", f"## Unreleased\n\n## {version} (2026-01-01)\n")
        commit = self.commit(f"release {version}")
        self.git("tag", f"sample-v{version}")
        return commit

    def break_something(self) -> None:
        self.replace("src/sample/_functions.py", BARE, "def bare(x):\n    return x")
        self.run("--write-surface")

    def run(self, *arguments: str) -> int:
        return api.main(list(arguments), repository=self.root)


@pytest.fixture
def repository(tmp_path):
    return Repository(tmp_path)


# ---- which release


def test_the_first_release_is_a_notice(repository, capsys):
    assert repository.run() == 0
    assert "first release, nothing to compare with" in capsys.readouterr().out


def test_the_commit_tagged_as_the_first_release_is_still_the_first_release(repository, capsys):
    repository.release("0.1.0")
    assert repository.run() == 0
    assert "first release" in capsys.readouterr().out


@pytest.mark.journey
def test_the_newest_tag_among_the_ancestors_is_the_baseline(repository, capsys):
    repository.release("0.1.0")
    repository.git("checkout", "-q", "-b", "side")
    repository.release("0.1.7")
    repository.git("checkout", "-q", "main")
    repository.break_something()
    repository.commit("break")
    assert repository.run() == 1
    out = capsys.readouterr().out
    assert "sample 0.1.0 -> 0.1.0: FAILED; the changes ask for a breaking version" in out
    assert "stable names break after a deprecation only" in out and "api/sample.accept.toml" in out
    for version in ("0.1.1", "0.2.0", "1.0.0"):
        repository.set_version(version)
        assert repository.run() == 1


def test_an_edited_tree_on_the_tagged_commit_is_compared_with_that_tag(repository, capsys):
    repository.release("0.1.0")
    repository.break_something()
    assert repository.run() == 1
    assert "parameter_removed         sample.bare(y)" in capsys.readouterr().out


def test_a_changed_default_asks_for_an_adding_version_everywhere(repository, capsys):
    repository.release("0.1.0")
    repository.replace("src/sample/_functions.py", "def bare(x, y=1):", "def bare(x, y=2):")
    repository.run("--write-surface")
    capsys.readouterr()
    assert repository.run("--format", "github") == 1
    out = capsys.readouterr().out
    assert "::error file=packages/sample/src/sample/_functions.py,line=" in out and "title=parameter_default_changed" in out
    assert "the changes ask for an adding version, the version is no step; the smallest version that fits is 0.1.1" in out
    repository.set_version("0.1.1")
    assert repository.run() == 0


def test_promises_of_the_metadata_are_compared_too(repository, capsys):
    repository.replace("pyproject.toml", 'version = "0.1.0"', 'version = "0.1.0"\ndependencies = ["torch>=2.11"]')
    repository.release("0.1.0")
    repository.replace("pyproject.toml", "torch>=2.11", "torch>=2.12")
    repository.commit("raise")
    assert repository.run() == 1
    assert "dependency_narrowed       torch: >=2.11 became >=2.12" in capsys.readouterr().out


def test_a_release_commit_is_compared_with_the_release_before(repository, capsys):
    repository.release("0.1.0")
    repository.break_something()
    repository.release("0.1.1")
    assert repository.run() == 1
    assert "sample 0.1.0 -> 0.1.1: FAILED" in capsys.readouterr().out


def test_a_recorded_commit_serves_where_the_tag_is_missing(repository, capsys):
    commit = repository.release("0.1.0")
    repository.git("tag", "-d", "sample-v0.1.0")
    (repository.root / "api" / "baselines.toml").write_text(f'[sample]\n"0.1.0" = "{commit}"\n')
    repository.break_something()
    repository.set_version("0.1.1")
    repository.commit("later")
    assert repository.run("--format", "json") == 1
    report = json.loads(capsys.readouterr().out.partition("\n")[2])[0]
    assert report["baseline"] == f"api/baselines.toml ({commit[:12]})"
    assert [(finding["kind"], finding["path"]) for finding in report["findings"]] == [("parameter_removed", "sample.bare(y)")]


def test_recording_a_baseline_is_one_command_and_from_then_on_the_gate_compares(repository, capsys):
    assert repository.run("--record-baseline") == 0
    repository.commit("record")
    assert repository.run("--record-baseline") == 0
    assert "sample 0.1.0: stands there already" in capsys.readouterr().out
    assert repository.run() == 0
    assert "sample 0.1.0 -> 0.1.0: OK" in capsys.readouterr().out
    repository.break_something()
    assert repository.run("--record-baseline") == 2
    assert "uncommitted changes" in capsys.readouterr().err
    repository.commit("break")
    assert repository.run() == 1
    assert "parameter_removed         sample.bare(y)" in capsys.readouterr().out
    assert repository.run("--record-baseline") == 2
    assert "recorded with other files" in capsys.readouterr().err


def test_a_recorded_tree_serves_where_its_commit_is_missing(repository, capsys):
    repository.run("--record-baseline")
    file = repository.root / "api" / "baselines.toml"
    commit = repository.git("rev-parse", "HEAD")
    file.write_text(file.read_text().replace(commit, "1" * 40))
    repository.break_something()
    repository.commit("break")
    assert repository.run() == 1
    assert "parameter_removed         sample.bare(y)" in capsys.readouterr().out


def test_additions_are_listed_for_review(repository, capsys):
    repository.release("0.1.0")
    repository.replace("src/sample/_functions.py", "def bare(x, y=1):", "def bare(x, y=1, z=2):")
    repository.run("--write-surface")
    capsys.readouterr()
    assert repository.run("--additions") == 0
    assert "1 additions" in (out := capsys.readouterr().out) and "parameter_added           sample.bare(z)" in out


def lose_tag_keep_changelog(repository):
    repository.release("0.1.0")
    repository.git("tag", "-d", "sample-v0.1.0")
    repository.replace("CHANGELOG.md", "## Unreleased\n", "## Unreleased\n\n- More.\n")


def later_version_without_any_trace(repository):
    repository.set_version("0.2.0")


def changelog_names_an_earlier_release(repository):
    lose_tag_keep_changelog(repository)
    repository.set_version("0.2.0")


def newest_release_has_no_tag(repository):
    repository.release("0.1.0")
    repository.release("0.2.0")
    repository.git("tag", "-d", "sample-v0.2.0")
    repository.set_version("0.3.0")


def recorded_commit_does_not_exist(repository):
    (repository.root / "api" / "baselines.toml").write_text(f'[sample]\n"0.1.0" = "{"1" * 40}"\n')


def recorded_commit_is_another_version(repository):
    commit = repository.commit("before")
    (repository.root / "api" / "baselines.toml").write_text(f'[sample]\n"0.0.9" = "{commit}"\n')


def recorded_name_is_short(repository):
    (repository.root / "api" / "baselines.toml").write_text('[sample]\n"0.1.0" = "abc"\n')


def no_repository(repository):
    shutil.rmtree(repository.root / ".git")


def file_does_not_parse(repository):
    (repository.wheel / "src/sample/deep/tools.py").write_text("def (")


def acceptance_without_a_reason(repository):
    text = '[[accept]]\nkind = "name_removed"\npath = "sample.x"\nversion = "0.1.0"\n'
    (repository.root / "api" / "sample.accept.toml").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lose_tag_keep_changelog, "0.1.0 was released"),
        (changelog_names_an_earlier_release, "0.1.0 was released"),
        (later_version_without_any_trace, "no earlier release is known"),
        (newest_release_has_no_tag, "0.2.0 was released"),
        (recorded_commit_does_not_exist, "git archive"),
        (recorded_commit_is_another_version, "should hold sample 0.0.9 and holds 0.1.0"),
        (recorded_name_is_short, "no full commit name"),
        (no_repository, "failed"),
        (file_does_not_parse, "cannot be parsed"),
        (acceptance_without_a_reason, "needs exactly the texts"),
    ],
)
def test_a_check_that_cannot_run_never_passes(spoil, message, repository, capsys, monkeypatch):
    # The folder above the repository may itself be one.
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.root.parent))
    spoil(repository)
    if (repository.root / ".git").exists():
        repository.commit("spoilt")
    assert repository.run() == 2
    assert message in capsys.readouterr().err


def test_a_failure_of_the_gate_itself_is_not_a_verdict(repository, capsys, monkeypatch):
    monkeypatch.setattr(api, "check_wheel", lambda *_: 1 / 0)
    assert repository.run() == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "given"),
    [
        ("0.1.0", "0.1.0", Bump.NONE),
        ("0.1.0", "0.1.1", Bump.ADDITION),
        ("0.1.9", "0.2.0", Bump.BREAK),
        ("0.1.0", "0.2.0.dev3", Bump.BREAK),
        ("0.9.0", "1.0.0", Bump.BREAK),
        ("1.2.3", "1.2.4", Bump.NONE),
        ("1.2.3", "1.3.0", Bump.ADDITION),
        ("1.2.3", "2.0.0", Bump.BREAK),
        ("0.2.0", "0.1.9", Bump.NONE),
    ],
)
def test_what_a_step_between_versions_announces(old, new, given):
    assert given_bump(Version(old), Version(new)) is given


def test_a_version_that_shrinks_fails(repository, capsys):
    repository.release("0.2.0")
    repository.set_version("0.1.9")
    repository.commit("back")
    assert repository.run() == 1
    assert "version_decreased" in capsys.readouterr().out


# ---- acceptances


def accept(repository: Repository, path: str = "sample.bare(y)", version: str = "0.1.1") -> None:
    text = f'[[accept]]\nkind = "parameter_removed"\npath = "{path}"\nreason = "Nobody passes it."\nversion = "{version}"\n'
    (repository.root / "api" / "sample.accept.toml").write_text(text)


def test_an_accepted_break_passes_until_its_version_and_is_void_after_it(repository, capsys):
    repository.release("0.1.0")
    repository.break_something()
    repository.set_version("0.1.1")
    repository.commit("break")
    accept(repository)
    assert repository.run() == 0
    assert "accepted for 0.1.1: Nobody passes it." in capsys.readouterr().out
    repository.set_version("0.1.2")
    assert repository.run() == 1
    out = capsys.readouterr().out
    assert "acceptance_void" in out and "break    parameter_removed" in out


def test_an_acceptance_without_use_fails(repository, capsys):
    repository.release("0.1.0")
    repository.commit("next")
    accept(repository)
    assert repository.run() == 1
    assert "acceptance_unused" in capsys.readouterr().out


def test_an_acceptance_covers_its_path_only(repository, capsys):
    repository.release("0.1.0")
    repository.break_something()
    repository.set_version("0.1.1")
    repository.commit("break")
    accept(repository, path="sample.scale(offset)")
    assert repository.run() == 1
    out = capsys.readouterr().out
    assert "acceptance_unused" in out and "break    parameter_removed" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[accept]", "no TOML"),
        ("[allow]\n", "unknown tables"),
        ('[[accept]]\nkind = "all"\npath = "x"\nreason = "r"\nversion = "0.1.0"\n', "kind='all' is unknown"),
        ('[[accept]]\nkind = "name_removed"\npath = "x"\nreason = " "\nversion = "0.1.0"\n', "needs exactly"),
        ('[[accept]]\nkind = "name_removed"\npath = "x"\nreason = "r"\nversion = "soon"\n', "no version"),
    ],
)
def test_an_acceptance_that_means_nothing_is_refused(text, message, tmp_path):
    file = tmp_path / "sample.accept.toml"
    file.write_text(text)
    with pytest.raises(CheckError, match=message):
        read_acceptances(file)


# ---- the surface as text


def test_a_stale_surface_fails_with_the_difference(repository, capsys):
    repository.replace("src/sample/_functions.py", "def bare(x, y=1):", "def bare(x, y=2):")
    assert repository.run() == 1
    out = capsys.readouterr().out
    assert "surface_stale" in out and "| -sample.bare(x, y = 1): def" in out and "| +sample.bare(x, y = 2): def" in out
    assert repository.run("--wheel", "sample", "--write-surface") == 0
    assert repository.run() == 0


def test_a_missing_surface_fails(repository):
    (repository.root / "api" / "sample.txt").unlink()
    assert repository.run() == 1


def test_the_surface_lists_names_marks_and_signatures_but_nothing_private(repository):
    lines = (repository.root / "api" / "sample.txt").read_text().splitlines()
    assert "sample.trial(x: int) -> int: def  [experimental]" in lines
    assert "sample.old_scale(values: Sequence[int]) -> list[int]: def  [deprecated, goes in 0.3.0]" in lines
    assert "sample.deep.Circle = sample.Circle" in lines
    assert "sample.DrawConfig.__init__(self, *, width: int, title: str = '') -> None: def" in lines
    assert "sample.parse overload 2 (text: bytes) -> bytes: def" in lines
    assert lines[2:] == sorted(lines[2:]) and not any("._" in line.replace(".__init__", "") for line in lines)


# ---- any two trees


def wheel_file(folder: Path, source: Path, version: str) -> Path:
    path = folder / f"sample-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as bundle:
        for file in sorted(source.rglob("*.py")):
            bundle.write(file, file.relative_to(source).as_posix())
        bundle.writestr(f"sample-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: sample\nVersion: {version}\n")
    return path


def test_two_trees_may_be_a_commit_a_folder_and_a_wheel_file(repository, tmp_path, capsys):
    first = repository.git("rev-parse", "HEAD")
    wheel = wheel_file(tmp_path, repository.wheel / "src", "0.1.0")
    repository.break_something()
    repository.set_version("0.1.1")
    new = ["--new", str(repository.wheel), "--package", "sample"]
    commit_lookup = ["--repository", str(repository.root)]
    for old in (["--old", first, *commit_lookup], ["--old", str(wheel)]):
        capsys.readouterr()
        assert repository.run(*old, *new) == 1
        assert "parameter_removed         sample.bare(y)" in capsys.readouterr().out
    assert repository.run("--old", str(wheel), *new, "--new-version", "0.2.0") == 0
    assert repository.run("--old", "no-such-commit", *new, *commit_lookup) == 2
    assert repository.run("--old", str(wheel), "--new", str(repository.wheel), "--package", "other") == 2
    assert repository.run("--old", str(wheel), "--new", str(repository.wheel / "src"), "--package", "sample") == 2
    assert "give --new-version" in capsys.readouterr().err
    assert repository.run("--old", str(wheel)) == 2
    assert repository.run("--wheel", "nothing") == 2


# ---- output


def findings() -> list[Finding]:
    return [
        Finding(kind="parameter_removed", path="sample.bare(y)", text="was: y = 1\nor | so", file="sample/_functions.py", line=32),
        Finding(kind="name_removed", path="sample.trial", text="gone", exempt="experimental in the last release"),
        Finding(kind="name_added", path="sample.more", text="new", file="sample/__init__.py"),
    ]


def report(version: str) -> Report:
    return Report(
        name="sample",
        old_version=Version("0.1.0"),
        new_version=Version(version),
        baseline="tag sample-v0.1.0",
        findings=findings(),
        prefix="packages/sample/src",
    )


def test_every_format_names_the_break_and_the_verdict():
    for name, render in FORMATS.items():
        text = render([report("0.1.1")])
        assert "sample.bare(y)" in text, name
        assert name == "sarif" or "FAILED" in text, name


def test_github_annotations_are_one_line_each_and_soften_when_the_version_grew():
    failed = FORMATS["github"]([report("0.1.1")]).splitlines()
    assert failed[0].startswith(
        "::error file=packages/sample/src/sample/_functions.py,line=32,title=parameter_removed::sample.bare(y): was: y = 1%0Aor"
    )
    assert failed[1].startswith("::error title=api::") and len(failed) == 2
    assert all(line.startswith("::notice ") for line in FORMATS["github"]([report("0.2.0")]).splitlines())


def test_markdown_cells_stay_in_their_row():
    rows = [line for line in FORMATS["markdown"]([report("0.1.1")]).splitlines() if line.startswith("| break")]
    assert len(rows) == 2 and "or \\| so" in rows[0]


def test_json_says_what_was_asked_and_given():
    record = json.loads(FORMATS["json"]([report("0.1.1")]))[0]
    assert (record["demanded"], record["given"], record["passed"]) == ("break", "addition", False)
    assert [finding["asks"] for finding in record["findings"]] == ["break", "break", "addition"]


def test_sarif_has_rules_places_fingerprints_and_suppressions():
    run = json.loads(FORMATS["sarif"]([report("0.1.1")]))["runs"][0]
    assert {rule["id"] for rule in run["tool"]["driver"]["rules"]} == {"name_added", "name_removed", "parameter_removed"}
    removed, exempt, added = run["results"]
    assert (removed["level"], exempt["level"], added["level"]) == ("error", "note", "note")
    assert removed["locations"][0]["physicalLocation"]["region"]["startLine"] == 32
    assert removed["partialFingerprints"] == {"api/v1": "sample:parameter_removed:sample.bare(y)"}
    assert exempt["suppressions"][0]["justification"] == "experimental in the last release"


def test_an_output_file_gets_the_report_and_the_screen_the_verdict(repository, tmp_path, capsys):
    target = tmp_path / "report.json"
    capsys.readouterr()
    assert repository.run("--format", "json", "--output", str(target)) == 0
    assert json.loads(target.read_text())[0]["wheel"] == "sample"
    assert capsys.readouterr().out.startswith("sample 0.1.0: OK")


def test_the_page_lists_every_kind():
    page = (Path(api.ROOT) / "docs" / "api-stability.md").read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []


def test_the_gate_runs_as_a_file():
    done = subprocess.run([sys.executable, str(Path(api.__file__)), "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--write-surface" in done.stdout
