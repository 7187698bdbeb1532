# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who has to approve what: patterns, last match, teams, authors, withdrawn approvals."""

import pytest

from tools.checks.approvals import Area, approving, area_of, missing, parse

OWNERS = """
# comment
*                        @core/all
/packages/mcore-moe/     @core/moe   # experts
/packages/*/src/*/_stability.py  @core/api
/docs/*                  @ann
*.toml                   @bob @core/moe
/packages/mcore-moe/free/
"""
AREAS = parse(OWNERS)
TEAMS = {"core/all": ["ann", "bob", "cat"], "core/moe": ["Cat"], "core/api": ["dan"]}


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("noxfile.py", "*"),
        ("packages/mcore-moe/src/mcore_moe/layer.py", "/packages/mcore-moe/"),
        ("packages/mcore-moe/src/mcore_moe/_stability.py", "/packages/*/src/*/_stability.py"),
        ("other/packages/mcore-moe/x.py", "*"),
        ("docs/index.md", "/docs/*"),
        ("docs/launch/slurm.md", "*"),
        ("packages/mcore-moe/pyproject.toml", "*.toml"),
        ("packages/mcore-moe/free/x", "/packages/mcore-moe/free/"),
    ],
)
def test_the_last_pattern_that_matches_decides(path, pattern):
    area = area_of(path, AREAS)
    assert area is not None and area.pattern == pattern


@pytest.mark.parametrize(
    ("pattern", "path", "covers"),
    [
        ("docs", "a/docs/b.md", True),
        ("docs/", "a/docs/b.md", True),
        ("/docs/", "a/docs/b.md", False),
        ("a/**/z.py", "a/z.py", True),
        ("a/**/z.py", "a/b/c/z.py", True),
        ("a/**", "a/b/c", True),
        ("*.py", "a/b.pyi", False),
        ("/a.py", "a_py", False),
    ],
)
def test_patterns_mean_what_they_mean_on_github(pattern, path, covers):
    assert Area(pattern=pattern, owners=()).covers(path) is covers


def need(*changed: str, approvers: tuple[str, ...] = (), author: str = "zoe") -> dict[str, list[str]]:
    return missing(changed, AREAS, approvers=set(approvers), author=author, teams=TEAMS)


def test_each_area_needs_an_approval_of_its_own():
    changed = ("noxfile.py", "packages/mcore-moe/a.py", "packages/mcore-moe/src/mcore_moe/_stability.py")
    assert set(need(*changed, approvers=("ann",))) == {"/packages/mcore-moe/", "/packages/*/src/*/_stability.py"}
    assert need(*changed, approvers=("cat", "dan")) == {}


def test_the_author_does_not_approve():
    assert need("docs/index.md", approvers=("Ann",), author="ann") == {"/docs/*": ["@ann"]}


def test_one_of_several_owners_is_enough_and_case_does_not_matter():
    assert need("x.toml", approvers=("cat",)) == {}
    assert need("x.toml", approvers=("BOB",)) == {}


def test_an_area_without_owners_needs_nobody_and_an_unknown_team_approves_nothing():
    assert need("packages/mcore-moe/free/x") == {}
    assert missing(["a"], parse("* @core/gone"), approvers={"ann"}, author="zoe", teams={}) == {"*": ["@core/gone"]}


def review(login: str, state: str, commit: str = "new") -> dict:
    return {"user": {"login": login}, "state": state, "commit_id": commit}


def test_the_last_verdict_counts_and_comments_are_none():
    reviews = [review("ann", "APPROVED"), review("bob", "APPROVED"), review("ann", "COMMENTED"), review("bob", "CHANGES_REQUESTED")]
    assert approving(reviews) == {"ann"}
    assert approving([review("ann", "APPROVED"), review("ann", "DISMISSED")]) == set()


def test_an_approval_of_an_older_commit_does_not_count():
    assert approving([review("ann", "APPROVED", "old"), review("bob", "APPROVED")], head="new") == {"bob"}


def test_a_word_that_is_no_owner_is_refused():
    with pytest.raises(ValueError, match="line 1"):
        parse("* nobody")
