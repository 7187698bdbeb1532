# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every family in every layout against transformers: logits, and the gradient of every parameter.

The whole is ``nox -s parity``; the default run has one rank for all families, and several ranks for one of them.
"""

from typing import Any

import pytest

from tests.parity.ours import compare
from tests.parity.references import REFERENCES


def _cases(layout: str) -> list[Any]:
    defined = [name for name, reference in REFERENCES.items() if layout in reference.layouts]
    return [pytest.param(name, marks=() if name == "llama3" else pytest.mark.slow) for name in defined]


@pytest.mark.parametrize("name", REFERENCES)
def test_logits_and_gradients_are_those_of_transformers(name: str, reference, note) -> None:
    note(name, "tp1", [compare(reference(name), "tp1")])


@pytest.mark.world(2)
@pytest.mark.parametrize("name", _cases("tp2"))
def test_so_they_are_over_two_tensor_parallel_ranks(world, name: str, reference, note) -> None:
    note(name, "tp2", world(compare, folder=reference(name), layout="tp2"))


@pytest.mark.world(2)
@pytest.mark.parametrize("name", _cases("pp2"))
def test_so_they_are_over_two_pipeline_stages(world, name: str, reference, note) -> None:
    note(name, "pp2", world(compare, folder=reference(name), layout="pp2"))


@pytest.mark.world(4)
@pytest.mark.parametrize("name", _cases("tp2 x cp2"))
def test_so_they_are_with_context_parallelism_too(world, name: str, reference, note) -> None:
    note(name, "tp2 x cp2", world(compare, folder=reference(name), layout="tp2 x cp2"))
