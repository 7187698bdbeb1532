# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The public names: sorted, there, in one place each."""

import importlib

import pytest

MODULES = [
    "mcore_ckpt",
    "mcore_ckpt.assets",
    "mcore_ckpt.chunks",
    "mcore_ckpt.cli",
    "mcore_ckpt.foreign",
    "mcore_ckpt.hf",
    "mcore_ckpt.inspect",
    "mcore_ckpt.manifest",
    "mcore_ckpt.restack",
    "mcore_ckpt.rewrite",
]


@pytest.mark.parametrize("name", MODULES)
def test_listed_names_are_sorted_and_exist(name):
    module = importlib.import_module(name)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(getattr(module, one) is not None for one in module.__all__)


def test_no_object_has_two_public_places():
    places = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for one in module.__all__:
            value = getattr(module, one)
            if not isinstance(value, int | str):
                assert places.setdefault(id(value), (name, one)) == (name, one)
