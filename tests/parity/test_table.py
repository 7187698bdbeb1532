# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The table of families says what is tested, and nothing is in the registry that is not."""

from mcore_ckpt.hf._families import FAMILIES
from tests.parity.ours import TOLERANCE
from tests.parity.references import ALL_LAYOUTS, REFERENCES
from tests.parity.table import PAGE, read_results, render, with_table


def test_the_committed_table_is_what_references_and_results_say() -> None:
    page = PAGE.read_text()
    assert with_table(page, render(read_results())) == page, "run `nox -s parity -- --write-table`"


def test_the_results_are_those_of_every_reference_in_every_layout_and_good_enough() -> None:
    results = read_results()
    assert {name: tuple(layouts) for name, layouts in results.items()} == {name: one.layouts for name, one in REFERENCES.items()}
    assert all(error < TOLERANCE for layouts in results.values() for one in layouts.values() for error in one.values())


def test_every_family_has_a_row_and_a_missing_layout_has_a_reason() -> None:
    assert {one.family for one in REFERENCES.values() if one.shown} == FAMILIES.keys()
    assert all(one.note for one in REFERENCES.values() if one.layouts != ALL_LAYOUTS and one.shown)
