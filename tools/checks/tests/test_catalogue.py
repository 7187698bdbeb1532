# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The gate finds every breaking edit of the catalogue and raises no false alarm."""

from collections.abc import Iterator

import pytest

from tools.checks._api import KINDS, Bump, Checker, Finding
from tools.checks._catalogue import EXPECTATIONS, CatalogueEdit, disagreement, judge, read_catalogue
from tools.checks._tree import ROOT

EDITS = read_catalogue()


@pytest.fixture(scope="module")
def verdicts() -> Iterator[dict[str, list[Finding]]]:
    yield judge(EDITS)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.package)
def test_an_edit_has_the_verdict_that_the_catalogue_expects(edit: CatalogueEdit, verdicts: dict[str, list[Finding]]):
    assert disagreement(edit, verdicts[edit.name]) == ""


def test_the_catalogue_is_large_and_holds_harmless_edits_too():
    harmless = [edit for edit in EDITS if edit.expect in ("nothing", "exempt", "addition")]
    assert len(EDITS) >= 150 and len(harmless) >= 100 and all(edit.reason for edit in EDITS)


def test_every_breaking_kind_occurs():
    rules_met = {text.partition(" ")[0] for edit in EDITS for text in edit.findings}
    # These are rules for trees, not changes; test_api.py and test_api_release.py hold them.
    rules = {"acceptance_unused", "acceptance_void", "all_missing", "config_not_keyword_only", "name_shadowed", "surface_stale"}
    assert {kind for kind, (bump, _) in KINDS.items() if bump >= Bump.BREAK} - rules_met == rules


def test_one_comparison_starts_the_type_checker_once_a_tree():
    checker = Checker()
    judge([edit for edit in EDITS if edit.topic == "types"], checker=checker)
    assert checker.runs == 2


def test_a_wrong_expectation_is_noticed():
    edit = CatalogueEdit(topic="x", name="x", old="", new="", expect="nothing", reason="")
    assert "expects nothing" in disagreement(edit, [Finding(kind="name_removed", path="f", text="gone")])
    assert disagreement(edit, []) == ""


def test_an_entry_that_means_nothing_is_refused(tmp_path):
    (tmp_path / "x.toml").write_text('[[edit]]\nname = "a"\nold = ""\nnew = ""\nexpect = "soon"\nreason = "r"\n')
    with pytest.raises(ValueError, match="expect='soon'"):
        read_catalogue(tmp_path)
    entry = '[[edit]]\nname = "a"\nold = ""\nnew = ""\nexpect = "break"\nreason = "r"\n'
    (tmp_path / "x.toml").write_text(entry * 2)
    with pytest.raises(ValueError, match="share a name"):
        read_catalogue(tmp_path)


def test_the_page_shows_the_catalogue_as_it_is():
    page = (ROOT / "docs" / "api-side-by-side.md").read_text()
    breaking = sum(EXPECTATIONS[edit.expect] >= Bump.BREAK for edit in EDITS)
    assert f"| all | {breaking} | {breaking} |" in page and f"| flagged among {len(EDITS) - breaking} that break nobody | | 0 |" in page
