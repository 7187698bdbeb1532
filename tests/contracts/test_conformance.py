# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The check itself finds what is wrong."""

from typing import Any, Protocol

import pytest
from torch import nn

from tests.contracts.conformance import mismatches


class Base(Protocol):
    def step(self, *, lr: float) -> Any: ...


class Wanted(Base, Protocol):
    @property
    def size(self) -> int: ...
    def __call__(self, q: Any, k: Any) -> Any: ...


class Right:
    size = 3

    def step(self, lr: float = 1.0, further: int = 0) -> None: ...
    def __call__(self, query: Any, key: Any, mask: Any = None) -> None: ...


class OtherKeyword(Right):
    def step(self, *, rate: float = 1.0) -> None: ...  # type: ignore[override]


class MoreArguments(nn.Module):
    size = 3

    def step(self, *, lr: float) -> None: ...
    def forward(self, query: Any, key: Any, value: Any) -> None: ...


class Nothing:
    pass


@pytest.mark.parametrize(
    ("provider", "wrong"),
    [(Right(), []), (OtherKeyword(), ["step"]), (MoreArguments(), ["__call__"]), (Nothing(), ["no __call__", "no size", "no step"])],
)
def test_what_a_provider_lacks_is_named(provider: Any, wrong: list[str]) -> None:
    assert sorted(text.split(":")[0] for text in mismatches(provider, Wanted)) == wrong
