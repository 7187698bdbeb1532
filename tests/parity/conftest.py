# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the comparisons share: the models to compare with, and where the errors go."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from tests.parity.table import write_results


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-table", action="store_true", help="write the errors that were measured, and the table of families from them")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a reference model, which is made when it is asked for first."""
    pytest.importorskip("transformers")
    from tests.parity.references import write

    root = tmp_path_factory.mktemp("references")

    def folder(name: str) -> str:
        if not (root / name).exists():
            write(name, root / name)
        return str(root / name)

    return folder


@pytest.fixture(scope="session")
def note(pytestconfig: pytest.Config) -> Iterator[Callable[[str, str, Sequence[tuple[float, float]]], None]]:
    """Takes the errors (logits, gradients) that each rank found for a reference in a layout."""
    results: dict[str, dict[str, dict[str, float]]] = {}

    def take(name: str, layout: str, errors: Sequence[tuple[float, float]]) -> None:
        logits, gradients = (max(column) for column in zip(*errors, strict=True))
        results.setdefault(name, {})[layout] = {"logits": logits, "gradients": gradients}

    yield take
    if pytestconfig.getoption("--write-table", default=False):
        write_results(results)
